"""The director: requests counted while they last, prompts learnt on who served, whatever happens in between."""

import json
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.exchange.events import BodyMode
from picker.core.plugins.prefix_cache_args import PrefixCacheArgs
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.prompts import Unused
from picker.core.scheduling.decision import Decision, Reason
from picker.core.tickets import Ticket

A, B, C = (f"10.0.0.{i}:8000" for i in (1, 2, 3))
SPEC = SchedulerSpec(
    filters=("least-request",),
    scorers=(("least-request", 1), ("prefix-cache", 1)),
    args={"prefix-cache": PrefixCacheArgs(blockSizeToHash=2, topKMatches=100)},
)


def director(*addresses: str, spec: SchedulerSpec = SPEC, fallbacks: int = 2) -> Director:
    scheduler, _ = build_scheduler(spec, None, lambda _: None)
    made = Director(scheduler, EndpointTable(), fallbacks=fallbacks, rng=random.Random(1), timer=lambda: 0)
    made.replace_endpoints(Endpoint(address, address) for address in addresses)
    return made


def asking(prompt: str = "", subset: tuple[str, ...] | None = None, model: str = "m", **headers: str) -> Decide:
    sent = {":path": b"/v1/completions"} | {name.replace("_", "-"): value.encode() for name, value in headers.items()}
    body = json.dumps({"model": model, "prompt": prompt}).encode()
    return Decide(sent, body, BodyState.COMPLETE, BodyMode.FULL_DUPLEX_STREAMED, subset)


def succeeded(served: str | None = None) -> Finish:
    return Finish(success=True, learned_on=LearnedOn.RESPONSE_TRAILERS, status=200, served=served)


def failed(served: str | None = None, status: int | None = 503) -> Finish:
    return Finish(success=False, learned_on=LearnedOn.STREAM_END, status=status, served=served)


def matched(made: Director, prompt: str, model: str = "m") -> dict[str, int]:
    """Blocks of the prompt that each endpoint is thought to have, but for those that have none."""
    decision = made.decide(asking(prompt, model=model))
    blocks = decision.matches["prefix-cache"].info.matched.tolist()
    return {one.address: count for one, count in zip(decision.endpoints, blocks, strict=True) if count}


def flights(made: Director) -> dict[str, int]:
    return {made.table.endpoints[slot].address: int(made.table.in_flight[slot]) for slot in made.table.slots.tolist()}


def blocks_held(made: Director) -> int:
    return sum(producer.index.held for producer in made.scheduler.producers)


def everything(made: Director) -> str:
    """All state but the random numbers, as text."""
    names = [name for name in dir(made.table) if not name.startswith("__")]
    table = {name: str(value) for name in names if not callable(value := getattr(made.table, name))}
    indexes = [
        (one.index.entries, one.index.held, {run.hashes[0]: run.mask for run in one.index._runs.values()})
        for one in made.scheduler.producers
    ]
    return json.dumps([table, indexes, made.in_flight])


# --- Reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "unused"),
    [
        (BodyState.COMPLETE, None),
        (BodyState.NONE, Unused.NO_BODY),
        (BodyState.STREAMED, Unused.BODY_MODE_STREAMED),
        (BodyState.TRUNCATED, Unused.BODY_TRUNCATED),
    ],
)
def test_only_a_complete_body_is_read(state, unused):
    whole = asking("abc", x_request_id="r-1")
    request = director().read(Decide(whole.headers, whole.body, state, whole.body_mode, None))
    assert request.prompt.unused is unused
    assert (request.request_id, request.path) == ("r-1", "/v1/completions")
    assert request.prompt.texts == ((b"abc",) if unused is None else ())


def test_headers_may_be_missing_or_odd():
    assert director().read(Decide({}, b"{}", BodyState.COMPLETE, None, None)).prompt.unused is Unused.UNKNOWN_PATH
    odd = {":path": b"/v1/\xff", "x-request-id": b"\xff\x00", "content-encoding": b"\xff"}
    assert director().read(Decide(odd, b"{}", BodyState.COMPLETE, None, None)).prompt.unused is Unused.CONTENT_ENCODING


