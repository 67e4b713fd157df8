"""What is learnt at the end of a request reaches the other pickers: replies, and what responses are called."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.exchange.effects import BodyState, Decide
from picker.core.sharing.messages import Batch, Ended, Known, Picked, decode, encode
from picker.core.sharing.replicas import Heard
from picker.core.usage import Usage
from tests.core.sharing.test_replicas import BAD, GOOD
from tests.core.sharing.test_replicas import Fleet as Pickers

SESSIONS = "session-prefix-cache-producer"


class Fleet(Pickers):
    """Pickers that route by session, asked through the Responses API."""

    def __init__(self, count, producer=SESSIONS):
        self.said = 0
        super().__init__(count, producer=producer)

    def decide(self, number, **fields):
        body = json.dumps({"model": "m", **fields}).encode()
        return self.pickers[number].decide(Decide({":path": b"/v1/responses"}, body, BodyState.COMPLETE, None, None))

    def begin(self, number, **fields):
        return self.pickers[number].route(self.decide(number, **fields))

    def turn(self, number, reply="r" * 2000, **fields):
        """A whole request; returns what its response is called."""
        self.said += 1
        name = f"resp_{self.said}"
        self.begin(number, **fields).finish(GOOD, Usage(reply=reply.encode(), response_id=name))
        return name

    def known(self, number, name):
        """Bytes that each endpoint has of a conversation that goes on from a response."""
        match = self.decide(number, input="?", previous_response_id=name).matches[SESSIONS]
        return match.info.matched.tolist()


def test_the_next_turn_finds_at_any_picker_where_the_response_is():
    fleet = Fleet(3)
    fleet.tick()
    first = fleet.turn(0, input="q" * 2000)
    assert max(fleet.known(0, first)) > 4000
    assert max(fleet.known(1, first)) == 0
    fleet.tick()
    assert fleet.known(1, first) == fleet.known(2, first) == fleet.known(0, first)
    second = fleet.turn(1, input="p" * 2000, previous_response_id=first)
    fleet.tick()
    third = fleet.turn(2, "", input="p" * 2000, previous_response_id=second)
    fleet.tick()
    for name, size in ((first, 4000), (second, 8000), (third, 10_000)):
        held = fleet.known(0, name)
        assert held == fleet.known(1, name) == fleet.known(2, name)
        # On one endpoint, where the conversation lives.
        assert size < sum(held) == max(held) < size + 300


def test_a_newcomer_is_told_names_and_replies():
    fleet = Fleet(2)
    fleet.tick()
    names = [fleet.turn(number % 2, input=f"{number:02}" * 1000) for number in range(12)]
    fleet.tick()
    fleet.start(2)
    fleet.settle()
    for name in names:
        assert fleet.known(2, name) == fleet.known(0, name)
        assert max(fleet.known(2, name)) > 4000
    assert fleet.pickers[2].sharing.heard[Heard.MALFORMED] == 0


@pytest.mark.parametrize("lost", range(6))
def test_a_newcomer_that_misses_a_piece_of_what_is_known_asks_again(lost):
    fleet = Fleet(1)
    names = [fleet.turn(0, input=f"{number:02}" * 120_000) for number in range(15)]
    names += [fleet.turn(0, input="and now?", previous_response_id=name) for name in names]
    fleet.tick()
    fleet.start(1)
    told, heard = (fleet.pickers[number].sharing for number in (0, 1))
    pieces = 0
    for _ in range(100):
        fleet.now += 0.05
        for message in heard.flush(fleet.now):
            told.receive(message, fleet.now)
        for message in told.flush(fleet.now):
            known = isinstance(decode(message), Known)
            if not known or pieces != lost:
                heard.receive(message, fleet.now)
            pieces += known
        heard.expire(fleet.now)
    assert pieces >= 8, "one endpoint's, two of names, and the last one; and these again"
    assert heard.settled
    for name in names:
        assert fleet.known(1, name) == fleet.known(0, name)
        assert max(fleet.known(1, name)) > 240_000


def test_what_failed_has_no_name_anywhere():
    fleet = Fleet(2)
    fleet.tick()
    fleet.begin(0, input="q" * 2000).finish(BAD, Usage(reply=b"r", response_id="resp_1"))
    fleet.tick()
    assert max(fleet.known(0, "resp_1")) == max(fleet.known(1, "resp_1")) == 0


@pytest.mark.parametrize("usage", [None, Usage(prompt_tokens=500, cached_tokens=0, completion_tokens=5)])
@pytest.mark.parametrize("producer", [SESSIONS, "prefix-cache"])
def test_an_end_without_reply_or_name_is_a_few_bytes(usage, producer):
    fleet = Fleet(1, producer)
    fleet.begin(0, input="q" * 2000).finish(GOOD, usage)
    sharing = fleet.pickers[0].sharing
    ends = [event for message in sharing.flush(fleet.now) for event in decode(message).events if type(event) is Ended]
    (end,) = ends
    assert end.told == ()
    assert len(encode(end)) <= 22


def test_an_end_is_told_whatever_a_producer_does():
    fleet = Fleet(2)
    fleet.tick()

    class Broken(Usage):
        @property
        def prompt_tokens(self):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fleet.begin(0, input="q").finish(GOOD, Broken())
    fleet.tick()
    assert fleet.load(1)[0] == [0, 0, 0]


def test_replies_too_long_for_one_message_are_told_in_several():
    fleet = Fleet(2)
    fleet.tick()
    names = [fleet.turn(0, "r" * 1_000_000, input=f"{number}") for number in range(200)]
    messages = fleet.pickers[0].sharing.flush(fleet.now)
    assert len(messages) > 1
    for message in messages:
        assert len(message) < 5_000_000
        assert fleet.pickers[1].sharing.receive(message, fleet.now) is Heard.TAKEN
    assert fleet.known(1, names[-1]) == fleet.known(0, names[-1])
    assert max(fleet.known(1, names[-1])) > 1_000_000


steps = st.lists(
    st.tuples(st.sampled_from(["begin", "begin", "end", "fail", "lose", "tick", "newcomer"]), st.integers(0, 9)),
    max_size=40,
)


@given(steps)
@settings(max_examples=100)
def test_whatever_message_is_lost_all_know_the_same_responses_afterwards(steps):
    fleet, started = Fleet(3), 3
    fleet.tick()
    names, open_requests = [], []
    for action, chance in steps:
        if action == "begin":
            fields = {"input": f"{chance % 3}" * 1500}
            if names and chance > 2:
                fields["previous_response_id"] = names[chance % len(names)]
            open_requests.append((chance % 3, fleet.begin(chance % 3, **fields)))
        elif action in ("end", "fail") and open_requests:
            _, ticket = open_requests.pop(chance % len(open_requests))
            if action == "end":
                fleet.said += 1
                names.append(f"resp_{fleet.said}")
                # Without a text it is known by its name alone.
                reply = b"" if chance == 9 else b"r" * 700
                ticket.finish(GOOD, Usage(reply=reply, response_id=names[-1]))
            else:
                ticket.finish(BAD)
        elif action == "lose":
            fleet.lost = {(chance % 3, (chance + 1 + chance // 3) % 3)}
            fleet.tick()
            fleet.lost = set()
        elif action == "tick":
            fleet.tick()
        elif action == "newcomer" and not open_requests and chance > 6:
            fleet.settle()  # what nobody else knows yet dies with it
            started += 1
            fleet.start(chance % 3, f"picker-{started}")
            fleet.settle()
    for _, ticket in open_requests:
        ticket.finish(BAD)
    fleet.settle()
    for name in names:
        found = [fleet.known(number, name) for number in fleet.pickers]
        assert found[0] == found[1] == found[2]
        assert max(found[0]) > 1500
    for director in fleet.pickers.values():
        (producer,) = director.scheduler.producers
        assert producer.index.held == 0
        assert not producer.unread


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_ends_and_names_that_nobody_told_do_no_harm(shared, told):
    fleet = Fleet(1)
    picker = fleet.pickers[0].sharing
    pick = Picked(1, "10.0.0.1:8000", 5.0, ((SESSIONS, shared),))
    end = Ended(1, "10.0.0.1:8000", ((SESSIONS, told), (SESSIONS, told), ("no-such", told), ("prefix-cache", told)))
    for message in (
        Batch("x", 1, (pick, end)),
        Known("x", "picker-0", SESSIONS, "", told),
        Known("x", "picker-0", "prefix-cache", "", told),
        Known("x", "picker-0", "no-such", "", told),
    ):
        assert picker.receive(encode(message), fleet.now) is Heard.TAKEN
    assert fleet.load(0) == ([0, 0, 0], [0, 0, 0])
    (producer,) = fleet.pickers[0].scheduler.producers
    assert producer.index.held == 0
