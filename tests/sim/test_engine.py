"""The engine model against a naive scheduler that walks every running request in every step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from picker.sim.block_cache import BlockCache, key_tokens
from picker.sim.engine import Engine, Request
from picker.sim.events import AllBlocksCleared, BlockStored, KvEvent
from picker.sim.limits import EngineLimits, StepCost

COST = StepCost()


@dataclass(eq=False)
class Naive:
    request: Request
    known: int
    computed: int = 0
    stored: int = 0
    table: list[int] = field(default_factory=list)
    cached: int | None = None
    prompt: bool = False  # it is computing a prompt, or recomputing one after a preemption


class NaiveEngine:
    """vLLM's loop, one request at a time: running ones in order, then the queue, then everybody gets what is due."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits, self.cache = limits, BlockCache(limits.num_gpu_blocks, limits.block_size)
        self.running: list[Naive] = []
        self.waiting: deque[Naive] = deque()
        self.scheduled: list[tuple[Naive, int, bool]] = []

    def store(self, one: Naive, length: int) -> None:
        full = length // self.limits.block_size
        if full > one.stored:
            self.cache.store(one.table, one.request.content, one.stored, full)
            one.stored = full

    def schedule(self) -> float:
        """Schedule a step; return how long it takes by the formula of the study."""
        size, budget, preempted = self.limits.block_size, self.limits.max_num_batched_tokens, False
        self.scheduled = []
        for one in list(self.running):
            if one not in self.running or budget == 0:
                continue
            chunk = min(budget, one.known - one.computed)
            needed = -(-one.known // size) - len(one.table)
            while needed > self.cache.free and one in self.running:
                victim = self.running.pop()
                self.cache.release(victim.table)
                victim.table, victim.computed, victim.stored = [], 0, 0
                self.waiting.appendleft(victim)
                preempted = True
            if one in self.running:
                one.table += self.cache.allocate(needed)
                self.store(one, one.computed + chunk)
                self.scheduled.append((one, chunk, one.prompt))
                budget -= chunk
        while self.waiting and not preempted and budget and len(self.running) < self.limits.max_num_seqs:
            one = self.waiting[0]
            hit = self.cache.match(one.request.content.keys, one.known)
            needed = -(-one.known // size) - len(hit)
            left = self.cache.free - needed - self.cache.unreferenced(hit)
            if left < 0 or (self.running and left < self.limits.watermark * (self.limits.num_gpu_blocks - 1)):
                break
            self.running.append(self.waiting.popleft())
            self.cache.reference(hit)
            one.table = hit + self.cache.allocate(needed)
            one.stored, one.computed = len(hit), len(hit) * size
            one.cached = one.computed if one.cached is None else one.cached
            chunk = min(budget, one.known - one.computed)
            self.store(one, one.computed + chunk)
            self.scheduled.append((one, chunk, True))
            one.prompt = True
            budget -= chunk
        a, b, c, d, q = 0.016, 83e-6, 60e-6, 38e-9, 40_000
        prefill = sum(n * (1 + (one.computed + n / 2) / q) for one, n, prompt in self.scheduled if prompt)
        decodes = [one.known for one, _, prompt in self.scheduled if not prompt]
        return a + b * prefill + c * len(decodes) + d * sum(decodes)

    def finish(self) -> list[Naive]:
        ended = []
        for one, chunk, _ in self.scheduled:
            one.computed += chunk
            if one.computed == one.known:
                one.known += 1
                one.prompt = False
                if one.known == len(one.request.content.tokens):
                    ended.append(one)
        for one in ended:
            self.running.remove(one)
            self.cache.release(one.table)
        return ended


prompts = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(0, 1), st.integers(0, 12)), min_size=1, max_size=14
)


