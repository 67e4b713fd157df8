"""The line of waiting requests against a naive model, and how full endpoints are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.admission.saturation import flow_of, priority_of, saturation
from picker.core.admission.settings import AdmissionSettings
from picker.core.admission.waiting import Waiter, WaitingLine
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics


class Model:
    """A list in the order of arrival, and the flows of each priority in the order of their turns."""

    def __init__(self, requests, size):
        self.requests, self.bytes = requests, size
        self.line = []
        self.turns = {}

    def fits(self, line, waiter):
        return len(line) < self.requests and sum(one.size for one in line) + waiter.size <= self.bytes

    def join(self, waiter):
        left, gone = list(self.line), []
        if not self.fits([one for one in left if one.priority >= waiter.priority], waiter):
            return False, []
        while not self.fits(left, waiter):
            lowest = min(one.priority for one in left)
            lengths = {}
            for flow in self.turns[lowest]:
                lengths[flow] = sum(one.flow == flow and one.priority == lowest for one in left)
            longest = max(lengths, key=lengths.get)
            last = [one for one in left if one.priority == lowest and one.flow == longest][-1]
            left.remove(last)
            gone.append(last)
            self.forget_empty(left)
        self.line = [*left, waiter]
        flows = self.turns.setdefault(waiter.priority, [])
        if waiter.flow not in flows:
            flows.append(waiter.flow)
        return True, gone

    def forget_empty(self, line):
        for priority, flows in self.turns.items():
            flows[:] = [f for f in flows if any(one.priority == priority and one.flow == f for one in line)]

    def take(self):
        if not self.line:
            return None
        best = max(one.priority for one in self.line)
        flow = self.turns[best][0]
        first = next(one for one in self.line if one.priority == best and one.flow == flow)
        self.turns[best].append(self.turns[best].pop(0))
        self.leave(first)
        return first

    def leave(self, waiter):
        if waiter not in self.line:
            return False
        self.line.remove(waiter)
        self.forget_empty(self.line)
        return True


steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(-1, 1), st.sampled_from("abc"), st.integers(0, 4)),
        st.tuples(st.just("take")),
        st.tuples(st.just("leave"), st.integers(0, 30)),
    ),
    max_size=60,
)


@given(st.integers(1, 6), st.integers(1, 12), steps)
def test_turns_are_those_of_the_model(requests, size, steps):
    line, model, known = WaitingLine(requests, size), Model(requests, size), []
    for step in steps:
        if step[0] == "join":
            waiter = Waiter(step[1], step[2], step[3], math.inf)
            known.append(waiter)
            before = list(model.line)
            joined, gone = line.join(waiter)
            assert joined == model.join(waiter)[0]
            if joined:
                assert set(before) - set(gone) | {waiter} == set(model.line)
        elif step[0] == "take":
            assert line.take() is model.take()
        elif known:
            waiter = known[step[1] % len(known)]
            assert line.leave(waiter) == model.leave(waiter)
        assert len(line) == len(model.line) <= requests
        assert line.size == sum(one.size for one in model.line) <= size


def table(*metrics, queued=()):
    made = EndpointTable()
    made.replace(Endpoint(f"p{n}", f"10.0.0.{n}:80") for n in range(len(metrics)))
    for slot, one in enumerate(metrics):
        made.observe(slot, one, 0.0)
    for slot, tokens in enumerate(queued):
        made.queued_tokens[slot] = tokens
    return made


@pytest.mark.parametrize(
    ("metrics", "queued", "full"),
    [
        ((EngineMetrics(waiting=5), EngineMetrics(waiting=10)), (), 1.0),
        ((EngineMetrics(waiting=4), EngineMetrics(waiting=10)), (), 0.8),
        ((EngineMetrics(waiting=0, kv_usage=0.95),), (), 1.0),
        ((EngineMetrics(waiting=0, kv_usage=0.1),), (524_288,), 2.0),
        # What was never measured, or not for long, keeps nobody away.
        ((EngineMetrics(), EngineMetrics(waiting=100)), (), 0.0),
    ],
)
def test_the_emptiest_endpoint_counts_by_its_worst_measure(metrics, queued, full):
    made = table(*metrics, queued=queued)
    assert saturation(made, made.slots, AdmissionSettings()) == pytest.approx(full)


def test_metrics_that_went_stale_keep_nobody_away():
    made = table(EngineMetrics(waiting=100))
    made.expire(10.0)
    assert saturation(made, made.slots, AdmissionSettings()) == 0
    assert saturation(made, np.zeros(0, np.intp), AdmissionSettings()) == 0


def test_priorities_and_flows_come_from_headers():
    settings = AdmissionSettings(objectives={"batch": -1, "chat": 5}, priority_header="x-priority", default_priority=1)
    objective = "x-gateway-inference-objective"
    assert priority_of({}, settings) == 1
    assert priority_of({objective: b"batch"}, settings) == -1
    assert priority_of({"x-llm-d-inference-objective": b"chat"}, settings) == 5
    assert priority_of({objective: b"other"}, settings) == 1
    assert priority_of({objective: b"chat", "x-priority": b"-3"}, settings) == -3
    assert priority_of({objective: b"chat", "x-priority": b"1e9; drop"}, settings) == 5
    assert flow_of({}, settings) == ""
    assert flow_of({"x-llm-d-inference-fairness-id": b"team"}, settings) == "team"
    assert len(flow_of({"x-gateway-inference-fairness-id": b"x" * 10_000}, settings)) == 128
