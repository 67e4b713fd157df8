"""The scheduler: who may be picked, in which order, and what a decision says about it."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.plugins.args import NoArgs
from picker.core.plugins.gpu_usage import GpuUsageScorer
from picker.core.plugins.least_request import LeastRequestFilter, LeastRequestScorer
from picker.core.plugins.least_request_args import LeastRequestArgs
from picker.core.plugins.lora_affinity import LoraAffinityFilter
from picker.core.plugins.prefix_cache import PrefixCacheProducer, PrefixScorer
from picker.core.plugins.prefix_cache_args import PrefixCacheArgs
from picker.core.prompts import Prompt, Unused
from picker.core.scheduling.api import Request
from picker.core.scheduling.decision import Decision, Reason
from picker.core.scheduling.scheduler import Scheduler, pick

REQUEST = Request("id-1", "/v1/completions", Prompt("m", (b"x" * 200,)), started=1000, parsed=2000)


class Fixed:
    """Rates endpoints with given scores, by slot."""

    producer = None

    def __init__(self, name: str, scores: list[float] | None) -> None:
        self.name = name
        self._scores = scores

    def score(self, request, candidates, match, rng):  # noqa: ARG002
        return None if self._scores is None else np.array(self._scores, float)[candidates.slots]


class Only:
    """Keeps these slots."""

    def __init__(self, name: str, slots: set[int]) -> None:
        self.name = name
        self._slots = slots

    def keep(self, request, candidates):  # noqa: ARG002
        return np.array([slot in self._slots for slot in candidates.slots.tolist()], np.bool_)


def fleet(*addresses: str, in_flight: tuple[int, ...] = ()) -> EndpointTable:
    table = EndpointTable()
    table.replace(Endpoint(f"p{i}", address) for i, address in enumerate(addresses))
    for slot, count in enumerate(in_flight):
        table.in_flight[slot] = count
    return table


def hosts(count: int) -> EndpointTable:
    return fleet(*(f"10.0.0.{i}:8000" for i in range(count)))


def decide(
    scheduler: Scheduler, table: EndpointTable, *, subset=None, fallbacks: int = 2, seed: int = 1, request=REQUEST
) -> Decision:
    clock = itertools.count(4000, 1000)
    return scheduler.decide(
        request,
        table,
        subset=subset,
        fallbacks=fallbacks,
        rng=random.Random(seed),
        timer=lambda: next(clock),
    )


# --- Who may be picked -------------------------------------------------------------------------------------------


def test_no_endpoints():
    decision = decide(Scheduler((), (), ()), fleet())
    assert (decision.reason, decision.order, decision.destinations) == (Reason.NO_ENDPOINTS, (), ())
    assert decide(Scheduler((), (), ()), fleet(), subset=("10.0.0.1",)).reason is Reason.NO_ENDPOINTS


FLEET = (
    "10.0.0.1:8000",
    "10.0.0.1:8001",
    "10.0.0.2:8000",
    "[2001:db8::1]:8000",
    "[2001:db8::1]:9000",
    "[2001:db8::2]:8000",
)


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (None, set(FLEET)),
        (("10.0.0.1",), {"10.0.0.1:8000", "10.0.0.1:8001"}),
        (("10.0.0.1:8001",), {"10.0.0.1:8001"}),
        (("10.0.0.1:8001", "10.0.0.2"), {"10.0.0.1:8001", "10.0.0.2:8000"}),
        (("[2001:db8::1]:9000",), {"[2001:db8::1]:9000"}),
        (("[2001:db8::1]",), {"[2001:db8::1]:8000", "[2001:db8::1]:9000"}),
        (("2001:db8::1",), {"[2001:db8::1]:8000", "[2001:db8::1]:9000"}),
        (("2001:db8::2", "10.9.9.9:1"), {"[2001:db8::2]:8000"}),
        (("10.0.0.2:8000", "10.0.0.2:8000", "10.0.0.2"), {"10.0.0.2:8000"}),
        ((), set()),
        (("10.0.0.3",), set()),
        (("10.0.0.1:80",), set()),
        (("10.0.0",), set()),
        (("8000", "", ":8000", "[", "]", "[]", "p0", "2001", "2001:db8:"), set()),
    ],
)
def test_subset(subset, expected):
    decision = decide(Scheduler((), (), ()), fleet(*FLEET), subset=subset, fallbacks=10)
    assert set(decision.destinations) == expected
    assert {one.address for one in decision.endpoints} == expected
    assert decision.reason is (Reason.ROUTED if expected else Reason.NONE_IN_SUBSET)


def test_a_subset_follows_the_endpoints():
    table = fleet("10.0.0.1:1", "10.0.0.2:1")
    table.replace([Endpoint("p1", "10.0.0.2:1"), Endpoint("new", "10.0.0.3:1"), Endpoint("more", "10.0.0.2:2")])
    plain = Scheduler((), (), ())
    assert decide(plain, table, subset=("10.0.0.1",)).reason is Reason.NONE_IN_SUBSET
    assert decide(plain, table, subset=("10.0.0.3",)).destinations == ("10.0.0.3:1",)
    assert set(decide(plain, table, subset=("10.0.0.2",)).destinations) == {"10.0.0.2:1", "10.0.0.2:2"}


def test_filters_narrow_one_after_another():
    scheduler = Scheduler((Only("a", {0, 1, 2}), Only("b", {1, 2, 3})), (), ())
    decision = decide(scheduler, hosts(5), fallbacks=9)
    assert set(decision.destinations) == {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert decision.filters == (("a", 3), ("b", 2))
    assert decision.slots.tolist() == [1, 2]


def test_everything_filtered_out():
    decision = decide(Scheduler((Only("a", {0}), Only("b", {1})), (), ((Fixed("s", [1, 1]), 1),)), hosts(2))
    assert (decision.reason, decision.order, decision.endpoints) == (Reason.FILTERED_OUT, (), ())
    assert decision.filters[:2] == (("a", 1), ("b", 0))


def test_the_real_filters_survive_an_empty_field():
    scheduler = Scheduler(
        (Only("none", set()), LeastRequestFilter(LeastRequestArgs()), LoraAffinityFilter(NoArgs())), (), ()
    )
    assert decide(scheduler, hosts(2)).reason is Reason.FILTERED_OUT


def test_filters_work_within_the_subset():
    scheduler = Scheduler((Only("a", {0, 1}),), (), ())
    assert decide(scheduler, hosts(3), subset=("10.0.0.1", "10.0.0.2")).destinations == ("10.0.0.1:8000",)
    assert decide(scheduler, hosts(3), subset=("10.0.0.2",)).reason is Reason.FILTERED_OUT


def test_producers_and_scorers_see_the_candidates_that_are_left():
    seen = []

    class Watching(Fixed):
        def match(self, request, candidates, rng):  # noqa: ARG002
            seen.append((candidates.slots.tolist(), candidates.mask))

        def score(self, request, candidates, match, rng):
            seen.append((candidates.slots.tolist(), candidates.mask))
            return super().score(request, candidates, match, rng)

    watching = Watching("w", [1.0] * 70)
    decide(
        Scheduler((Only("a", {0, 3, 9, 69}),), (watching,), ((watching, 1),)),
        hosts(70),
        subset=("10.0.0.3", "10.0.0.69"),
    )
    decide(Scheduler((), (watching,), ((watching, 1),)), hosts(3))
    assert seen == [([3, 69], 1 << 3 | 1 << 69)] * 2 + [([0, 1, 2], 0b111)] * 2


def test_a_queueing_endpoint_is_left_out():
    table = hosts(2)
    table.observe(0, EngineMetrics(waiting=10), 0)
    assert decide(Scheduler((LeastRequestFilter(LeastRequestArgs()),), (), ()), table).destinations == (
        "10.0.0.1:8000",
    )


# --- In which order ----------------------------------------------------------------------------------------------


def test_scores_are_weighted_and_added():
    scheduler = Scheduler((), (), ((Fixed("a", [100, 0, 40]), 1), (Fixed("b", [0, 60, 40]), 2), (Fixed("c", None), 5)))
    decision = decide(scheduler, hosts(3))
    assert decision.totals.tolist() == [100, 120, 120]
    assert {decision.order[0], decision.order[1]} == {1, 2}
    assert decision.order[2] == 0
    assert [(one.name, one.weight) for one in decision.plugins] == [("a", 1), ("b", 2), ("c", 5)]
    assert decision.plugins[2].scores is None


def test_an_endpoint_that_nothing_scores_stays_a_candidate():
    decision = decide(Scheduler((), (), ((Fixed("a", None), 1),)), hosts(3))
    assert len(decision.destinations) == 3
    assert decision.totals.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("fallbacks", "expected"), [(0, 1), (1, 2), (2, 3), (4, 5), (9, 5)])
def test_fallbacks_are_the_next_best(fallbacks, expected):
    scheduler = Scheduler((), (), ((Fixed("a", [10, 50, 30, 20, 40]), 1),))
    decision = decide(scheduler, hosts(5), fallbacks=fallbacks)
    assert decision.order == (1, 4, 2, 3, 0)[:expected]
    assert decision.slot == 1
    assert decision.destinations[0] == "10.0.0.1:8000"


def test_equals_go_by_fewest_in_flight():
    table = fleet(*(f"10.0.0.{i}:1" for i in range(5)), in_flight=(3, 1, 0, 2, 0))
    scheduler = Scheduler((), (), ((Fixed("a", [7, 7, 5, 7, 5]), 1),))
    for seed in range(10):
        decision = decide(scheduler, table, fallbacks=4, seed=seed)
        assert decision.order[:3] == (1, 3, 0)
        assert set(decision.order[3:]) == {2, 4}


@pytest.mark.parametrize("others", [0, 500])
def test_equals_in_flight_too_go_by_chance(others):
    """Also among many, where not all are ranked one by one."""
    rng = random.Random(5)
    totals, in_flight = np.repeat([0.0, -1.0], [8, others]), np.array([1, 0, 0, 0, 2, 0, 0, 0, *[0] * others])
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    for _ in range(6000):
        order = pick(totals, in_flight, 3, rng)
        first[order[0]] += 1
        second[order[1]] += 1
    for drawn in (first, second):
        assert set(drawn) == {1, 2, 3, 5, 6, 7}
        chi_square = sum((count - 1000) ** 2 / 1000 for count in drawn.values())
        assert chi_square < 26  # 5 degrees of freedom; more happens once in 10,000 times


def test_the_same_chance_gives_the_same_order():
    assert (
        decide(Scheduler((), (), ()), hosts(8), seed=3).order == decide(Scheduler((), (), ()), hosts(8), seed=3).order
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 33.0, 50.5, 100.0]), st.integers(0, 2)), min_size=1, max_size=9),
    st.sampled_from([1, 1, 30]),
    st.integers(1, 12),
    st.integers(0, 99),
)
def test_picks_are_sorted_by_total_then_in_flight(rows, times, count, seed):
    rows *= times
    totals, in_flight = np.array([total for total, _ in rows]), np.array([flights for _, flights in rows])
    order = pick(totals, in_flight, count, random.Random(seed))
    assert len(order) == len(set(order)) == min(count, len(rows))
    keys = sorted((-total, flights) for total, flights in rows)
    assert [(-rows[position][0], rows[position][1]) for position in order] == keys[: len(order)]
    assert totals.tolist() == [total for total, _ in rows]


# --- Any fleet ---------------------------------------------------------------------------------------------------

names = st.sampled_from(["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "[::1]:1", "[::1]:2", "[::2]:1", "10.0.0.9:1"])
places = names | st.sampled_from(["10.0.0.1", "10.0.0.2", "::1", "[::1]", "[::2]", "10.0.0", "", "x"])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(names, max_size=7, unique=True), min_size=1, max_size=4),
    st.none() | st.lists(places, max_size=4).map(tuple),
    st.integers(0, 4),
    st.data(),
)
def test_destinations_are_among_the_endpoints_that_are_left(replacements, subset, fallbacks, data):
    table = EndpointTable()
    for addresses in replacements:
        table.replace(Endpoint(address, address) for address in addresses)
    for slot in table.slots.tolist():
        waiting = data.draw(st.none() | st.integers(8, 11).map(float))
        table.observe(slot, EngineMetrics(waiting=waiting, kv_usage=data.draw(st.none() | st.floats(0, 1))), 0)
    scheduler = Scheduler(
        (LeastRequestFilter(LeastRequestArgs()),),
        (),
        ((GpuUsageScorer(NoArgs()), 2), (LeastRequestScorer(NoArgs()), 1)),
    )
    decision = decide(scheduler, table, subset=subset, fallbacks=fallbacks)
    allowed = set()
    for slot in table.slots.tolist():
        address = table.endpoints[slot].address
        host = address[: address.rindex(":")]
        if subset is None or {address, host, host.replace("[", "").replace("]", "")} & set(subset):
            allowed.add(address)
    left = {address for address in allowed if not table.waiting[table.slot_of(address)] >= 10}
    assert {one.address for one in decision.endpoints} == left
    assert set(decision.destinations) <= left
    assert len(decision.destinations) == len(set(decision.destinations)) == min(len(left), fallbacks + 1)
    expected = Reason.ROUTED
    for reason, some in (
        (Reason.FILTERED_OUT, left),
        (Reason.NONE_IN_SUBSET, allowed),
        (Reason.NO_ENDPOINTS, replacements[-1]),
    ):
        expected = expected if some else reason
    assert decision.reason is expected
    json.dumps(decision.view())


# --- What a decision says ----------------------------------------------------------------------------------------


def test_the_view_is_complete():
    producer = PrefixCacheProducer(PrefixCacheArgs(), lambda _: None)
    table = fleet("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000", in_flight=(4, 0, 2, 0))
    scheduler = Scheduler(
        (Only("only", {0, 1, 2}),),
        (producer,),
        (
            (PrefixScorer("prefix-cache", "prefix-cache"), 2),
            (Fixed("fixed", [10, 20, 30, 40]), 1),
            (Fixed("mute", None), 1),
        ),
    )
    first = decide(scheduler, table, request=Request("a", "/v1/completions", Prompt("m", (b"x" * 128 + b"z",))))
    first.matches["prefix-cache"].picked(0).confirm(0)
    view = decide(scheduler, table, fallbacks=1, request=REQUEST).view()
    assert json.loads(json.dumps(view)) == view
    assert view == {
        "request_id": "id-1",
        "path": "/v1/completions",
        "model": "m",
        "reason": "routed",
        "prompt_unused": "",
        "prompt_tokens": 0.0,
        "tokens_from": "",
        "first": "",
        "prefill_place": "",
        "prefill_destination": "",
        "why": "p0 has 110 of 400 points. The next best is p2, with 30; what counts most is prefix-cache.",
        "destinations": ["10.0.0.1:8000", "10.0.0.3:8000"],
        "filters": [{"filter": "only", "remaining": 3}],
        "step_microseconds": {"parse": 1.0, "prepare": 2.0, "filter": 1.0, "match": 1.0, "score": 1.0, "pick": 1.0},
        "endpoints": [
            {
                "name": name,
                "namespace": "default",
                "address": address,
                "rank": rank,
                "total": total,
                "in_flight": in_flight,
                "uncached_tokens": 0.0,
                "queued_tokens": 0.0,
                "cost_tokens": 0.0,
                "cost_milliseconds": 0.0,
                "plugins": [
                    {"plugin": "prefix-cache", "weight": 2, "score": prefix, "matched": matched, "total": 4, "unit": "blocks"},
                    {"plugin": "fixed", "weight": 1, "score": fixed, "matched": 0, "total": 0, "unit": ""},
                    {"plugin": "mute", "weight": 1, "score": 0.0, "matched": 0, "total": 0, "unit": ""},
                ],
            }
            for name, address, rank, total, in_flight, prefix, matched, fixed in (
                ("p0", "10.0.0.1:8000", 1, 110.0, 4, 50.0, 2, 10.0),
                ("p2", "10.0.0.3:8000", 2, 30.0, 2, 0.0, 0, 30.0),
                ("p1", "10.0.0.2:8000", 3, 20.0, 0, 0.0, 0, 20.0),
            )
        ],
    }  # fmt: skip


def test_the_view_of_a_refusal():
    decision = decide(Scheduler((), (), ()), fleet(), request=Request("", "/x", Prompt("", unused=Unused.UNKNOWN_PATH)))
    view = decision.view()
    assert (view["reason"], view["prompt_unused"]) == ("no_endpoints", "unknown_path")
    assert view["destinations"] == view["endpoints"] == view["filters"] == []


def test_a_decision_keeps_its_numbers_when_the_fleet_changes():
    table = fleet("10.0.0.1:1", "10.0.0.2:1", in_flight=(1, 2))
    decision = decide(Scheduler((), (), ()), table)
    before = decision.view()
    table.in_flight[:] = 9
    table.replace([Endpoint("other", "10.0.0.3:1")])
    assert decision.view() == before


def test_a_deciding_scheduler_matches_each_producer_once_and_scores_every_candidate():
    producer = PrefixCacheProducer(PrefixCacheArgs(), lambda _: None)
    scheduler = Scheduler((), (producer,), ((PrefixScorer("prefix-cache", "prefix-cache"), 1),))
    decision = decide(scheduler, hosts(4))
    assert list(decision.matches) == ["prefix-cache"]
    assert decision.plugins[0].scores.tolist() == [0, 0, 0, 0]
    assert decision.plugins[0].match.total == 4
    unused = decide(scheduler, hosts(4), request=Request("", "", Prompt("m", unused=Unused.EMPTY)))
    assert (unused.reason, unused.matches, unused.plugins[0].scores) == (Reason.ROUTED, {}, None)