def test_an_encoded_body_is_routed_by_load():
    made = director(A, B)
    made.table.in_flight[0] = 1
    decision = made.decide(asking("abc", content_encoding="gzip"))
    assert (decision.reason, decision.destinations[0]) == (Reason.ROUTED, B)
    assert decision.request.prompt.unused is Unused.CONTENT_ENCODING
    assert decision.matches == {}


# --- Deciding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "expected"), [(None, 3), (0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_call_may_want_fewer_fallbacks_but_not_more(wanted, expected):
    assert len(director(A, B, C, "10.0.0.4:1").decide(asking("x"), wanted).destinations) == expected


def test_deciding_has_no_side_effects():
    made = director(A, B, C)
    made.table.observe(0, EngineMetrics(waiting=1, running=1), 0)
    made.route(made.decide(asking("abcdef"))).finish(succeeded())
    on_its_way = made.route(made.decide(asking("abcxyz")))
    before = everything(made)
    for prompt in ("abcdef", "abcxyz", "new", ""):
        for subset in (None, (), (A,)):
            made.decide(asking(prompt, subset)).view()
            made.decide_plainly(asking(prompt, subset)).view()
    assert everything(made) == before
    on_its_way.finish(failed())


def test_a_plain_decision_goes_by_in_flight_alone_within_the_subset():
    made = director(A, B, C)
    tickets = [made.route(made.decide_plainly(asking("abc"))) for _ in range(9)]
    assert flights(made) == {A: 3, B: 3, C: 3}
    for ticket in tickets[:6]:
        ticket.finish(succeeded())
    assert sum(flights(made).values()) == made.in_flight == 3
    assert made.decide_plainly(asking("abc", (B,))).destinations == (B,)
    assert made.decide_plainly(asking("abc", ())).reason is Reason.NONE_IN_SUBSET
    assert matched(made, "abc") == {}


# --- Learning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("addresses", [(), (A, B)])
def test_a_refusal_can_be_shown_and_one_of_what_is_not_read_too(addresses):
    made = director(*addresses)
    refused = made.refuse(asking("prompt", x_request_id="id"), Reason.SATURATED)
    plainly = made.refuse_plainly(Reason.SATURATED)
    for decision, request_id, model in ((refused, "id", "m"), (plainly, "", "")):
        view = decision.view()
        assert (view["reason"], view["request_id"], view["model"]) == ("saturated", request_id, model)
        assert view["endpoints"] == view["destinations"] == []
    assert plainly.request.prompt.unused is Unused.FAILED


def test_a_pick_that_cannot_be_learnt_is_not_counted():
    class Broken:
        def picked(self, slot):
            raise RuntimeError(slot)

    made = director(A)
    decision = made.decide(asking("abcdef"))
    decision.matches["prefix-cache"] = Broken()
    with pytest.raises(RuntimeError):
        made.route(decision)
    assert (made.in_flight, flights(made)) == (0, {A: 0})


def test_a_burst_with_one_new_prefix_sticks_together():
    made = director(A, B, C, spec=SchedulerSpec((), (("prefix-cache", 1),), SPEC.args))
    tickets = [made.route(made.decide(asking("abcdef"))) for _ in range(5)]
    assert sorted(flights(made).values()) == [0, 0, 5]
    for ticket in tickets:
        ticket.finish(failed())
    assert matched(made, "abcdef") == {}
    assert sorted(flights(made).values()) == [0, 0, 0]


def test_what_succeeds_is_learnt_on_the_pick():
    made = director(A, B, C)
    decision = made.decide(asking("abcdef"))
    ticket = made.route(decision)
    assert matched(made, "abcdefgh") == {decision.destinations[0]: 3}
    ticket.finish(succeeded())
    assert matched(made, "abcdefgh") == {decision.destinations[0]: 3}
    assert blocks_held(made) == made.in_flight == 0


