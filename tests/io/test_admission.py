"""The gate: who passes, who waits, who is turned away, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref

import pytest

from picker.core.admission.settings import AdmissionSettings, QueueSettings
from picker.core.admission.waiting import Left
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.exchange.effects import BodyState, Decide
from picker.core.scheduling.disaggregation import DisaggregationSettings, PrefillDecode
from picker.core.scheduling.scheduler import Scheduler
from picker.io.admission import Entry, Gate, can_matter

OBJECTIVE = "x-gateway-inference-objective"


class Rig:
    def __init__(self, waiting=9.0, **queue):
        self.director = Director(
            Scheduler((), (), ()), EndpointTable(), fallbacks=0, rng=random.Random(1), timer=time.perf_counter_ns
        )
        self.director.replace_endpoints([Endpoint("a", "10.0.0.1:80"), Endpoint("b", "10.0.0.2:80")])
        self.waits(waiting)
        self.settings = AdmissionSettings(
            objectives={"batch": -1, "chat": 5}, queue=QueueSettings(enabled=True, **queue)
        )
        self.gate = Gate(self.director, self.settings)
        self.told = []

    def waits(self, waiting):
        for slot in (0, 1):
            self.director.table.observe(slot, EngineMetrics(waiting=waiting), 0.0)

    def enter(self, tag, objective="", flow="", size=2):
        headers = {OBJECTIVE: objective.encode(), "x-gateway-inference-fairness-id": flow.encode()}
        asked = Decide(headers, b"x" * size, BodyState.COMPLETE, None, None)
        return self.gate.enter(asked, lambda left: self.told.append((tag, left)))


async def test_everyone_passes_while_there_is_room_and_the_sheddable_are_turned_away_when_there_is_none():
    rig = Rig(waiting=4.0)
    assert rig.enter("a", "batch") is Left.ADMITTED
    full = Rig(waiting=5.0)
    assert full.enter("a", "batch") is Left.DISPLACED
    assert full.gate.counts == {"shed": 1}
    assert isinstance(full.enter("b"), Entry)


async def test_without_a_queue_only_the_sheddable_are_stopped():
    rig = Rig()
    rig.gate.configure(AdmissionSettings(objectives={"batch": -1}))
    assert rig.enter("a") is Left.ADMITTED
    assert rig.enter("b", "batch") is Left.DISPLACED


@pytest.mark.parametrize("how", ["open", "configure"])
async def test_without_a_queue_any_more_who_waits_is_sent_on(how):
    rig = Rig()
    for number in range(40):
        rig.enter(number)
    if how == "open":
        rig.gate.open()
    else:
        rig.gate.configure(AdmissionSettings())
    async with asyncio.timeout(5):
        while len(rig.told) < 40:
            await asyncio.sleep(0.005)
    assert rig.told == [(number, Left.ADMITTED) for number in range(40)]
    assert rig.enter("after") is Left.ADMITTED
    assert rig.gate.waiting == 0


@pytest.mark.parametrize(
    ("roles", "waiting", "full"),
    [
        (("prefill", "decode"), (0.0, 9.0), True),
        (("prefill", "decode"), (9.0, 0.0), True),
        (("prefill", "decode"), (4.0, 4.0), False),
        (("prefill", "both"), (9.0, 0.0), False),
        (("prefill", "prefill"), (0.0, 0.0), False),
        (("both", "both"), (9.0, 0.0), False),
        (("both", "both"), (9.0, 9.0), True),
    ],
)
async def test_each_role_needs_room(roles, waiting, full):
    scheduler = Scheduler((), (), (), disaggregation=PrefillDecode(DisaggregationSettings()))
    table = EndpointTable()
    director = Director(scheduler, table, fallbacks=0, rng=random.Random(1), timer=time.perf_counter_ns)
    director.replace_endpoints(
        Endpoint(f"{n}", f"10.0.0.{n}:80", labels={"llm-d.ai/role": role}) for n, role in enumerate(roles)
    )
    for slot, one in enumerate(waiting):
        table.observe(slot, EngineMetrics(waiting=one), 0.0)
    assert (Gate(director, AdmissionSettings()).saturation() >= 1) is full


async def test_nothing_is_kept_of_those_who_no_longer_wait():
    rig = Rig()
    rig.enter("waits on")
    kept = []

    def enter():
        def left(_left):
            pass

        kept.append(weakref.ref(left))
        return rig.gate.enter(Decide({}, b"x" * 1000, BodyState.COMPLETE, None, None), left)

    for _ in range(100):
        enter().cancel()
    gc.collect()
    assert [left() for left in kept] == [None] * 100
    assert rig.gate.waiting == 1


async def test_those_who_wait_are_admitted_by_priority_and_flows_take_turns():
    rig = Rig()
    for number in range(3):
        rig.enter(f"greedy {number}", flow="greedy")
    rig.enter("modest", flow="modest")
    rig.enter("urgent", "chat")
    rig.waits(0.0)
    rig.gate.room()
    assert [tag for tag, _ in rig.told] == ["urgent", "greedy 0", "modest", "greedy 1", "greedy 2"]
    assert {left for _, left in rig.told} == {Left.ADMITTED}
    assert rig.gate.waiting == rig.gate.waiting_bytes == 0


async def test_room_is_noticed_without_being_told():
    rig = Rig()
    rig.enter("a")
    rig.waits(0.0)
    async with asyncio.timeout(5):
        while not rig.told:
            await asyncio.sleep(0.005)
    assert rig.told == [("a", Left.ADMITTED)]


async def test_who_waits_too_long_is_told_and_who_leaves_is_not():
    rig = Rig(max_seconds=0.03)
    gone = rig.enter("gone")
    rig.enter("late")
    gone.cancel()
    assert rig.gate.waiting == 1
    async with asyncio.timeout(5):
        while not rig.told:
            await asyncio.sleep(0.005)
    assert rig.told == [("late", Left.EXPIRED)]
    assert rig.gate.counts == {Left.CANCELLED: 1, Left.EXPIRED: 1}
    assert rig.gate.waiting == 0


async def test_a_full_line_makes_place_for_higher_priorities_only():
    rig = Rig(max_requests=2)
    rig.enter("a")
    rig.enter("b")
    assert rig.enter("c") is Left.DISPLACED
    assert isinstance(rig.enter("d", "chat"), Entry)
    assert rig.told == [("b", Left.DISPLACED)]
    assert rig.enter("large", "chat", size=300_000_000) is Left.DISPLACED
    assert rig.gate.counts == {"full": 2, Left.DISPLACED: 1}


async def test_one_that_fails_when_it_is_told_does_not_stop_the_others():
    rig = Rig()

    def fail(_left):
        raise RuntimeError("broken stream")

    rig.gate.enter(Decide({}, b"", BodyState.NONE, None, None), fail)
    rig.enter("next")
    rig.waits(0.0)
    with pytest.raises(RuntimeError):
        rig.gate.room()
    async with asyncio.timeout(5):
        while not rig.told:
            await asyncio.sleep(0.005)
    assert rig.told == [("next", Left.ADMITTED)]


def test_a_gate_is_there_only_if_it_could_stop_anybody():
    assert not can_matter(AdmissionSettings())
    assert not can_matter(AdmissionSettings(objectives={"chat": 3}))
    assert can_matter(AdmissionSettings(objectives={"batch": -1}))
    assert can_matter(AdmissionSettings(default_priority=-1))
    assert can_matter(AdmissionSettings(priority_header="x-priority"))
    assert can_matter(AdmissionSettings(queue=QueueSettings(enabled=True)))
