"""Waiting for blocks that an engine stores, against counting them the long way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from picker.core.block_index.watches import MOST_BLOCKS, MOST_PER_WATCH, Watches


class Told:
    def __init__(self) -> None:
        self.blocks = 0
        self.over = 0

    def __call__(self, blocks: int, last: bool, now: float) -> None:  # noqa: ARG002
        assert blocks > 0
        self.blocks += blocks
        self.over += last


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 12), max_size=8, unique=True)), min_size=1, max_size=6
    ),
    stores=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 12), max_size=4, unique=True)), max_size=20),
)
def test_every_prompt_is_told_how_far_it_is(prompts, stores):
    watches = Watches()
    told = []
    waiting = []
    for slot, keys in prompts:
        told.append(Told())
        waiting.append(watches.add(slot, keys, told[-1]))
        assert (waiting[-1] is None) == (not keys)
    far = [0] * len(prompts)
    for slot, keys in stores:
        watches.stored(slot, keys, 1.0)
        for number, (own, wanted) in enumerate(prompts):
            reached = [wanted.index(key) + 1 for key in keys if key in wanted and own == slot]
            if far[number] < len(wanted):
                far[number] = max([far[number], *reached])
    assert [one.blocks for one in told] == far
    assert [one.over for one in told] == [
        int(bool(wanted) and done == len(wanted)) for (_, wanted), done in zip(prompts, far, strict=True)
    ]
    for watch in waiting:
        if watch is not None:
            watches.remove(watch)
            watches.remove(watch)
    assert watches.blocks == 0


def test_a_long_prompt_is_followed_in_steps_and_to_its_end():
    watches, told = Watches(), Told()
    keys = list(range(10 * MOST_PER_WATCH + 3))
    watches.add(0, keys, told)
    assert watches.blocks <= MOST_PER_WATCH
    watches.stored(0, keys[:1000], 1.0)
    assert 985 < told.blocks <= 1000
    watches.stored(0, keys[1000:], 2.0)
    assert (told.blocks, told.over, watches.blocks) == (len(keys), 1, 0)


def test_what_is_waited_for_is_bounded():
    watches = Watches()
    prompts = 0
    while watches.add(0, [prompts * MOST_PER_WATCH + key for key in range(MOST_PER_WATCH)], Told()) is not None:
        prompts += 1
    assert prompts * MOST_PER_WATCH == MOST_BLOCKS
    assert watches.refused == 1
    watches.forget(0)
    assert watches.blocks == 0
    assert watches.add(0, [1], Told()) is not None


def test_a_forgotten_slot_tells_nothing_to_those_who_waited_for_its_predecessor():
    watches, before, after = Watches(), Told(), Told()
    old = watches.add(0, [1, 2], before)
    watches.forget(0)
    watches.add(0, [1, 2], after)
    watches.remove(old)
    watches.stored(0, [1, 2], 1.0)
    assert (before.over, after.over) == (0, 1)