def test_what_a_fallback_served_is_learnt_there():
    made = director(A, B, C)
    decision = made.decide(asking("abcdef"))
    made.route(decision).finish(succeeded(decision.destinations[1]))
    assert matched(made, "abcdef") == {decision.destinations[1]: 3}
    assert set(flights(made).values()) == {0}


def test_what_a_stranger_served_is_not_learnt():
    made = director(A, B, C)
    made.route(made.decide(asking("abcdef"))).finish(succeeded("10.9.9.9:1"))
    assert matched(made, "abcdef") == {}
    assert blocks_held(made) == made.in_flight == 0


@pytest.mark.parametrize("end", [failed(), failed(A, 500), failed(None, None), failed(B, 429)])
def test_what_fails_is_not_learnt(end):
    made = director(A, B)
    made.route(made.decide(asking("abcdef"))).finish(end)
    assert matched(made, "abcdef") == {}
    assert blocks_held(made) == made.in_flight == 0


@pytest.mark.parametrize("end", [succeeded(), succeeded(A), failed()])
def test_an_endpoint_that_went_meanwhile_learns_nothing(end):
    made = director(A)
    ticket = made.route(made.decide(asking("abcdef")))
    assert made.replace_endpoints([Endpoint(B, B), Endpoint(C, C)]) == (2, 1)
    newcomer = made.decide(asking("abcdef", (made.table.endpoints[0].address,)))
    other = made.route(newcomer)
    before = flights(made)
    ticket.finish(end)
    assert flights(made) == before
    assert matched(made, "abcdef") == {newcomer.destinations[0]: 3}
    other.finish(failed())
    assert matched(made, "abcdef") == {}
    assert set(flights(made).values()) == {0}
    assert blocks_held(made) == made.in_flight == 0


def test_what_a_removed_pick_did_not_serve_is_learnt_on_who_did():
    made = director(A, B)
    made.table.in_flight[1] = 9
    decision = made.decide(asking("abcdef"))
    assert decision.destinations[0] == A
    ticket = made.route(decision)
    made.replace_endpoints([Endpoint(B, B)])
    ticket.finish(succeeded(B))
    assert matched(made, "abcdef") == {B: 3}


def test_an_endpoint_that_stays_keeps_its_counts_and_prompts():
    made = director(A, B)
    ticket = made.route(made.decide(asking("abcdef", (A,))))
    made.route(made.decide(asking("xyz", (A,)))).finish(succeeded())
    assert made.replace_endpoints([Endpoint(C, C), Endpoint(A, A, labels={"new": "label"})]) == (1, 1)
    assert flights(made) == {A: 1, C: 0}
    assert matched(made, "abcdef") == {A: 3}
    assert matched(made, "xyz") == {A: 2}
    assert made.table.endpoints[made.table.slot_of(A)].labels == {"new": "label"}
    ticket.finish(succeeded())
    assert flights(made) == {A: 0, C: 0}


def test_an_endpoint_that_comes_back_starts_afresh():
    made = director(A)
    made.table.observe(0, EngineMetrics(waiting=99, models=frozenset({"x"})), 0)
    assert made.decide(asking("abcdef")).reason is Reason.FILTERED_OUT
    made.table.observe(0, EngineMetrics(waiting=0, models=frozenset({"x"})), 0)
    made.route(made.decide(asking("abcdef")))
    made.replace_endpoints([])
    assert made.decide(asking("abcdef")).reason is Reason.NO_ENDPOINTS
    made.replace_endpoints([Endpoint(A, A)])
    assert flights(made) == {A: 0}
    assert matched(made, "abcdef") == {}
    assert made.table.models == [None]


