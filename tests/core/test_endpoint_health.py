"""Which endpoints are suspect and when they are probed, by our own requests alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.endpoint_health import EndpointHealth, SuspectWork, Suspicion
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.plugins.args import NoArgs
from picker.core.plugins.endpoint_health import EndpointHealthFilter
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Candidates, Request

STEP = 0.05


class Pool:
    """Three endpoints that get a request each 50 ms by turns of those kept; what becomes of it is up to the test."""

    def __init__(self, count: int = 3) -> None:
        self.table = EndpointTable()
        self.table.replace(Endpoint(f"p{number}", f"10.0.0.{number + 1}:8000") for number in range(count))
        self.health: EndpointHealth = self.table.health
        self.plugin = EndpointHealthFilter(NoArgs())
        self.now = 100.0
        self.turn = 0

    def request(self) -> tuple[Request, Candidates]:
        request = Request("", "", Prompt(), started=int(self.now * 1e9))
        return request, Candidates(self.table, self.table.slots, self.table.mask)

    def kept(self) -> set[int]:
        keep = self.plugin.keep(*self.request())
        return set(self.table.slots.tolist() if keep is None else self.table.slots[keep].tolist())

    def send(self) -> int:
        """Send one where the filter wants it: to the one to probe, else by turns."""
        kept = sorted(self.kept())
        probed = self.plugin.probe(*self.request())
        self.turn += 1
        slot = kept[self.turn % len(kept)] if probed is None or probed not in kept else probed
        self.health.sent(slot, self.now)
        return slot

    def answer(self, slot: int, seconds: float = 0.02) -> None:
        self.health.answered(slot, seconds)
        self.health.alive(slot, self.now, 0)

    def fail(self, slot: int) -> None:
        self.health.failed(slot)
        self.health.alive(slot, self.now, 0)

    def run(self, seconds: float, *, failing: int | None = None, silent: int | None = None) -> list[tuple[float, int]]:
        """Serve for so long; returns when which endpoint got a request."""
        sent = []
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            slot = self.send()
            sent.append((self.now, slot))
            if slot == failing:
                self.fail(slot)
            elif slot != silent:
                self.answer(slot)
        return sent


def test_four_failures_in_a_row_are_the_end_of_work_but_for_probes_with_growing_pauses():
    pool = Pool()
    sent = [at for at, slot in pool.run(60.0, failing=1) if slot == 1]
    assert pool.health.suspicions == {Suspicion.FAILING: 1, Suspicion.SILENT: 0}
    gaps = np.diff(sent)
    # Three in turn, 150 ms apart; the first probe is due at once, and each further one after twice the time.
    assert gaps[:3].max() < 1
    probes = gaps[4:]
    assert probes.tolist() == pytest.approx([1, 2, 4, 8, 15, 15], abs=0.3)
    assert pool.health.suspect_work[SuspectWork.PROBE] == 7


def test_answered_probes_bring_it_back():
    pool = Pool()
    pool.run(5.0, failing=1)
    assert pool.kept() == {0, 2}
    after = pool.run(40.0)
    share = sum(slot == 1 for _, slot in after[-60:]) / 60
    assert share == pytest.approx(1 / 3, abs=0.05)
    assert pool.kept() == {0, 1, 2}


def test_it_comes_back_within_a_second_of_the_first_probe_that_is_answered():
    pool = Pool()
    pool.run(5.0, failing=1)
    first = next(at for at, slot in pool.run(10.0) if slot == 1)
    pool.now = max(pool.now, first + 1.0)
    assert pool.kept() == {0, 1, 2}


def test_an_endpoint_that_accepts_and_never_answers_is_suspect_within_5_seconds():
    pool = Pool()
    pool.run(10.0)
    stuck_at = pool.now
    times = [at - stuck_at for at, slot in pool.run(30.0, silent=2) if slot == 2]
    assert pool.health.suspicions[Suspicion.SILENT] == 1
    late = [at for at in times if at > 5.0]
    assert len(late) <= 5, "probes after 1, 2, 4, 8 and 15 seconds"
    pool.health.alive(2, pool.now, 0)
    pool.now += STEP
    assert pool.kept() == {0, 1, 2}


def test_when_all_are_suspect_all_are_kept():
    pool = Pool()
    for slot in range(3):
        for _ in range(4):
            pool.health.sent(slot, pool.now)
            pool.fail(slot)
    pool.now += 1
    assert pool.health.suspects(pool.table.slots, pool.now).all()
    assert pool.kept() == {0, 1, 2}
    assert pool.plugin.probe(*pool.request()) is None
    for _ in range(10):
        pool.now += 0.01
        pool.send()
    assert pool.health.suspect_work[SuspectWork.PROBE] == 3
    assert pool.health.suspect_work[SuspectWork.NO_OTHER] == 7


def test_work_for_want_of_others_does_not_put_probes_off():
    pool = Pool(1)
    for _ in range(50):
        pool.health.sent(0, pool.now)
        pool.fail(0)
        pool.now += 0.01
    pool.now += 1.0
    pool.kept()
    assert pool.health.due(pool.table.slots, pool.now) == 0


def test_a_slow_endpoint_that_answers_is_not_suspect():
    pool = Pool(2)
    for _ in range(40):
        pool.now += STEP
        pool.health.sent(0, pool.now)
        pool.answer(0)
        pool.health.sent(1, pool.now)
        pool.now += 1.9  # less than the least patience
        pool.answer(1, 1.9)
        assert pool.kept() == {0, 1}
    # What the pool takes by itself is what it may take: patience is 1.5 times the slowest recent answer.
    pool.health.answered(0, 10.0)
    pool.health.sent(1, pool.now)
    pool.now += 14.9
    assert pool.kept() == {0, 1}
    assert pool.health.suspects(pool.table.slots, pool.now) is None
    pool.now += 0.2
    assert pool.health.suspects(pool.table.slots, pool.now).tolist() == [False, True]


def test_another_endpoint_in_the_slot_is_trusted():
    pool = Pool()
    pool.run(5.0, failing=1)
    assert pool.kept() == {0, 2}
    pool.table.replace([pool.table.endpoints[0], pool.table.endpoints[2]])
    pool.table.replace([pool.table.endpoints[0], pool.table.endpoints[2], Endpoint("new", "10.0.0.9:8000")])
    pool.now += 1
    assert pool.kept() == {0, 1, 2}


class Failures:
    """An endpoint's moving share of failures, by the words of the documentation."""

    def __init__(self) -> None:
        self.share, self.suspect = 0.0, False

    def saw(self, failed: bool) -> None:
        self.share += 0.2 * (failed - self.share)
        if failed and self.share > 0.5:
            self.suspect = True
        if not failed and self.share < 0.2:
            self.suspect = False


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=80))
def test_suspects_are_those_of_a_simple_model_and_never_nobody_is_left(steps):
    pool, models = Pool(), [Failures() for _ in range(3)]
    for slot, failed in steps:
        pool.now += STEP
        pool.health.sent(slot, pool.now)
        (pool.fail if failed else pool.answer)(slot)
        models[slot].saw(failed)
        pool.now += STEP
        suspects = {slot for slot in range(3) if models[slot].suspect}
        found = pool.health.suspects(pool.table.slots, pool.now)
        assert suspects == (set() if found is None else set(np.flatnonzero(found).tolist()))
        kept = pool.kept()
        assert kept >= set(range(3)) - suspects
        assert len(kept & suspects) <= (3 if len(suspects) == 3 else 1)
        assert kept
