"""Pickers that share picks: a property test over every loss, and what a newcomer knows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.sharing.messages import Batch, Picked, decode, encode
from picker.core.sharing.replicas import GONE_SECONDS, Heard, Replicas
from picker.core.tickets import PrefillSignal

GOOD = Finish(success=True, learned_on=LearnedOn.STREAM_END, status=200, served=None)
BAD = Finish(success=False, learned_on=LearnedOn.STREAM_END, status=500, served=None)


class Fleet:
    """Pickers on one channel that a test may cut."""

    def __init__(self, count, endpoints=3, producer="prefix-cache"):
        self.now = 100.0
        self.producer = producer
        self.endpoints = endpoints
        self.pickers = {}
        self.tickets = {}
        self.lost = set()
        for number in range(count):
            self.start(number)

    def start(self, number, name=None):
        profile = PROFILES[ProfileName.TOKEN_COST]
        spec = SchedulerSpec(profile.filters, profile.scorers, profile.args, (self.producer,))
        scheduler, _ = build_scheduler(spec, None, lambda _model, _blocks: None)
        director = Director(
            scheduler, EndpointTable(), fallbacks=0, rng=random.Random(number), timer=lambda: int(self.now * 1e9)
        )
        director.replace_endpoints(Endpoint(f"p{n}", f"10.0.0.{n}:8000") for n in range(self.endpoints))
        director.sharing = Replicas(director, name or f"picker-{number}")
        self.pickers[number] = director
        self.tickets[number] = []
        return director

    def tick(self, seconds=0.01):
        self.now += seconds
        for number, director in list(self.pickers.items()):
            director.sharing.expire(self.now)
            for message in director.sharing.flush(self.now):
                for other, receiver in self.pickers.items():
                    if (number, other) not in self.lost:
                        receiver.sharing.receive(message, self.now)

    def settle(self):
        for _ in range(60):
            self.tick(0.06)

    def send(self, number, text):
        director = self.pickers[number]
        body = b'{"model": "m", "prompt": "%s"}' % text.encode()
        decision = director.decide(Decide({":path": b"/v1/completions"}, body, BodyState.COMPLETE, None, None))
        self.tickets[number].append(director.route(decision))
        return decision

    def load(self, number):
        table = self.pickers[number].table
        slots = table.slots
        return table.in_flight[slots].tolist(), [round(tokens, 3) for tokens in table.queued_tokens[slots].tolist()]

    def matched(self, number, text):
        body = b'{"model": "m", "prompt": "%s"}' % text.encode()
        decision = self.pickers[number].decide(
            Decide({":path": b"/v1/completions"}, body, BodyState.COMPLETE, None, None)
        )
        return decision.matches[self.producer].info.matched.tolist()


def test_a_pick_of_one_is_a_pick_of_all():
    fleet = Fleet(3)
    text = "a" * 40_000
    decision = fleet.send(0, text)
    fleet.tick()
    assert fleet.load(0) == fleet.load(1) == fleet.load(2)
    assert sum(fleet.load(1)[1]) == 10_000
    assert fleet.matched(1, text) == fleet.matched(0, text)
    assert fleet.matched(1, text)[decision.slot] == 79
    # The others see when its prompt is computed, stay with it, and see when it is over.
    fleet.tickets[0][0].prefilled(fleet.now, PrefillSignal.RESPONSE_BODY)
    fleet.tick()
    assert sum(fleet.load(1)[1]) == 0
    assert fleet.send(1, text).slot == decision.slot
    fleet.tick()
    assert fleet.load(0) == fleet.load(2)
    assert sum(fleet.load(2)[1]) == pytest.approx(1)
    for number in (0, 1):
        fleet.tickets[number][0].finish(GOOD)
    fleet.tick()
    assert fleet.load(2) == ([0, 0, 0], [0, 0, 0])
    assert fleet.matched(2, text)[decision.slot] == 79


def test_a_request_that_fails_teaches_nobody_anything():
    fleet = Fleet(2)
    fleet.send(0, "a" * 4000)
    fleet.tick()
    fleet.tickets[0][0].finish(BAD)
    fleet.tick()
    assert fleet.load(1) == ([0, 0, 0], [0, 0, 0])
    assert fleet.matched(1, "a" * 4000) == [0, 0, 0]


def test_a_picker_that_dies_takes_its_requests_with_it_within_a_second_and_one_that_leaves_at_once():
    fleet = Fleet(3)
    fleet.tick()
    for number in (0, 1):
        fleet.send(number, f"{number}" * 4000)
    fleet.tick()
    assert sum(fleet.load(2)[0]) == 2
    fleet.lost |= {(0, 1), (0, 2)}
    for _ in range(int(GONE_SECONDS / 0.05) + 2):
        fleet.tick(0.05)
    assert sum(fleet.load(2)[0]) == 1
    fleet.pickers[2].sharing.receive(fleet.pickers[1].sharing.leave(), fleet.now)
    assert fleet.load(2) == ([0, 0, 0], [0, 0, 0])


@pytest.mark.parametrize("producer", ["prefix-cache", "session-prefix-cache-producer"])
def test_a_newcomer_knows_what_the_others_know(producer):
    fleet = Fleet(2, producer=producer)
    texts = [f"{n:04}" * 2000 for n in range(20)]
    for number, text in enumerate(texts):
        fleet.send(number % 2, text)
    fleet.tick()
    for number in (0, 1):
        for ticket in fleet.tickets[number][:-1]:
            ticket.finish(GOOD)
    fleet.tick()
    fleet.start(2)
    fleet.settle()
    assert [fleet.matched(2, text) for text in texts] == [fleet.matched(0, text) for text in texts]
    assert fleet.load(2) == fleet.load(0)
    assert sum(fleet.load(2)[0]) == 2
    assert fleet.pickers[2].sharing.settled


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["send", "prefilled", "end", "fail", "cut", "heal", "tick", "pause", "restart", "endpoints", "noise"]
        ),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=150)
def test_whatever_is_lost_they_agree_afterwards(steps):
    fleet, started = Fleet(3), 3
    for action, one, other in steps:
        number = one % 3
        tickets = fleet.tickets[number]
        if action == "send":
            fleet.send(number, f"{other}" * 3000)
        elif action == "prefilled" and tickets:
            tickets[other % len(tickets)].prefilled(fleet.now, PrefillSignal.RESPONSE_BODY)
        elif action in ("end", "fail") and tickets:
            tickets.pop(other % len(tickets)).finish(GOOD if action == "end" else BAD)
        elif action == "cut":
            fleet.lost.add((number, other % 3))
        elif action == "heal":
            fleet.lost.clear()
        elif action == "tick":
            fleet.tick()
        elif action == "pause":
            fleet.tick(1.5)
        elif action == "restart":
            started += 1
            fleet.start(number, f"picker-{started}")
        elif action == "endpoints":
            for director in fleet.pickers.values():
                director.replace_endpoints(Endpoint(f"p{n}", f"10.0.0.{n}:8000") for n in range(1 + other % 3))
        elif action == "noise":
            fleet.pickers[number].sharing.receive(bytes((one, other)) * 9, fleet.now)
        for director in fleet.pickers.values():
            assert (director.table.in_flight >= 0).all()
            assert (director.table.queued_tokens >= 0).all()
    fleet.lost.clear()
    fleet.settle()
    for tickets in fleet.tickets.values():
        while tickets:
            tickets.pop().finish(GOOD)
    fleet.settle()
    for number, director in fleet.pickers.items():
        assert director.sharing.peers == 2
        assert director.sharing.remote_requests == 0
        in_flight, queued = fleet.load(number)
        assert not any(in_flight)
        assert queued == pytest.approx([0] * len(queued), abs=0.01)


def test_when_who_tells_a_newcomer_dies_another_one_does():
    fleet = Fleet(3)
    fleet.tick()
    prompts = [f"{number:02d}" * 3000 for number in range(9)]
    for number, prompt in enumerate(prompts):
        fleet.send(number % 3, prompt)
        fleet.tick()
        fleet.tickets[number % 3][-1].finish(GOOD)
    fleet.settle()
    newcomer = fleet.start(3)
    fleet.lost = {(0, 3)}  # so that 1 is met first, which will tell
    fleet.tick(0.26)
    fleet.lost = set()
    fleet.pickers.pop(1)
    fleet.settle()
    assert newcomer.sharing.settled
    assert all(max(fleet.matched(3, prompt)) > 0 for prompt in prompts)


@pytest.mark.parametrize("unheard", [{(2, 0), (2, 1), (0, 2), (1, 2)}, {(2, 0)}, {(2, 0), (2, 1)}, {(0, 2), (1, 2)}])
def test_what_was_learnt_by_one_that_was_away_is_known_to_all_afterwards(unheard):
    fleet = Fleet(3)
    for time in range(2):  # the first time nobody has asked anybody yet
        fleet.settle()
        fleet.lost = unheard
        prompts = [f"learnt by {number}, {time} " * 500 for number in range(3)]
        for number, prompt in enumerate(prompts):
            fleet.send(number, prompt)
            fleet.settle()
            fleet.tickets[number][-1].finish(GOOD)
            fleet.settle()
        fleet.lost = set()
        fleet.settle()
        for number in range(3):
            assert fleet.pickers[number].sharing.settled
            assert [max(fleet.matched(number, prompt)) > 0 for prompt in prompts] == [True] * 3


def test_one_lost_message_under_load_costs_one_question():
    fleet = Fleet(4)
    fleet.tick()

    def send():
        for number in fleet.pickers:
            fleet.send(number, f"{number} {fleet.now}" * 50)

    def tick():
        # Requests come while messages do: between a question and its answer, too.
        fleet.now += 0.01
        for number, director in fleet.pickers.items():
            messages = director.sharing.flush(fleet.now)
            send()
            for message in messages:
                for other, receiver in fleet.pickers.items():
                    if (number, other) not in fleet.lost:
                        receiver.sharing.receive(message, fleet.now)

    tick()
    fleet.lost = {(0, 1)}
    tick()
    fleet.lost = set()
    for _ in range(8):
        tick()
    assert [director.sharing.gaps for director in fleet.pickers.values()] == [0, 1, 0, 0]
    fleet.tick()
    assert fleet.load(0)[0] == fleet.load(1)[0] == fleet.load(2)[0]


def test_prompts_too_long_for_one_message_are_told_in_several_and_answers_leave_out_the_oldest(monkeypatch):
    monkeypatch.setattr("picker.core.sharing.telling.MOST_TOLD", 5_000)
    monkeypatch.setattr("picker.core.sharing.messages.MOST_BYTES", 10_000)
    fleet = Fleet(2)
    fleet.tick()
    prompts = [f"{number:02d}" * 20_000 for number in range(20)]  # 600 bytes each as hashes
    for prompt in prompts:
        fleet.send(0, prompt)
    fleet.tick()
    receiver = fleet.pickers[1].sharing
    assert receiver.remote_requests == 20
    fleet.start(2)
    for _ in range(30):
        fleet.tick(0.05)
    newcomer = fleet.pickers[2].sharing
    assert newcomer.settled
    assert newcomer.remote_requests == 20
    assert newcomer.heard[Heard.MALFORMED] == receiver.heard[Heard.MALFORMED] == 0
    assert max(fleet.matched(2, prompts[-1])) > 0
    assert fleet.load(2) == fleet.load(0)


@given(st.binary(max_size=100))
def test_nothing_that_comes_in_does_harm(data):
    fleet = Fleet(1)
    replicas = fleet.pickers[0].sharing
    assert replicas.receive(data, fleet.now) in Heard
    pick = Picked(1, "10.0.0.1:8000", 5.0, (("prefix-cache", data), ("no-such", data)))
    assert replicas.receive(encode(Batch("x", 1, (pick,))), fleet.now) is Heard.TAKEN
    assert fleet.load(0)[0] == [0, 1, 0]


@pytest.mark.parametrize(
    "message",
    [
        Batch("", 1),
        Batch("x" * 100, 1),
        Batch("x", -1),
        Batch("x", 1, (Picked(1, "a", -5.0),)),
        Batch("x", 1, (Picked(1, "a", float("inf")),)),
        Batch("x", 1, (Picked(-1, "a", 5.0),)),
    ],
)
def test_values_that_make_no_sense_are_refused(message):
    with pytest.raises(ValueError, match="Expected"):
        decode(encode(message))