@settings(max_examples=250, deadline=None)
@given(
    prompts,
    st.integers(1, 5).flatmap(
        lambda size: st.tuples(st.just(size), st.integers(28 // size + 2, 60 // size + 4))  # the longest must fit
    ),
    st.integers(1, 12).flatmap(lambda budget: st.tuples(st.just(budget), st.integers(1, min(budget, 5)))),
    st.sampled_from([0.0, 0.3]),
)
def test_every_step_is_what_the_naive_scheduler_does(
    plan: list[tuple[int, int, int, int]], pool: tuple[int, int], batch: tuple[int, int], watermark: float
) -> None:
    limits = EngineLimits(pool[0], pool[1], batch[0], batch[1], watermark)
    engine, naive = Engine(limits), NaiveEngine(limits)
    pairs, arrivals, now, step = [], deque(sorted(enumerate(plan), key=lambda item: item[1][3])), 0.0, 0
    while True:
        while arrivals and arrivals[0][1][3] <= step:
            number, (prompt, answer, flavour, _) = arrivals.popleft()
            tokens = [flavour] * prompt + [number + 2] * answer
            request = Request(str(number), key_tokens(tokens, limits.block_size), prompt)
            pairs.append((engine.submit(request, now), Naive(request, prompt)))
            naive.waiting.append(pairs[-1][1])
        end = engine.next_step(now)
        if end is None:
            if not arrivals:
                break
            step += 1
            continue
        assert end - now == pytest.approx(naive.schedule(), abs=1e-12)
        assert engine.cache.copies() == naive.cache.copies()
        output, ended = engine.finish_step(end), naive.finish()
        assert {m.request.id for m in output.finished} == {one.request.id for one in ended}
        for member, one in pairs:
            assert engine.generated(member) == one.known - one.request.prompt_tokens
            assert member.cached_tokens == one.cached
        assert (engine.running, engine.waiting) == (len(naive.running), len(naive.waiting))
        assert engine.cache.used == naive.cache.used
        now, step = end, step + 1
    assert all(
        engine.generated(member) == answer
        for (member, _), (_, answer, *_) in zip(pairs, sorted(plan, key=lambda p: p[3]), strict=True)
    )
    assert engine.cache.used == 0


def request(name: str, prompt: int, answer: int, first: int = 0, size: int = 16) -> Request:
    return Request(name, key_tokens(range(first, first + prompt + answer), size), prompt)


def drain(engine: Engine, now: float = 0.0) -> float:
    while (end := engine.next_step(now)) is not None:
        engine.finish_step(end)
        now = end
    return now


def test_a_step_takes_what_the_formula_says() -> None:
    # 64 decodes at 4,000 tokens of context: the study gives 30 ms with these constants.
    assert COST.step(0.0, 64, 64 * 4096) == pytest.approx(0.0298, abs=2e-4)
    # A prompt token at 40,000 tokens of context costs double.
    assert COST.prefill(1, 40_000) / COST.prefill(1, 0) == pytest.approx(2, abs=1e-3)
    engine = Engine(cost=StepCost(speed=4))
    engine.slow = 3
    engine.submit(request("a", 1000, 1), 0.0)
    assert engine.next_step(10.0) == pytest.approx(10 + 3 / 4 * (0.016 + 83e-6 * 1000 * (1 + 500 / 40_000)))


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    engine = Engine()
    engine.submit(request("long", 20_000, 2), 0.0)
    produced = []
    while (end := engine.next_step(0.0)) is not None:
        produced.append(engine.finish_step(end).tokens)
    assert produced == [0, 0, 1, 1]  # 8192 + 8192 + 3616, and one decode


def test_abort_frees_the_blocks_in_every_state() -> None:
    engine = Engine(EngineLimits(max_num_seqs=2, max_num_batched_tokens=40))
    decoding = engine.submit(request("decoding", 20, 50), 0.0)
    engine.finish_step(engine.next_step(0.0) or 0)
    engine.submit(request("prefilling", 100, 5, 1000), 0.0)
    engine.submit(request("waiting", 10, 5, 2000), 0.0)
    engine.finish_step(engine.next_step(0.0) or 0)
    assert (engine.generated(decoding), engine.running, engine.waiting) == (2, 2, 1)
    engine.next_step(0.0)  # also in the middle of a step
    assert [engine.abort(name) for name in ("decoding", "prefilling", "waiting", "nobody")] == [True, True, True, False]
    output = engine.finish_step(1.0)
    assert (output.tokens, output.first, output.finished) == (0, (), ())
    assert (engine.running, engine.waiting, engine.cache.used) == (0, 0, 0)
    assert engine.next_step(2.0) is None


def test_the_answer_of_one_turn_is_hit_in_the_next() -> None:
    engine = Engine()
    engine.submit(request("turn 1", 40, 41), 0.0)
    drain(engine)
    second = engine.submit(request("turn 2", 100, 1), 0.0)
    drain(engine)
    # 40 + 41 tokens, the last of which is never computed: five full blocks of 16.
    assert second.cached_tokens == 80
    assert (engine.prefix_queries, engine.prefix_hits) == (140, 80)


def test_events_come_once_per_step_and_a_reset_with_the_next_one() -> None:
    batches: list[tuple[list[KvEvent], float]] = []
    engine = Engine(publish=lambda events, now: batches.append((events, now)))
    engine.submit(request("a", 32, 3), 0.0)
    end = drain(engine)
    assert len(batches) == 1
    assert 0 < batches[0][1] < end
    assert engine.reset_prefix_cache()
    assert len(batches) == 1
    engine.submit(request("a", 32, 3), end)
    drain(engine, end)
    cleared, stored = batches[1][0]
    assert cleared == AllBlocksCleared()
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash is None


def test_a_reset_is_refused_while_blocks_are_in_use() -> None:
    engine = Engine()
    engine.submit(request("a", 32, 3), 0.0)
    engine.next_step(0.0)
    assert not engine.reset_prefix_cache()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", 10, 3, size=8), "block_size is 8"),
        (request("a", 10, 0), "prompt_tokens is 10 of 10"),
        (request("a", 0, 10), "prompt_tokens is 0"),
        (request("a", 1000, 30), "the longest request is 1024"),
        (request("used", 10, 3), "id is 'used'"),
    ],
)
def test_a_request_that_could_never_run_is_refused(bad: Request, message: str) -> None:
    engine = Engine(EngineLimits(num_gpu_blocks=65))
    engine.submit(request("used", 10, 3), 0.0)
    with pytest.raises(ValueError, match=message):
        engine.submit(bad, 0.0)
    assert engine.waiting == 1


def test_limits_that_cannot_work_together_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 10"):
        EngineLimits(max_num_seqs=10, max_num_batched_tokens=9)
    with pytest.raises(ValueError, match="watermark is 1"):
        EngineLimits(watermark=1)
