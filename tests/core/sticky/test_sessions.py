"""Sticky sessions in real decisions: pinned while the filters allow it, scored and learnt from all the same."""

from __future__ import annotations

import json
import random
from collections import Counter
from hashlib import sha256

import pytest

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.scheduling.decision import First, Reason
from picker.core.sticky import SHARED, Binding, Bindings, Source, SourceType, StickySessions, StickySettings

A, B, C = (f"10.0.0.{number}:8000" for number in (1, 2, 3))
SECONDS = 300
SETTINGS = StickySettings((Source(SourceType.HEADER, "X-Session-ID"),))
SPEC = SchedulerSpec(filters=("least-request",), scorers=(("least-request", 1), ("prefix-cache", 1)), args={})
OK = Finish(success=True, learned_on=LearnedOn.RESPONSE_BODY, status=200, served=None)
FAILED = Finish(success=False, learned_on=LearnedOn.STREAM_END, status=503, served=None)


class Rig:
    def __init__(self, *addresses: str, settings: StickySettings = SETTINGS) -> None:
        self.now = 1000.0
        scheduler, _ = build_scheduler(SPEC, None, lambda _: None)
        timer = lambda: int(self.now * 1e9)  # noqa: E731
        self.director = Director(scheduler, EndpointTable(), fallbacks=1, rng=random.Random(1), timer=timer)
        self.bindings = Bindings(SECONDS, 1000)
        self.sticky = self.director.sticky = StickySessions(settings, self.bindings, self.director.now)
        self.place(*(addresses or (A, B, C)))

    def place(self, *addresses: str) -> None:
        self.director.replace_endpoints(Endpoint(address.partition(":")[0], address) for address in addresses)

    def saturate(self, address: str, waiting: float = 1000) -> None:
        self.director.table.observe(self.director.table.slot_of(address), EngineMetrics(waiting=waiting), self.now)

    def decide(self, text: str, session: str = "s", subset=None, prepared=None, model="m"):
        headers = {":path": b"/v1/completions", "x-session-id": session.encode()}
        body = json.dumps({"model": model, "prompt": text}).encode()
        asked = Decide(headers, body, BodyState.COMPLETE, None, subset)
        request = self.director.read(asked)
        if prepared is not None:
            request = type(request)(
                **{name: getattr(request, name) for name in request.__struct_fields__} | {"prepared": prepared}
            )
        return self.director.decide(asked, request=request)

    def send(self, text: str, session: str = "s", finish: Finish = OK, **more) -> tuple[str, First | None]:
        decision = self.decide(text, session, **more)
        self.director.route(decision).finish(finish)
        return decision.destinations[0], decision.first

    @property
    def outcomes(self):
        return {name: count for name, count in self.sticky.outcomes.items() if count}


def test_a_session_stays_whatever_the_scores_say():
    rig = Rig()
    bound, first = rig.send("a" * 500)
    assert first is None
    other = next(address for address in (A, B, C) if address != bound)
    for number in range(5):
        rig.send("b" * 500, session=f"else-{number}", subset=(other,))
    decision = rig.decide("b" * 500)
    assert (decision.destinations[0], decision.first) == (bound, First.PINNED)
    assert decision.view()["first"] == "pinned"
    assert len(decision.destinations) == 2
    scores = dict(zip(decision.view()["destinations"], decision.view()["endpoints"], strict=False))
    assert scores[bound]["total"] < max(endpoint["total"] for endpoint in scores.values())
    rig.director.route(decision).finish(OK)
    assert rig.outcomes == {"bound": 6, "pinned": 1}


def test_turn_n_plus_1_goes_to_who_holds_turns_1_to_n_once_the_binding_is_over():
    """The plugin of the seed saw only the first turn of a pinned session, so that others looked as good."""
    rig = Rig()
    turns = "".join(random.Random(2).choices("abcdefgh ", k=1000))
    bound, _ = rig.send(turns)
    for other in {A, B, C} - {bound}:
        rig.send(turns, session="other", subset=(other,))
    for _ in range(6):
        turns += "".join(random.Random(len(turns)).choices("abcdefgh ", k=800))
        rig.now += SECONDS - 1
        assert rig.send(turns) == (bound, First.PINNED)
    rig.now += SECONDS
    decision = rig.decide(turns + " and what now?")
    assert (decision.destinations[0], decision.first) == (bound, None)
    held = dict(
        zip((one.address for one in decision.endpoints), decision.matches["prefix-cache"].info.matched, strict=True)
    )
    assert held[bound] > 5 * max(held[other] for other in held if other != bound)


def test_bindings_slide():
    rig = Rig()
    bound, _ = rig.send("x")
    for _ in range(5):
        rig.now += SECONDS - 0.5
        assert rig.send("x" * 100) == (bound, First.PINNED)
    rig.now += SECONDS
    assert rig.decide("y").first is None


