"""What the demo sends, how it measures, and how it sums up."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from picker.app.demo import report
from picker.app.demo.load import Outcome, send
from picker.app.demo.workload import Session, Shape, Turn, Workload, plan
from picker.sim.config import EngineSimConfig
from picker.sim.faults import Fault
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from picker.sim.tokenizer import encode


class TestWorkload:
    def test_it_is_the_same_for_the_same_seed_only(self):
        shape = Shape()
        first = plan(shape, engines=2, seconds=10, seed=7)
        assert plan(shape, engines=2, seconds=10, seed=7) == first
        assert plan(shape, engines=2, seconds=10, seed=8) != first

    @pytest.mark.parametrize("engines", [2, 4, 8])
    def test_prompts_exceed_one_cache_and_fit_all(self, engines):
        shape = Shape()
        prompts = plan(shape, engines=engines, seconds=1, seed=1).prompts
        assert len({prompt[:64] for prompt in prompts}) == len(prompts)
        tokens = sum(len(encode(prompt)) for prompt in prompts)
        assert shape.cache_tokens < tokens < 0.75 * shape.cache_tokens * engines
        assert tokens == pytest.approx(shape.prompt_tokens * len(prompts), rel=0.01)

    def test_arrivals_turns_and_popularity_are_as_documented(self):
        shape = Shape(prompts=2, prompt_tokens=1, question_tokens=1)
        workload = plan(shape, engines=2, seconds=2_000, seed=3)
        sessions = workload.sessions
        starts = [session.start for session in sessions]
        assert starts == sorted(starts)
        gaps = np.diff(starts)
        expected = shape.mean_turns / (shape.requests_per_second * 2)
        assert gaps.mean() == pytest.approx(expected, rel=0.05)
        assert gaps.std() == pytest.approx(expected, rel=0.05)  # exponential: as large as the mean
        turns = [len(session.turns) for session in sessions if session.start < 1_900]
        mean = sum((2 / 3) ** number for number in range(10))  # turn number + 1 comes with this chance
        assert np.mean(turns) == pytest.approx(mean, rel=0.05)
        thinks = [turn.think for session in sessions for turn in session.turns[1:]]
        assert np.mean(thinks) == pytest.approx(shape.think_seconds, rel=0.05)
        assert {session.turns[0].think for session in sessions} == {0.0}
        counts = np.bincount([session.prompt for session in sessions])
        weights = np.arange(1, 5) ** -0.5
        np.testing.assert_allclose(counts / counts.sum(), weights / weights.sum(), rtol=0.1)

    @given(seed=st.integers(0, 50), seconds=st.floats(1, 8))
    def test_nothing_is_due_after_the_end(self, seed, seconds):
        workload = plan(Shape(prompt_tokens=1), engines=2, seconds=seconds, seed=seed)
        for session in workload.sessions:
            assert session.turns
            assert session.start + sum(turn.think for turn in session.turns) <= seconds
        assert workload.requests == sum(len(session.turns) for session in workload.sessions)


class TestSummary:
    @given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([1, 50, 90, 99, 100]))
    def test_percentiles_are_values_that_occurred(self, values, percent):
        assert report.percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")

    def test_no_answer_at_all(self):
        summary = report.summarize([Outcome("", 0.0, "refused")], ["a"])
        assert (summary.requests, summary.errors, summary.ttft_p99_ms, summary.cached_token_rate) == (1, 1, 0, 0)
        assert set(report.ratios(summary, summary).values()) == {0.0}

    def test_an_arm_by_hand(self):
        outcomes = [
            Outcome("a", 0.001, None, 0.1, 100, 0),
            Outcome("a", 0.002, None, 0.2, 100, 80),
            Outcome("b", 0.060, None, 0.4, 200, 160),
            Outcome("b", 0.003, "status 500"),
        ]
        summary = report.summarize(outcomes, ["a", "b", "c"])
        assert summary == report.Summary(
            ttft_p50_ms=200.0,
            ttft_p90_ms=400.0,
            ttft_p99_ms=400.0,
            cached_token_rate=0.6,
            requests=4,
            errors=1,
            requests_per_engine={"a": 2, "b": 1, "c": 0},
            generator_lateness_p99_ms=60.0,
        )
        assert summary.lagged
        other = report.summarize(outcomes[:2], ["a", "b", "c"])
        assert not other.lagged
        assert report.ratios(summary, other) == {
            "ttft_p50_ms": 2.0,
            "ttft_p90_ms": 2.0,
            "ttft_p99_ms": 2.0,
            "cached_token_rate": 0.67,
        }
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(report.table(summary, other))
        text = console.export_text()
        assert re.search(r"TTFT p90\W+400 ms\W+200 ms\W+2\.00×", text)
        assert re.search(r"prompt tokens from cache\W+60\.0%\W+40\.0%\W+0\.67×", text)
        console.print(report.table(summary, other, summary))
        text = console.export_text()
        assert re.search(r"TTFT p90\W+400 ms\W+200 ms\W+400 ms\W+2\.00×\W+1\.00×", text)
        assert report.as_json(summary, other, summary)["kvcache_aware_times_better"]["ttft_p90_ms"] == 1.0


class TestLoad:
    """Against a simulated engine without Envoy."""

    WORKLOAD = Workload(
        ("You are terse. " * 20,),
        (Session(0.0, 0, (Turn(0.0, "Who are you?", 5), Turn(0.01, "Since when?", 4), Turn(0.0, "Why?", 3))),),
    )

    @staticmethod
    async def outcomes(workload, fault):
        engine = await start_engine(EngineSimConfig(cost=StepCost(speed=100), fault=fault, grace=0))
        try:
            told = []
            assert await send(engine.url, workload, told.append) == told
            return told, engine.stats()
        finally:
            await engine.close()

    async def test_conversations_grow(self):
        outcomes, stats = await self.outcomes(self.WORKLOAD, Fault())
        assert [outcome.error for outcome in outcomes] == [None] * 3
        assert {outcome.engine for outcome in outcomes} == {"engine-0"}
        assert all(outcome.first_token > 0 for outcome in outcomes)
        sizes = [outcome.prompt_tokens for outcome in outcomes]
        # Another answer, another question, and the marks of two messages.
        assert sizes[1] - sizes[0] >= 5 + 3
        assert sizes == sorted(sizes)
        # Everything before is in the cache in full blocks, but for the answer's last token, which was never computed on.
        cached = [(size + answer - 1) // 16 * 16 for size, answer in zip(sizes, (5, 4), strict=False)]
        assert [outcome.cached_tokens for outcome in outcomes] == [0, *cached]
        assert stats["generated_tokens"] == 5 + 4 + 3
        assert stats["prompt_tokens"] == sum(sizes)

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            (Fault(mode="error", status=503), "status 503: "),
            (Fault(mode="abort", after_chunks=1), "ClientPayloadError: "),
        ],
    )
    async def test_failures_are_errors_with_a_reason(self, fault, error):
        outcomes, _ = await self.outcomes(self.WORKLOAD, fault)
        assert error in outcomes[0].error
        assert [outcome.error for outcome in outcomes[1:]] == ["not asked, since the answer before it failed"] * 2
