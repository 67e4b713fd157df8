"""Load filters and scorers: the vectors of Kthena's router, unknown metrics, and what holds for any load."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.engine_page import PageReader
from picker.core.plugins.args import NoArgs
from picker.core.plugins.gpu_usage import GpuUsageScorer
from picker.core.plugins.least_latency import LeastLatencyArgs, LeastLatencyScorer
from picker.core.plugins.least_request import LeastRequestFilter, LeastRequestScorer
from picker.core.plugins.least_request_args import LeastRequestArgs
from picker.core.plugins.lora_affinity import LoraAffinityFilter, LoraAffinityScorer
from picker.core.plugins.prefix_cache import PrefixScorer
from picker.core.plugins.random_score import RandomScorer
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Candidates, MatchInfo, Request

RNG = random.Random(7)


def asking(model: str = "m") -> Request:
    return Request("id", "/v1/completions", Prompt(model, (b"x",)))


def fleet(*load: tuple[int, EngineMetrics | None]) -> Candidates:
    """Endpoints with this many requests of ours in flight and this last scrape; None: never scraped."""
    table = EndpointTable()
    table.replace(Endpoint(f"p{i}", f"10.0.0.{i + 1}:8000") for i in range(len(load)))
    for slot, (in_flight, metrics) in enumerate(load):
        table.in_flight[slot] = in_flight
        if metrics is not None:
            table.observe(slot, metrics, 0.0)
    return Candidates(table, table.slots, table.mask)


def flights(*load: tuple[int, float | None]) -> Candidates:
    return fleet(*((count, EngineMetrics(running=running)) for count, running in load))


def rate(scorer, candidates: Candidates) -> list[float]:
    scores = scorer.score(asking(), candidates, None, RNG)
    assert scores.shape == (len(candidates.slots),)
    return scores.tolist()


# --- least-request -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ([(0, 0), (10, 10), (5, 5)], [100, 0, 50]),
        ([(1, 1), (2, 2), (3, 3)], [66, 33, 0]),
        ([(5, 5), (5, 0), (0, 0)], [99, 0, 100]),
        ([(0, 0), (0, 0)], [100, 100]),
        ([(0, 50), (0, 0)], [100, 100]),
        ([(4, 9)], [0]),
    ],
)
def test_least_request_score(load, expected):
    assert rate(LeastRequestScorer(NoArgs()), flights(*load)) == expected


def test_requests_beyond_what_runs_count_a_hundredfold_and_unknown_as_the_average():
    # base: 5 + 100 * 4, 5 + 100 * 0, 5 + 100 * (4 + 0) / 2
    assert rate(LeastRequestScorer(NoArgs()), flights((5, 1), (5, 5), (5, None))) == [0, 98, 49]


def test_without_any_metrics_our_own_counts_decide():
    assert rate(LeastRequestScorer(NoArgs()), flights((0, None), (4, None), (2, None))) == [100, 0, 50]


@pytest.mark.parametrize("limit", [10, 0, -1])
def test_least_request_filter_keeps_fewer_than_the_limit(limit):
    plugin = LeastRequestFilter(LeastRequestArgs(maxWaitingRequests=limit))
    load = [EngineMetrics(waiting=waiting) for waiting in (0, 9, 10, 11)]
    keep = plugin.keep(asking(), fleet(*((0, one) for one in load), (0, None), (0, EngineMetrics())))
    assert keep.tolist() == [True, True, False, False, True, True]


def test_least_request_filter_says_nothing_when_all_stay():
    assert (
        LeastRequestFilter(LeastRequestArgs()).keep(asking(), fleet((99, EngineMetrics(waiting=9)), (0, None))) is None
    )


def test_least_request_filter_has_its_own_limit():
    plugin = LeastRequestFilter(LeastRequestArgs(maxWaitingRequests=1))
    keep = plugin.keep(asking(), fleet((0, EngineMetrics(waiting=1)), (0, EngineMetrics(waiting=0))))
    assert keep.tolist() == [False, True]


# --- least-latency -----------------------------------------------------------------------------------------------


def latencies(*times: tuple[float | None, float | None]) -> Candidates:
    return fleet(*((0, EngineMetrics(ttft=ttft, tpot=tpot)) for ttft, tpot in times))


@pytest.mark.parametrize(
    ("factor", "times", "expected"),
    [
        (0.5, [(1, 1), (2, 1), (3, 1)], [100, 75, 50]),
        (0.5, [(1, 8), (2, 4), (5, 0.5)], [50, 64, 50]),
        (1.0, [(1, 9), (2, 5), (5, 1)], [100, 75, 0]),
        (0.0, [(1, 9), (2, 5), (5, 1)], [0, 50, 100]),
        (0.5, [(2, 2), (2, 2)], [100, 100]),
        (0.5, [(2, 2)], [100]),
        (0.5, [(0, 0), (1, 1), (3, 3)], [100, 100, 0]),
        (0.5, [(0, 5), (5, 0), (1, 1), (3, 3)], [100, 100, 100, 0]),
        (0.5, [(0, 0), (0, 0)], [100, 100]),
        (0.5, [(1, 1), (3, 3), (None, None)], [100, 0, 50]),
        (0.5, [(1, 1), (3, 3), (1, None), (None, 0)], [100, 0, 50, 50]),
        (0.5, [(None, None), (None, None)], [50, 50]),
    ],
)
def test_least_latency(factor, times, expected):
    scorer = LeastLatencyScorer(LeastLatencyArgs(TTFTTPOTWeightFactor=factor))
    assert rate(scorer, latencies(*times)) == expected


# --- gpu-usage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ([0.0, 1.0, 0.5], [100, 0, 50]),
        ([0.253, 0.999], [74, 0]),
        ([0.5, 0.25, None], [50, 75, 62.5]),
        ([None, None], [50, 50]),
        ([1.5, 0.5], [0, 50]),
    ],
)
def test_gpu_usage(usage, expected):
    assert rate(GpuUsageScorer(NoArgs()), fleet(*((0, EngineMetrics(kv_usage=one)) for one in usage))) == expected


# --- random ------------------------------------------------------------------------------------------------------


def test_random_rates_whole_numbers_from_0_to_100_evenly():
    candidates, scorer = flights(*[(0, 0)] * 10), RandomScorer(NoArgs())
    drawn = Counter(value for _ in range(2020) for value in rate(scorer, candidates))
    assert set(drawn) == set(map(float, range(101)))
    chi_square = sum((count - 200) ** 2 / 200 for count in drawn.values())
    assert chi_square < 170  # 100 degrees of freedom; more happens once in 60,000 times


# --- lora-affinity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ([{"base", "m"}, {"base"}, {"m"}], [True, False, True]),
        ([{"base", "m"}, None], [True, False]),
        ([{"base"}, None], [False, True]),
        ([{"m"}, {"m"}], None),
        ([None, None], None),
        ([{"base"}, {"other"}], None),
        ([{"base"}, set()], None),
    ],
)
def test_lora_affinity(served, expected):
    load = [(0, None if names is None else EngineMetrics(models=frozenset(names))) for names in served]
    keep = LoraAffinityFilter(NoArgs()).keep(asking("m"), fleet(*load))
    assert (keep if keep is None else keep.tolist()) == expected


def test_lora_affinity_needs_a_model():
    assert (
        LoraAffinityFilter(NoArgs()).keep(asking(""), fleet((0, EngineMetrics(models=frozenset({"m"}))), (0, None)))
        is None
    )


# --- prefix scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matched", "total", "score"),
    # The last three differ from whole-number arithmetic: the share is a fraction first, then a percentage.
    [
        (0, 3, 0),
        (1, 3, 33),
        (2, 3, 66),
        (3, 3, 100),
        (24, 32, 75),
        (1, 128, 0),
        (29, 50, 57),
        (29, 100, 28),
        (57, 100, 56),
    ],
)
def test_prefix_score(matched, total, score):
    info = MatchInfo(np.array([matched]), total, "blocks")
    assert PrefixScorer("p", "p").score(asking(), flights((0, 0)), info, RNG).tolist() == [score]


def test_prefix_score_has_no_opinion_without_a_prompt():
    scorer = PrefixScorer("p", "p")
    assert scorer.score(asking(), flights((0, 0)), None, RNG) is None
    assert scorer.score(asking(), flights((0, 0)), MatchInfo(np.array([0]), 0, "blocks"), RNG) is None


@given(st.lists(st.integers(0, 128), min_size=2, max_size=20))
@settings(max_examples=50, deadline=None)
def test_prefix_score_rises_with_matched_blocks(matched):
    info = MatchInfo(np.array(matched), 128, "blocks")
    scores = PrefixScorer("p", "p").score(asking(), flights(*[(0, 0)] * len(matched)), info, RNG).tolist()
    assert [score for _, score in sorted(zip(matched, scores, strict=True))] == sorted(scores)
    assert all(0 <= score <= 100 for score in scores)


# --- Any load ----------------------------------------------------------------------------------------------------

unknown = st.none()
counts = st.integers(0, 10**6).map(float)
seconds = st.floats(0, 1e6)
metrics = st.none() | st.builds(
    EngineMetrics,
    waiting=unknown | counts,
    running=unknown | counts,
    kv_usage=unknown | st.floats(0, 1),
    ttft=unknown | seconds,
    tpot=unknown | seconds,
)
loads = st.lists(st.tuples(st.integers(0, 10**6), metrics), min_size=1, max_size=12)
hostile = st.none() | st.floats() | st.just(-1.0)
hostile_metrics = st.builds(
    EngineMetrics, waiting=hostile, running=hostile, kv_usage=hostile, ttft=hostile, tpot=hostile
)
SCORERS = [LeastRequestScorer(NoArgs()), LeastLatencyScorer(LeastLatencyArgs()), GpuUsageScorer(NoArgs())]
by_scorer = pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: scorer.name)


@by_scorer
@settings(max_examples=100, deadline=None)
@given(load=loads)
def test_scores_are_0_to_100(scorer, load):
    assert all(0 <= score <= 100 for score in rate(scorer, fleet(*load)))


@by_scorer
@settings(max_examples=150, deadline=None)
@given(load=st.lists(st.tuples(st.integers(0, 5), hostile_metrics), min_size=1, max_size=5))
def test_whatever_an_engine_says_scores_are_0_to_100(scorer, load):
    candidates = fleet(*load)
    assert all(0 <= score <= 100 for score in rate(scorer, candidates))
    keep = LeastRequestFilter(LeastRequestArgs()).keep(asking(), candidates)
    assert keep is None or keep.dtype == np.bool_


@by_scorer
@settings(max_examples=60, deadline=None)
@given(load=loads, data=st.data())
def test_the_order_of_endpoints_does_not_matter(scorer, load, data):
    order = data.draw(st.permutations(range(len(load))))
    straight, mixed = rate(scorer, fleet(*load)), rate(scorer, fleet(*(load[i] for i in order)))
    assert mixed == pytest.approx([straight[i] for i in order])


@settings(max_examples=150, deadline=None)
@given(loads, st.data(), st.integers(1, 1000))
def test_one_more_request_never_raises_an_endpoint(load, data, more):
    scorer, position = LeastRequestScorer(NoArgs()), data.draw(st.integers(0, len(load) - 1))
    before = rate(scorer, fleet(*load))
    load[position] = (load[position][0] + more, load[position][1])
    assert rate(scorer, fleet(*load))[position] <= before[position]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=8))
def test_more_load_never_scores_better_among_known_endpoints(load):
    scores = rate(LeastRequestScorer(NoArgs()), flights(*load))
    for (a, a_runs), a_score in zip(load, scores, strict=True):
        for (b, b_runs), b_score in zip(load, scores, strict=True):
            if a <= b and a_runs >= b_runs:
                assert a_score >= b_score


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 100), st.floats(0.001, 100), st.floats(0, 1)), min_size=2, max_size=8))
def test_slower_or_fuller_never_scores_better(load):
    candidates = fleet(*((0, EngineMetrics(ttft=ttft, tpot=tpot, kv_usage=usage)) for ttft, tpot, usage in load))
    latency, usage_scores = (
        rate(LeastLatencyScorer(LeastLatencyArgs()), candidates),
        rate(GpuUsageScorer(NoArgs()), candidates),
    )
    for i, (ttft, tpot, usage) in enumerate(load):
        for j, (other_ttft, other_tpot, other_usage) in enumerate(load):
            if ttft <= other_ttft and tpot <= other_tpot:
                assert latency[i] >= latency[j]
            if usage <= other_usage:
                assert usage_scores[i] >= usage_scores[j]


@by_scorer
@settings(max_examples=80, deadline=None)
@given(load=st.lists(st.tuples(st.integers(0, 20), metrics), min_size=2, max_size=6), known=st.data())
def test_an_endpoint_gone_stale_is_never_the_best_of_its_equals(scorer, load, known):
    same = known.draw(st.integers(0, 20))
    whole = st.builds(
        EngineMetrics,
        waiting=counts,
        running=st.integers(0, 30).map(float),
        kv_usage=st.floats(0, 1),
        ttft=st.floats(0.001, 10),
        tpot=st.floats(0.001, 10),
    )
    seen = [known.draw(whole) for _ in load]
    scores = rate(scorer, fleet((same, None), *((same, one) for one in seen)))
    assert scores[0] <= max(scores[1:]) + 1e-9


# --- Staleness ---------------------------------------------------------------------------------------------------


def test_load_expires_and_comes_back():
    table = EndpointTable(stale_seconds=2.0)
    table.replace([Endpoint("a", "10.0.0.1:1"), Endpoint("b", "10.0.0.2:1")])
    candidates = Candidates(table, table.slots, table.mask)
    assert table.expire(0.0) == 2
    full = EngineMetrics(waiting=50, running=1, kv_usage=0.75, ttft=1, tpot=1, models=frozenset({"m"}))
    table.observe(0, full, 10.0)
    table.observe(1, EngineMetrics(waiting=0, running=1, kv_usage=0.25, ttft=2, tpot=2), 11.0)
    assert table.expire(12.0) == 0
    assert rate(GpuUsageScorer(NoArgs()), candidates) == [25, 75]
    assert table.expire(12.5) == 1
    assert rate(GpuUsageScorer(NoArgs()), candidates) == [75, 75]
    assert LeastRequestFilter(LeastRequestArgs()).keep(asking(), candidates) is None
    assert table.models[0] == {"m"}
    table.observe(0, full, 13.0)
    assert table.expire(12.5) == 0
    assert rate(GpuUsageScorer(NoArgs()), candidates) == [25, 75]


def test_what_a_scrape_leaves_out_is_unknown_again():
    table = EndpointTable()
    table.replace([Endpoint("a", "10.0.0.1:1")])
    table.observe(0, EngineMetrics(waiting=50, kv_usage=0.5), 0.0)
    table.observe(0, EngineMetrics(kv_usage=0.5), 1.0)
    assert np.isnan(table.waiting[0])
    assert table.kv_usage[0] == 0.5


@pytest.mark.parametrize("value", [-1.0, -1e-9, float("inf"), float("-inf"), float("nan")])
def test_values_that_make_no_sense_are_unknown(value):
    table = EndpointTable()
    table.replace([Endpoint("a", "10.0.0.1:1")])
    table.observe(0, EngineMetrics(waiting=value, running=value, kv_usage=value, ttft=value, tpot=value), 0.0)
    for load in (table.waiting, table.running, table.kv_usage, table.ttft, table.tpot):
        assert np.isnan(load[0])


ADAPTER_PAGE = b"""
vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e+09
vllm:lora_requests_info{max_lora="%d",running_lora_adapters="%s",waiting_lora_adapters="%s"} 1.8e+09
vllm:lora_requests_info{max_lora="9",running_lora_adapters="x",waiting_lora_adapters="x"} nonsense
"""


@pytest.mark.parametrize(
    ("most", "running", "waiting", "score"),
    [
        (2, b"a,sql", b"", 100),
        (4, b"a", b"b", 80),
        (2, b"a,b", b"sql", 60),
        (2, b"a,b", b"", 0),
        (0, b"", b"", 0),
    ],
)
def test_adapters_are_best_where_they_are_loaded(most, running, waiting, score):
    metrics, _ = PageReader("vllm").read(ADAPTER_PAGE % (most, running, waiting))
    candidates = flights((0, 0), (0, 0))
    candidates.table.observe(0, metrics, 0.0)
    request = Request("", "", Prompt("sql", (b"x",)))
    scores = LoraAffinityScorer(NoArgs()).score(request, candidates, None, RNG)
    assert scores.tolist() == [score, 0]
    candidates.table.bases[1] = ("sql",)
    assert LoraAffinityScorer(NoArgs()).score(request, candidates, None, RNG) is None
    assert LoraAffinityScorer(NoArgs()).score(request, flights((0, 0)), None, RNG) is None
