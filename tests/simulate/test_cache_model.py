"""The KV cache of simulated engines against a naive one: lists that are searched, of blocks with all tokens before them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from picker.sim.limits import EngineLimits
from picker.simulate.profiles import BUILT_IN
from picker.simulate.replay import replay
from picker.simulate.workload import Call, Session, Workload

SIZE, BLOCKS = 4, 12


class NaiveCache:
    """For requests that come one after the other."""

    def __init__(self) -> None:
        self.content: list[tuple[int, ...] | None] = [None] * BLOCKS
        self.free = list(range(BLOCKS))

    def serve(self, prompt: list[int], answer: list[int]) -> int:
        """Returns how many tokens of the prompt were cached."""
        table: list[int] = []
        while (len(table) + 1) * SIZE < len(prompt):
            prefix = tuple(prompt[: (len(table) + 1) * SIZE])
            if prefix not in self.content:
                break
            table.append(self.content.index(prefix))
        cached = len(table) * SIZE
        for block in table:
            self.free.remove(block)
        everything = prompt + answer
        computed = len(everything) - 1  # the last token that is generated is never fed back
        while len(table) * SIZE < computed:
            block = self.free.pop(0)
            full = (len(table) + 1) * SIZE
            self.content[block] = tuple(everything[:full]) if full <= computed else None
            table.append(block)
        kept = [block for block in reversed(table) if self.content[block] is not None]
        empty = [block for block in reversed(table) if self.content[block] is None]
        self.free = empty + self.free + kept
        return cached


pieces = st.builds(
    lambda start, length: range(start * 1000, start * 1000 + length), st.integers(0, 2), st.integers(1, 14)
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(pieces, min_size=1, max_size=2), st.integers(1, 10)), min_size=1, max_size=30))
def test_cached_tokens_are_those_of_the_naive_cache(requests: list[tuple[list[range], int]]) -> None:
    calls = tuple(
        Call(tuple(prompt), range(10**6 * (number + 1), 10**6 * (number + 1) + answer))
        for number, (prompt, answer) in enumerate(requests)
    )
    limits = EngineLimits(block_size=SIZE, num_gpu_blocks=BLOCKS + 1, watermark=0.0)
    workload = Workload("test", [Session(0.0, calls)], 0.0, 1e9)
    run = replay(workload, BUILT_IN["round-robin"], engines=1, seed=0, limits=limits)
    naive = NaiveCache()
    expected = [naive.serve([token for piece in call.prompt for token in piece], list(call.answer)) for call in calls]
    assert [sent.cached_tokens for sent in run.sent] == expected