def test_an_endpoint_that_the_filters_drop_loses_the_session_for_good():
    rig = Rig()
    bound, _ = rig.send("x")
    rig.saturate(bound)
    moved, first = rig.send("x")
    assert (moved != bound, first) == (True, None)
    rig.saturate(bound, 0)
    assert rig.send("x") == (moved, First.PINNED)
    assert rig.outcomes == {"bound": 1, "moved": 1, "pinned": 1}


def test_an_endpoint_outside_the_subset_is_not_picked():
    rig = Rig()
    bound, _ = rig.send("x", subset=(A,))
    assert bound == A
    assert rig.send("x", subset=(B, C))[0] in (B, C)
    assert rig.decide("x", subset=("10.9.9.9",)).reason is Reason.NONE_IN_SUBSET


def test_an_endpoint_that_is_gone_loses_the_session_and_one_that_comes_back_keeps_it():
    rig = Rig(A)
    rig.send("x")
    rig.place(B)
    assert rig.send("x") == (B, None)
    rig.place(A, "10.0.0.2:9000")
    assert rig.send("x") == ("10.0.0.2:9000", First.PINNED)


def test_ranks_of_one_pod_are_told_apart():
    rig = Rig("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.1:8002")
    for number, address in enumerate(("10.0.0.1:8001", "10.0.0.1:8002", "10.0.0.1:8000")):
        rig.send("x", f"s{number}", subset=(address,))
    for number, address in enumerate(("10.0.0.1:8001", "10.0.0.1:8002", "10.0.0.1:8000")):
        assert rig.send("x", f"s{number}") == (address, First.PINNED)


def test_a_failed_first_request_leaves_no_binding_but_a_failed_later_one_keeps_it():
    rig = Rig()
    rig.send("x", finish=FAILED)
    assert len(rig.bindings) == 0
    bound, _ = rig.send("x")
    assert rig.send("x", finish=FAILED) == (bound, First.PINNED)
    assert rig.send("x") == (bound, First.PINNED)


def test_a_session_follows_the_endpoint_that_served():
    rig = Rig()
    rig.send("x", subset=(A,), finish=Finish(True, LearnedOn.RESPONSE_BODY, 200, B))
    assert rig.send("x") == (B, First.PINNED)


def test_a_late_end_does_not_take_a_session_back():
    rig = Rig()
    slow = rig.director.route(rig.decide("x", subset=(A,)))
    rig.send("x", subset=(C,))
    slow.finish(Finish(True, LearnedOn.RESPONSE_BODY, 200, B))
    assert rig.decide("x").destinations[0] == C
    failing = rig.director.route(rig.decide("y", "new", subset=(A,)))
    rig.send("y", "new", subset=(C,))
    failing.finish(FAILED)
    assert rig.decide("y", "new").destinations[0] == C


def test_sessions_and_models_are_apart_and_without_a_key_nothing_sticks():
    rig = Rig()
    places = {
        (session, model): rig.send("x", session, model=model, subset=(place,))[0]
        for (session, model), place in zip([("s", "m"), ("s", "n"), ("t", "m")], (A, B, C), strict=True)
    }
    for (session, model), place in places.items():
        assert rig.send("x", session, model=model) == (place, First.PINNED)
    assert Counter(rig.send("z", "")[1] for _ in range(20)) == {None: 20}
    assert rig.outcomes == {"bound": 3, "pinned": 3, "none": 20}


def test_explaining_shows_the_pin_and_changes_nothing():
    rig = Rig()
    rig.send("x", subset=(A,))
    rig.now += SECONDS - 1
    assert rig.decide("x").first is First.PINNED
    rig.now += 2
    assert rig.decide("x").first is None
    assert sum(rig.outcomes.values()) == 1


@pytest.mark.parametrize("address", [B, ""])
def test_what_others_know_goes_before_what_is_known_here(address):
    rig = Rig()
    rig.send("x", subset=(A,))
    shared = {SHARED: Binding("10.0.0.2", address)}
    assert rig.send("x", prepared=shared) == (B, First.PINNED)
    assert rig.send("x") == (B, First.PINNED)


def test_the_key_is_kthenas():
    sticky = Rig(settings=StickySettings(SETTINGS.sources, "default/deepseek")).sticky
    expected = "kthena/sticky/" + sha256(b"default/deepseek|conv-1").hexdigest()
    assert sticky.session({"x-session-id": b"conv-1"}, "any") == expected
    assert sticky.session({"x-session-id": b"conv-1"}, "") == expected
    assert sticky.session({"other": b"conv-1"}, "any") == ""