def test_of_two_endpoints_with_one_address_the_first_counts():
    made = director()
    assert made.replace_endpoints([Endpoint("one", A), Endpoint("two", A), Endpoint("three", B)]) == (2, 0)
    assert [one.name for one in made.decide(asking("x")).endpoints] == ["one", "three"]
    assert made.replace_endpoints([Endpoint("two", A), Endpoint("three", B)]) == (1, 1)
    assert made.table.endpoints[made.table.slot_of(A)].name == "two"


def test_an_engine_restart_forgets_prompts_but_not_requests():
    made = director(A)
    ticket = made.route(made.decide(asking("abcdef")))
    made.restarted(0)
    assert matched(made, "abcdef") == {}
    assert flights(made) == {A: 1}
    ticket.finish(failed())
    assert (flights(made), matched(made, "abcdef")) == ({A: 0}, {})


def test_another_container_of_the_same_endpoint_holds_nothing():
    made = director()
    made.replace_endpoints([Endpoint(A, A, started_at=10.0), Endpoint(B, B)])
    made.route(made.decide(asking("abcdef", (A,)))).finish(succeeded())
    made.route(made.decide(asking("abcdef", (B,)))).finish(succeeded())
    made.replace_endpoints([Endpoint(A, A, started_at=10.0), Endpoint(B, B, started_at=10.0)])
    assert matched(made, "abcdef") == {A: 3, B: 3}  # that of B was not known before
    assert made.replace_endpoints([Endpoint(A, A, started_at=20.0), Endpoint(B, B)]) == (0, 0)
    assert matched(made, "abcdef") == {B: 3}


def test_a_new_configuration_takes_the_index_over():
    made = director(A, B)
    first = made.decide(asking("abcdef"))
    ticket = made.route(first)
    made.scheduler, notes = build_scheduler(SPEC, made.scheduler, lambda _: None)
    assert notes == []
    assert matched(made, "abcdef") == {first.destinations[0]: 3}
    ticket.finish(succeeded())
    assert matched(made, "abcdef") == {first.destinations[0]: 3}
    other = SchedulerSpec(SPEC.filters, SPEC.scorers, {"prefix-cache": PrefixCacheArgs(blockSizeToHash=3)})
    on_its_way = made.route(made.decide(asking("abcdef")))
    made.scheduler, notes = build_scheduler(other, made.scheduler, lambda _: None)
    assert len(notes) == 1
    assert "prefix-cache" in notes[0]
    assert matched(made, "abcdef") == {}
    on_its_way.finish(succeeded())
    assert matched(made, "abcdef") == {}
    assert made.in_flight == 0


# --- Anything in any order ---------------------------------------------------------------------------------------


@dataclass
class Flight:
    """A request on its way; `visible` until its endpoint is forgotten."""

    ticket: Ticket
    pick: int
    address: str
    prompt: set[str]
    routed_at: int
    visible: bool = True


