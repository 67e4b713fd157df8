"""llm-d's load scorers and affinity filter: vectors of its formulas, times 100, and what scraped queues mean later."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.plugins.active_request import ActiveRequestArgs, ActiveRequestScorer
from picker.core.plugins.args import NoArgs
from picker.core.plugins.kv_cache_utilization import KvCacheUtilizationScorer
from picker.core.plugins.load_aware import LoadAwareArgs, LoadAwareScorer
from picker.core.plugins.no_hit_lru import NoHitLruArgs, NoHitLruScorer
from picker.core.plugins.prefix_cache_affinity import PrefixCacheAffinityArgs, PrefixCacheAffinityFilter
from picker.core.plugins.queue import QueueScorer
from picker.core.plugins.token_load import TokenLoadArgs, TokenLoadScorer
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Work

RNG = random.Random(7)
ASKING = Request("id", "/v1/completions", Prompt("m", (b"x",)))


def fleet(count: int) -> EndpointTable:
    table = EndpointTable()
    table.replace(Endpoint(f"p{number}", f"10.0.0.{number + 1}:8000") for number in range(count))
    return table


def everyone(table: EndpointTable, work: Work | None = None) -> Candidates:
    return Candidates(table, table.slots, table.mask, work)


def rate(scorer, table: EndpointTable, work: Work | None = None) -> list[float]:
    return scorer.score(ASKING, everyone(table, work), None, RNG).tolist()


def scraped(**load: list[float | None]) -> EndpointTable:
    (values,) = {len(one) for one in load.values()}
    table = fleet(values)
    for slot in range(values):
        table.observe(slot, EngineMetrics(**{name: one[slot] for name, one in load.items()}), 0.0)
    return table


# --- queue, load-aware, kv-cache-utilization ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([4, 6, 8], [100, 50, 0]),
        ([3, 3], [100, 100]),
        ([0, 0, 0], [100, 100, 100]),
        ([7], [100]),
        ([10, 0, 1], [0, 100, 90]),
        ([10, 0, None], [0, 100, 50]),
        ([4, None], [100, 100]),
        ([None, None], [50, 50]),
    ],
)
def test_queue(waiting, expected):
    assert rate(QueueScorer(NoArgs()), scraped(waiting=waiting)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("threshold", "waiting", "expected"),
    [
        (128, [0, 64, 128, 500], [50, 25, 0, 0]),
        (10, [0, 5, 9], [50, 25, 5]),
        (128, [0, 128, None], [50, 0, 25]),
        (128, [None], [25]),
    ],
)
def test_load_aware(threshold, waiting, expected):
    scorer = LoadAwareScorer(LoadAwareArgs(threshold=threshold))
    assert rate(scorer, scraped(waiting=waiting)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [([0.253, 1.0, 0.0], [74.7, 0, 100]), ([0.5, 0.25, None], [50, 75, 62.5]), ([None, None], [50, 50])],
)
def test_kv_cache_utilization(usage, expected):
    assert rate(KvCacheUtilizationScorer(NoArgs()), scraped(kv_usage=usage)) == pytest.approx(expected)


# --- What a scraped queue means later ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "running", "sent", "expected"),
    [
        (0, 0, 0, 0),
        (5, 20, 0, 5),
        (5, 20, 3, 8),  # an engine that queues, queues what comes
        (5, 20, -3, 2),  # and every request that ends lets one in
        (5, 20, -9, 0),
        (0, 20, -4, 0),
        (0, 2, 6, 0),  # any engine runs eight
        (0, 2, 7, 1),
        (0, 20, 3, 3),  # 20 is the most it was seen to run
        (0, None, 50, 0),
        (None, 20, 3, None),
    ],
)
def test_a_queue_is_corrected_by_what_was_sent_and_ended_since_the_scrape(waiting, running, sent, expected):
    table = fleet(1)
    table.in_flight[0] = 30
    table.observe(0, EngineMetrics(waiting=waiting, running=running), 0.0)
    table.in_flight[0] += sent
    (now,) = table.waiting_now(table.slots).tolist()
    assert np.isnan(now) if expected is None else now == expected


def test_an_engine_that_was_seen_to_run_many_is_taken_to_run_them_again():
    table = fleet(1)
    table.observe(0, EngineMetrics(waiting=0, running=40), 0.0)
    table.observe(0, EngineMetrics(waiting=0, running=4), 1.0)
    table.in_flight[0] += 36
    assert table.waiting_now(table.slots).tolist() == [0]
    table.in_flight[0] += 5
    assert table.waiting_now(table.slots).tolist() == [5]
    table.observe(0, EngineMetrics(waiting=0, running=45), 2.0)
    assert table.waiting_now(table.slots).tolist() == [0]


def test_a_burst_between_two_scrapes_does_not_pile_up():
    table = scraped(waiting=[0, 0], running=[1, 0])
    for _ in range(20):
        best = int(np.argmax(rate(QueueScorer(NoArgs()), table)))
        table.in_flight[best] += 1
    assert table.in_flight.max() <= 12


def test_a_stale_queue_is_unknown_whatever_we_sent():
    table = scraped(waiting=[9, 9], running=[9, 9])
    table.expire(10.0)
    table.in_flight[0] += 5
    assert rate(QueueScorer(NoArgs()), table) == [50, 50]
    assert rate(LoadAwareScorer(LoadAwareArgs()), table) == [25, 25]


# --- active-request, token-load ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idle", "most", "in_flight", "expected"),
    [
        (0, 1.0, [0, 2, 4], [100, 50, 0]),
        (2, 0.5, [0, 2, 4], [100, 100, 0]),
        (1, 0.5, [1, 2, 4], [100, 25, 0]),
        (0, 1.0, [0, 0], [100, 100]),
        (0, 1.0, [3], [0]),
        (5, 0.0, [5, 6], [100, 0]),
    ],
)
def test_active_request(idle, most, in_flight, expected):
    table = fleet(len(in_flight))
    table.in_flight[: len(in_flight)] = in_flight
    scorer = ActiveRequestScorer(ActiveRequestArgs(idle_threshold=idle, max_busy_score=most))
    assert rate(scorer, table) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("threshold", "tokens", "expected"),
    [
        (1000, [0, 100, 900, 1000, 5000], [100, 90, 10, 0, 0]),
        (4_194_304, [0, 2_097_152, 4_194_304], [100, 50, 0]),
    ],
)
def test_token_load(threshold, tokens, expected):
    table = fleet(len(tokens))
    table.queued_tokens[: len(tokens)] = tokens
    assert rate(TokenLoadScorer(TokenLoadArgs(queue_threshold_tokens=threshold)), table) == pytest.approx(expected)


def test_the_defaults_of_llm_d():
    assert TokenLoadArgs().queue_threshold_tokens == 4_194_304
    assert LoadAwareArgs().threshold == 128
    assert NoHitLruArgs().lru_size == 1024
    assert ActiveRequestArgs() == ActiveRequestArgs(idle_threshold=0, max_busy_score=1.0)
    assert PrefixCacheAffinityArgs() == PrefixCacheAffinityArgs(0.80, 0.0, 18_000, 15_928)


# --- no-hit-lru --------------------------------------------------------------------------------------------------


def cold(count: int) -> Work:
    return Work(100.0, np.full(count, 100.0), "prefix-cache")


def warm(count: int) -> Work:
    return Work(100.0, np.array([40.0] + [100.0] * (count - 1)), "prefix-cache")


def test_prompts_that_nobody_holds_go_round_and_others_do_not_count():
    table, scorer = fleet(3), NoHitLruScorer(NoHitLruArgs())
    addresses = [endpoint.address for endpoint in table.all]
    assert rate(scorer, table, cold(3)) == [100, 100, 100]
    scorer.routed(addresses[1], cold(3))
    assert rate(scorer, table, cold(3)) == [100, 0, 100]
    scorer.routed(addresses[2], warm(3))
    scorer.routed(addresses[2], cold(3))
    assert rate(scorer, table, cold(3)) == [100, 50, 0]
    scorer.routed(addresses[0], cold(3))
    assert rate(scorer, table, cold(3)) == [0, 100, 50]
    scorer.routed(addresses[1], cold(3))
    assert rate(scorer, table, cold(3)) == [50, 0, 100]
    assert rate(scorer, table, warm(3)) == [50, 50, 50]
    assert scorer.score(ASKING, everyone(table), None, RNG) is None


def test_only_so_many_endpoints_are_remembered():
    table, scorer = fleet(3), NoHitLruScorer(NoHitLruArgs(lru_size=2))
    for endpoint in table.all:
        scorer.routed(endpoint.address, cold(3))
    assert rate(scorer, table, cold(3)) == [100, 50, 0]
    assert rate(scorer, fleet(1), cold(1)) == [100]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.lists(st.integers(0, 5), max_size=30))
def test_it_is_least_recently_used(count, sent):
    table, scorer, recency = fleet(count), NoHitLruScorer(NoHitLruArgs()), []
    for at in (number % count for number in sent):
        scorer.routed(table.all[at].address, cold(count))
        recency = [other for other in recency if other != at] + [at]
    scores = rate(scorer, table, cold(count))
    never = [at for at in range(count) if at not in recency]
    assert all(scores[at] == 100 for at in never)
    order = [scores[at] for at in recency]
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == len(order)
    assert not recency or min(scores) == scores[recency[-1]] == 0


# --- prefix-cache-affinity-filter --------------------------------------------------------------------------------


def keep(filter_, matched, queued, total=100, rng=RNG):
    table = fleet(len(matched))
    table.queued_tokens[: len(matched)] = queued
    info = MatchInfo(np.array(matched), total, "blocks")
    flags = filter_.keep_matched(ASKING, everyone(table), info, rng)
    return flags if flags is None else flags.tolist()


@pytest.mark.parametrize(
    ("matched", "queued", "expected"),
    [
        ([90, 85, 10], [0, 0, 0], [True, True, False]),
        ([80, 79, 0], [0, 0, 0], [True, False, False]),
        ([10, 20, 50], [0, 0, 0], None),
        ([90, 80, 100], [0, 0, 0], None),
        # 18 s at 15,928 tokens a second are 286,704 tokens
        ([90, 10], [286_704, 0], [True, False]),
        ([90, 10], [286_705, 0], None),
        ([90, 90, 10], [400_000, 100, 0], [True, True, False]),
        ([90, 10, 10], [400_000, 200_000, 300_000], [True, False, False]),
    ],
)
def test_affinity(matched, queued, expected):
    assert keep(PrefixCacheAffinityFilter(PrefixCacheAffinityArgs()), matched, queued) == expected


def test_affinity_without_a_match_keeps_all():
    plugin = PrefixCacheAffinityFilter(PrefixCacheAffinityArgs())
    assert plugin.keep_matched(ASKING, everyone(fleet(2)), None, RNG) is None
    assert keep(plugin, [0, 0], [0, 0], total=0) is None


def test_affinity_never_lets_go_with_a_penalty_of_0_and_explores_as_often_as_it_is_told():
    always = PrefixCacheAffinityFilter(PrefixCacheAffinityArgs(maxTTFTPenaltyMs=0))
    assert keep(always, [90, 10], [1e9, 0]) == [True, False]
    curious = PrefixCacheAffinityFilter(PrefixCacheAffinityArgs(explorationProbability=0.25))
    rng = random.Random(3)
    kept_all = sum(keep(curious, [90, 10], [0, 0], rng=rng) is None for _ in range(400))
    assert 70 <= kept_all <= 130