class Traffic(RuleBasedStateMachine):
    """Requests, endpoints and restarts in any order, against a model that knows endpoints by birth, not by slot."""

    addresses = st.sampled_from([f"10.0.0.{i}:8000" for i in range(1, 6)])
    prompts = st.sampled_from(["", "a", "b", "aa", "aaaaaa", "ab", "abab", "ababab", "abb", "bba", "bbaab", "bbaa"])

    def __init__(self) -> None:
        super().__init__()
        self.made = director()
        self.births: dict[tuple[str, str], int] = {}
        """By name and address, the endpoints there are; each gets a number of its own when it comes."""
        self.born = 0
        self.moment = 0
        self.emptied: dict[int, int] = {}
        """When each endpoint last came up with nothing in it; it learns nothing from requests routed before."""
        self.open: list[Flight] = []
        self.learnt: set[tuple[int, str]] = set()

    def birth(self, address: str) -> int:
        return next(number for (_, where), number in self.births.items() if where == address)

    @staticmethod
    def beginnings(prompt: str) -> set[str]:
        """The prompt up to the end of each of its blocks of two bytes."""
        return {prompt[:end] for end in range(2, len(prompt) + 1, 2)} | ({prompt} if prompt else set())

    @rule(wanted=st.lists(st.tuples(st.sampled_from("xy"), addresses), max_size=5, unique_by=lambda one: one[1]))
    def replace(self, wanted):
        came, went = set(wanted) - set(self.births), set(self.births) - set(wanted)
        assert self.made.replace_endpoints(Endpoint(*one) for one in wanted) == (len(came), len(went))
        for one in went:
            self.forget_birth(self.births.pop(one))
        for one in wanted:
            if one in came:
                self.born += 1
                self.births[one] = self.born
                self.empty(self.born)

    def empty(self, number: int) -> None:
        self.moment += 1
        self.emptied[number] = self.moment

    def forget_birth(self, number: int) -> None:
        self.empty(number)
        self.learnt = {(holder, beginning) for holder, beginning in self.learnt if holder != number}
        for flight in self.open:
            flight.visible &= flight.pick != number

    @rule(
        prompt=prompts,
        subset=st.none() | st.lists(addresses, max_size=3).map(tuple),
        wanted=st.none() | st.integers(0, 3),
    )
    def request(self, prompt, subset, wanted):
        decision = self.made.decide(asking(prompt, subset), wanted)
        allowed = {address for _, address in self.births if subset is None or address in subset}
        self.check(decision, allowed, min(2, 2 if wanted is None else wanted))
        if decision.order:
            address = decision.destinations[0]
            ticket = self.made.route(decision)
            self.open.append(Flight(ticket, self.birth(address), address, self.beginnings(prompt), self.moment))

    def check(self, decision: Decision, allowed: set[str], fallbacks: int) -> None:
        assert {one.address for one in decision.endpoints} == allowed
        assert set(decision.destinations) <= allowed
        assert len(set(decision.destinations)) == len(decision.destinations) == min(len(allowed), fallbacks + 1)
        assert (decision.reason is Reason.ROUTED) == bool(allowed)

    @rule(
        data=st.data(),
        success=st.booleans(),
        served=st.none() | addresses | st.just("10.9.9.9:1"),
        honest=st.booleans(),
    )
    def finish(self, data, success, served, honest):
        if not self.open:
            return
        flight = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        served = flight.address if honest else served
        flight.ticket.finish(succeeded(served) if success else failed(served))
        if success:
            known = {where: number for (_, where), number in self.births.items()}
            holder = known.get(served) if served else flight.pick
            if holder in known.values() and self.emptied[holder] <= flight.routed_at:
                self.learnt |= {(holder, beginning) for beginning in flight.prompt}

    @rule(data=st.data())
    def restart(self, data):
        if self.births:
            one = data.draw(st.sampled_from(sorted(self.births)))
            self.made.restarted(self.made.table.slot_of(one[1]))
            self.forget_birth(self.births[one])

    @invariant()
    def prompts_agree(self):
        for prompt in ("aaaaaa", "ababab", "abb", "bbaab", "b"):
            expected = {}
            for (_, address), number in self.births.items():
                seen = {beginning for holder, beginning in self.learnt if holder == number}
                for flight in self.open:
                    seen |= flight.prompt if flight.pick == number and flight.visible else set()
                if count := len(self.beginnings(prompt) & seen):
                    expected[address] = count
            if self.births:
                assert matched(self.made, prompt) == expected

    @invariant()
    def counts_agree(self):
        assert self.made.in_flight == len(self.open)
        picks = Counter(flight.pick for flight in self.open)
        assert flights(self.made) == {address: picks[number] for (_, address), number in self.births.items()}

    def teardown(self):
        for flight in self.open:
            flight.ticket.finish(failed())
        assert self.made.in_flight == blocks_held(self.made) == 0
        assert set(flights(self.made).values()) <= {0}
        self.made.replace_endpoints([])
        for producer in self.made.scheduler.producers:
            assert not producer.index._runs
            assert not producer.index.entries


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
