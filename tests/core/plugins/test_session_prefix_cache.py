"""`session-prefix-cache-producer`: the life of a pick, usage, declared ids, other pickers, bounds."""

import json
import random
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.plugins.session_prefix_cache import (
    SessionMatch,
    SessionPrefixCacheArgs,
    SessionPrefixCacheProducer,
    Unread,
)
from picker.core.prompts import Prompt, Unused, parse
from picker.core.scheduling.api import Candidates, Request
from picker.core.sessions.declared import response_key
from picker.core.sessions.index import Evicted
from picker.core.usage import Usage

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


class Fleet:
    """A producer over some endpoints, asked with whole bodies."""

    def __init__(self, endpoints: int = 3, **args) -> None:
        self.producer = SessionPrefixCacheProducer(SessionPrefixCacheArgs(**args), lambda _model, _entries: None)
        self.table = EndpointTable()
        self.table.replace(Endpoint(f"p{i}", f"10.0.0.{i + 1}:8000") for i in range(endpoints))
        self.rng = random.Random(3)
        self.now = 1.0

    def request(self, path=CHAT, headers=None, unused=None, **body) -> Request:
        raw = json.dumps({"model": "m", **body}).encode()
        prompt = Prompt(unused=unused, headers=headers or {}) if unused else parse(path, raw, headers=headers or {})
        return Request("id", path, prompt, started=int(self.now * 1e9), body_bytes=len(raw))

    def match(self, path=CHAT, slots=None, **body) -> SessionMatch | None:
        chosen = self.table.slots if slots is None else self.table.slots[slots]
        candidates = Candidates(self.table, chosen, sum(1 << int(slot) for slot in chosen))
        return self.producer.match(self.request(path, **body), candidates, self.rng)

    def matched(self, path=CHAT, slots=None, **body) -> list[int]:
        match = self.match(path, slots, **body)
        return [] if match is None else match.info.matched.tolist()

    def fractions(self, path=CHAT, slots=None, **body) -> list[float]:
        match = self.match(path, slots, **body)
        assert match is not None
        assert min(match.info.matched) >= 0
        assert max(match.info.matched) <= match.info.total
        return [round(held / match.info.total, 2) for held in match.info.matched.tolist()]

    def serve(self, slot, path=CHAT, usage=None, **body) -> None:
        self.match(path, **body).picked(slot).confirm(slot, usage)


PARENT = [{"role": "system", "content": "s" * 3000}, user("u" * 1000)]


# --- The life of a pick -------------------------------------------------------------------------------------------


def test_the_covered_fraction_of_a_conversation_that_goes_on():
    fleet = Fleet()
    assert fleet.fractions(messages=PARENT) == [0, 0, 0]
    fleet.serve(1, messages=PARENT)
    assert fleet.fractions(messages=PARENT) == [0, 1, 0]
    assert fleet.fractions(messages=[*PARENT, assistant("a" * 2000), user("v" * 2000)]) == [0, 0.5, 0]
    assert fleet.fractions(messages=PARENT[:1]) == [0, 1, 0]
    assert fleet.fractions(messages=[PARENT[0], user("x" * 1000)]) == [0, 0.75, 0]


def test_prompt_and_match_are_on_the_scale_of_tokens():
    fleet = Fleet()
    fleet.serve(1, messages=PARENT)
    info = fleet.match(messages=[*PARENT, assistant("a" * 4000)]).info
    assert info.unit == "bytes"
    assert info.tokens_per_unit == 0.25
    assert info.prompt_tokens == info.total / 4 == pytest.approx(2000, rel=0.02)


def test_each_endpoint_has_its_own_extent_and_only_candidates_are_told():
    fleet = Fleet(4)
    long = [*PARENT, assistant("a" * 4000), user("?")]
    fleet.serve(0, messages=PARENT[:1])
    fleet.serve(2, messages=long)
    fleet.serve(3, messages=PARENT)
    assert fleet.fractions(messages=long) == [0.37, 0, 1, 0.5]
    assert fleet.fractions(messages=long, slots=[1, 3]) == [0, 0.5]


def test_matching_alone_changes_nothing():
    fleet = Fleet()
    for _ in range(3):
        fleet.match(messages=PARENT)
    assert (fleet.producer.index.positions, len(fleet.producer.names)) == (0, 0)


def test_a_pick_is_visible_at_once_and_vanishes_if_it_fails():
    fleet = Fleet()
    learning = fleet.match(messages=PARENT).picked(1)
    assert fleet.fractions(messages=PARENT) == [0, 1, 0]
    learning.undo()
    assert fleet.fractions(messages=PARENT) == [0, 0, 0]
    assert fleet.producer.index.positions == 0


def test_no_child_of_a_burst_is_routed_blind():
    fleet, children = Fleet(), []
    for number in range(16):
        body = [*PARENT, user(f"child {number}")]
        if number:
            assert fleet.fractions(messages=body)[2] > 0.95
        children.append(fleet.match(messages=body).picked(2))
    for number, child in enumerate(children):
        child.confirm(2) if number % 2 else child.undo()
    assert fleet.fractions(messages=[*PARENT, user("child 1")]) == [0, 0, 1]
    undone = fleet.match(messages=[*PARENT, user("child 2")]).info
    assert 0.95 < undone.matched[2] / undone.total < 1


def test_a_pick_belongs_to_the_endpoint_that_served():
    fleet = Fleet()
    fleet.match(messages=PARENT).picked(1).confirm(2)
    assert fleet.fractions(messages=PARENT) == [0, 0, 1]
    fleet.match(messages=PARENT).picked(0).confirm(None)
    assert fleet.fractions(messages=PARENT) == [0, 0, 1]
    assert fleet.producer.index.held == 0


@pytest.mark.parametrize("gone", ["forget", "restarted"])
@pytest.mark.parametrize("usage", [None, Usage(reply=b"reply", prompt_tokens=1000, cached_tokens=0)])
def test_removal_and_restart_forget_what_is_on_its_way_too(gone, usage):
    fleet = Fleet()
    fleet.serve(1, messages=PARENT)
    learning = fleet.match(messages=PARENT).picked(1)
    getattr(fleet.producer, gone)(1)
    assert fleet.fractions(messages=PARENT) == [0, 0, 0]
    learning.confirm(1, usage)
    assert fleet.producer.index.positions == 0


def test_the_prompts_of_a_batch_add_up():
    fleet = Fleet()
    fleet.serve(0, COMPLETIONS, prompt="a" * 4096)
    assert fleet.fractions(COMPLETIONS, prompt=["a" * 4096, "b" * 4096]) == [0.5, 0, 0]
    fleet.serve(2, COMPLETIONS, prompt=["a" * 4096, "b" * 4096], usage=Usage(reply=b"reply"))
    assert fleet.fractions(COMPLETIONS, prompt=["b" * 4096]) == [0, 0, 1]


def test_texts_without_a_body_are_matched():
    fleet = Fleet()
    request = Request("id", "", Prompt("m", (b"x" * 1000,)))
    candidates = Candidates(fleet.table, fleet.table.slots, fleet.table.mask)
    fleet.producer.match(request, candidates, fleet.rng).picked(1).confirm(1)
    info = fleet.producer.match(request, candidates, fleet.rng).info
    assert info.matched.tolist() == [0, info.total, 0]
    assert 1000 <= info.total <= 1010


def test_images_alone_are_matched():
    fleet = Fleet()
    picture = user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])
    assert fleet.request(messages=[picture]).prompt.unused is Unused.EMPTY
    fleet.serve(1, messages=[picture])
    assert fleet.fractions(messages=[picture]) == [0, 1, 0]


# --- What engines say ---------------------------------------------------------------------------------------------


def test_the_reply_is_part_of_what_the_next_turn_finds():
    fleet, reply = Fleet(), "r" * 3000
    following = [*PARENT, assistant(reply), user("?")]
    fleet.serve(1, messages=PARENT)
    fleet.serve(2, messages=PARENT, usage=Usage(reply=reply.encode(), prompt_tokens=1000, completion_tokens=750))
    assert fleet.fractions(messages=following) == [0, 0.57, 1]
    other = [*PARENT, assistant("s" * 3000), user("?")]
    assert fleet.fractions(messages=other) == [0, 0.57, 0.57]


def test_the_reply_belongs_to_the_endpoint_that_served():
    fleet = Fleet()
    fleet.match(messages=PARENT).picked(0).confirm(2, Usage(reply=b"r" * 4000))
    assert fleet.fractions(messages=[*PARENT, assistant("r" * 4000)]) == [0, 0, 1]


def test_a_conversation_is_one_claim_however_long_it_goes_on():
    fleet, turns = Fleet(), list(PARENT)
    for turn in range(20):
        reply = f"reply {turn} " * 100
        fleet.serve(1, messages=turns, usage=Usage(reply=reply.encode()))
        turns += [assistant(reply), user(f"question {turn}")]
        assert fleet.fractions(messages=turns)[1] > 0.95
    assert fleet.producer.index.kept == 1


def sessions(count):
    return [[user(f"{number} " * 4000)] for number in range(count)]


def test_what_an_engine_computed_anew_tells_that_older_sessions_are_gone():
    fleet = Fleet()
    older, asked, newer = sessions(3)
    fleet.serve(1, messages=[user("warm")], usage=Usage(prompt_tokens=100, cached_tokens=50))
    for session in (older, asked, newer):
        fleet.now += 1
        fleet.serve(1, messages=session)
        fleet.serve(2, messages=session)
    fleet.now += 1
    fleet.serve(1, messages=asked, usage=Usage(prompt_tokens=2000, cached_tokens=16))
    assert fleet.producer.evicted[Evicted.USAGE] == 3
    assert fleet.fractions(messages=older) == [0, 0, 1]
    assert fleet.fractions(messages=asked) == [0, 1, 1]
    assert fleet.fractions(messages=newer) == [0, 1, 1]


@pytest.mark.parametrize(
    ("usage", "body"),
    [
        (Usage(prompt_tokens=2000, cached_tokens=1900), {}),
        (Usage(prompt_tokens=2000), {}),
        (Usage(prompt_tokens=2000, cached_tokens=0), {"prompt_logprobs": 1}),
    ],
)
def test_what_says_nothing_of_evictions_evicts_nothing(usage, body):
    fleet = Fleet()
    (session,) = sessions(1)
    fleet.serve(1, messages=[user("warm")], usage=Usage(prompt_tokens=100, cached_tokens=50))
    fleet.serve(1, messages=session)
    fleet.serve(1, messages=session, usage=usage, **body)
    assert not fleet.producer.evicted


def test_what_an_engine_computes_anew_of_a_response_tells_nothing():
    fleet = Fleet()
    fleet.serve(1, messages=[user("warm")], usage=Usage(prompt_tokens=100, cached_tokens=50))
    fleet.serve(1, RESPONSES, input="q" * 30_000, usage=Usage(reply=b"r", response_id="resp_1"))
    anew = Usage(prompt_tokens=8000, cached_tokens=16)
    fleet.serve(1, RESPONSES, input="?", instructions="new", previous_response_id="resp_1", usage=anew)
    assert not fleet.producer.evicted
    assert fleet.fractions(RESPONSES, input="q" * 30_000) == [0, 1, 0]


def test_an_engine_that_always_says_zero_is_not_believed():
    fleet = Fleet()
    (session,) = sessions(1)
    for _ in range(3):
        fleet.serve(1, messages=session, usage=Usage(prompt_tokens=2000, cached_tokens=0))
    assert not fleet.producer.evicted


def test_a_burst_that_was_not_computed_yet_is_no_eviction():
    fleet = Fleet()
    (session,) = sessions(1)
    fleet.serve(1, messages=[user("warm")], usage=Usage(prompt_tokens=100, cached_tokens=50))
    twins = [fleet.match(messages=session).picked(1) for _ in range(2)]
    for twin in twins:
        twin.confirm(1, Usage(prompt_tokens=2000, cached_tokens=0))
    assert not fleet.producer.evicted


# --- Declared ids -------------------------------------------------------------------------------------------------

SESSION = {"x-session-id": b"s-1"}


def test_an_id_with_other_content_claims_no_more_than_the_content_supports():
    fleet = Fleet()
    fleet.serve(1, messages=PARENT, headers=SESSION, prompt_cache_key="k")
    assert fleet.fractions(messages=PARENT, headers=SESSION, prompt_cache_key="k") == [0, 1, 0]
    for body in (
        {"headers": SESSION},
        {"prompt_cache_key": "k"},
        {"session_id": "s-1"},
        {"headers": {"x-claude-code-session-id": b"s-1"}},
    ):
        assert fleet.matched(messages=[user("something else")], **body) == [0, 0, 0]
        assert fleet.fractions(messages=[PARENT[0], user("x" * 1000)], **body) == [0, 0.75, 0]


@pytest.mark.parametrize(
    "unused",
    [Unused.BODY_MODE_STREAMED, Unused.BODY_TRUNCATED, Unused.CONTENT_ENCODING, Unused.TOO_COMPLEX],
)
@pytest.mark.parametrize("header", ["x-session-id", "session-id", "x-claude-code-session-id", "x-session-affinity"])
def test_an_id_stands_for_its_content_where_nobody_can_read_that(unused, header):
    fleet = Fleet()
    fleet.serve(1, messages=PARENT, headers={header: b"s-1"}, usage=Usage(reply=b"r" * 1000))
    match = fleet.match(headers={header: b"s-1"}, unused=unused)
    assert match.info.matched[1] == match.info.total > 5000
    assert fleet.match(headers={header: b"s-2"}, unused=unused) is None
    assert fleet.producer.unread == {Unread.BY_ID: 1, Unread.UNREADABLE: 1}
    assert match.shared(1) == b""
    match.picked(0).confirm(0, Usage(reply=b"more"))
    assert fleet.fractions(messages=PARENT) == [0, 1, 0]


@pytest.mark.parametrize("unused", [Unused.NO_BODY, Unused.INVALID_JSON, Unused.UNKNOWN_PATH, Unused.FAILED])
def test_an_id_stands_for_nothing_where_there_is_no_prompt(unused):
    fleet = Fleet()
    fleet.serve(1, messages=PARENT, headers=SESSION)
    assert fleet.match(headers=SESSION, unused=unused) is None


def test_more_headers_may_be_named():
    fleet = Fleet(session_headers=("X-My-Session",))
    fleet.serve(1, messages=PARENT, headers={"x-my-session": b"1"})
    assert fleet.matched(headers={"x-my-session": b"1"}, unused=Unused.BODY_TRUNCATED)[1] > 4000


def test_a_stored_conversation_goes_on_where_it_was():
    fleet, conversation = Fleet(), {"conversation": {"id": "conv_1"}}
    fleet.serve(1, RESPONSES, input="q" * 3000, **conversation, usage=Usage(reply=b"r" * 3000))
    assert fleet.fractions(RESPONSES, input="?", **conversation) == [0, 1, 0]
    assert fleet.fractions(RESPONSES, input="?", conversation="conv_1") == [0, 1, 0]
    assert fleet.matched(RESPONSES, input="?", conversation="conv_2") == [0, 0, 0]
    assert fleet.matched(RESPONSES, input="?", **conversation, model="other") == [0, 0, 0]
    assert fleet.matched(RESPONSES, input="?", **conversation, instructions="new ones") == [0, 0, 0]
    fleet.serve(2, RESPONSES, input="p" * 3000, **conversation, usage=Usage(reply=b"t" * 3000))
    assert fleet.fractions(RESPONSES, input="?", **conversation) == [0, 0.5, 1]


def test_forks_of_one_stored_response_find_each_other():
    fleet, text = Fleet(), "q" * 3000
    fleet.serve(1, RESPONSES, input=text, previous_response_id="resp_1")
    assert fleet.fractions(RESPONSES, input=text, previous_response_id="resp_1") == [0, 1, 0]
    assert fleet.matched(RESPONSES, input=text, previous_response_id="resp_2") == [0, 0, 0]
    assert fleet.matched(RESPONSES, input=text) == [0, 0, 0]


def test_what_follows_a_response_goes_where_that_is():
    fleet, reply = Fleet(), Usage(reply=b"r" * 3000, response_id="resp_1")
    fleet.serve(1, RESPONSES, input="q" * 3000, usage=reply)
    assert fleet.fractions(RESPONSES, input="p" * 3000, previous_response_id="resp_1") == [0, 0.67, 0]
    assert fleet.fractions(RESPONSES, input="?", previous_response_id="resp_1") == [0, 1, 0]
    assert fleet.matched(RESPONSES, input="?", previous_response_id="resp_2") == [0, 0, 0]
    # Its content, sent in full, is the same; another conversation is not, whatever was named before.
    whole = [user("q" * 3000), assistant("r" * 3000), user("?")]
    assert fleet.fractions(RESPONSES, input=whole) == [0, 1, 0]
    assert fleet.matched(RESPONSES, input="?") == [0, 0, 0]
    # The engine that has it is the only one that can answer, with other instructions too.
    assert fleet.fractions(RESPONSES, input="?", instructions="new", previous_response_id="resp_1") == [0, 1, 0]
    # Turns go on from each other, and fork.
    for number in range(2, 5):
        body = {"input": "p" * 1000, "previous_response_id": f"resp_{number - 1}"}
        usage = Usage(reply=b"s" * 1000, response_id=f"resp_{number}")
        fleet.serve(1, RESPONSES, **body, usage=usage)
    turns = fleet.match(RESPONSES, input="?", previous_response_id="resp_4").info.matched.tolist()
    assert 12_000 < turns[1] < 12_500
    fork = fleet.match(RESPONSES, input="x", previous_response_id="resp_2").info.matched.tolist()
    assert 8_000 < fork[1] < 8_300
    assert fleet.producer.index.kept == 1


def test_other_apis_do_not_go_on_from_responses():
    fleet = Fleet()
    fleet.serve(1, RESPONSES, input="q" * 3000, usage=Usage(reply=b"r", response_id="resp_1"))
    fleet.serve(1, RESPONSES, input="q" * 3000, conversation="resp_1")
    for name in ("previous_response_id", "conversation"):
        assert fleet.matched(messages=[user("?")], **{name: "resp_1"}) == [0, 0, 0]
        assert fleet.matched("/v1/messages", messages=[user("?")], **{name: "resp_1"}) == [0, 0, 0]
        assert fleet.fractions(messages=[user("q" * 3000)], **{name: "resp_1"}) == [0, 1, 0]


def test_what_follows_a_response_that_is_no_text_goes_there_too():
    fleet = Fleet()
    fleet.serve(2, RESPONSES, input="q" * 3000, usage=Usage(prompt_tokens=750, response_id="resp_1"))
    body = {"input": "p" * 3000, "previous_response_id": "resp_1"}
    assert fleet.fractions(RESPONSES, **body) == [0, 0, 0.5]
    fleet.serve(2, RESPONSES, **body)
    assert fleet.fractions(RESPONSES, **body) == [0, 0, 1]
    assert fleet.fractions(RESPONSES, input="q" * 3000) == [0, 0, 1]


def test_a_response_is_no_more_than_its_endpoint_and_no_other_id():
    fleet = Fleet()
    fleet.serve(1, RESPONSES, input="q" * 3000, usage=Usage(reply=b"r", response_id="resp_1"))
    for name in ("conversation", "prompt_cache_key", "session_id"):
        assert fleet.matched(RESPONSES, input="?", **{name: "resp_1"}) == [0, 0, 0]
    fleet.producer.restarted(1)
    assert fleet.matched(RESPONSES, input="?", previous_response_id="resp_1") == [0, 0, 0]
    learning = fleet.match(RESPONSES, input="q").picked(1)
    learning.undo()
    fleet.match(RESPONSES, input="q").picked(1).confirm(None, Usage(reply=b"r", response_id="resp_2"))
    assert fleet.producer.names.get(response_key("resp_2")) is None


@pytest.mark.parametrize("value", [None, 5, True, [], {}, {"id": 5}, "", "x" * 5000, {"id": ["a"]}])
def test_what_is_no_id_is_none(value):
    fleet = Fleet()
    for name in ("conversation", "previous_response_id", "prompt_cache_key", "session_id"):
        assert fleet.match(RESPONSES, input="x", **{name: value}).ids == ()
    assert fleet.fractions(RESPONSES, input="x", conversation=value) == [0, 0, 0]


# --- Other pickers ------------------------------------------------------------------------------------------------


def test_what_another_picker_sent_is_visible_here():
    here, there = Fleet(), Fleet()
    match = there.match(messages=PARENT)
    learning = here.producer.adopt(1, match.shared(1), 1.0)
    assert here.fractions(messages=PARENT) == [0, 1, 0]
    learning.undo()
    assert here.fractions(messages=PARENT) == [0, 0, 0]
    here.producer.adopt(1, match.shared(1), 1.0).confirm(1, Usage(reply=b"r"))
    assert here.fractions(messages=[*PARENT, user("v" * 4000)]) == [0, 0.5, 0]
    here.producer.adopt(1, match.shared(1), 1.0).confirm(None)
    here.producer.adopt(2, match.shared(1), 1.0).confirm(0)
    assert here.fractions(messages=PARENT) == [1, 1, 0], "it is held by the endpoint that served"
    assert here.producer.index.held == 0


def test_a_picker_that_starts_can_be_told_all_that_is_known_of_an_endpoint():
    here, there = Fleet(), Fleet(cache_tokens=5000)
    conversations = [[*PARENT, user(f"{n}" * (500 + 1000 * n))] for n in range(12)]
    for n, messages in enumerate(conversations):
        here.now += 1
        here.serve(n % 2, messages=messages, usage=Usage(reply=b"r" * 100))
    here.match(messages=[user("not sent yet")]).picked(0)
    for slot in range(3):
        for piece in here.producer.export(slot):
            there.producer.adopt(slot, piece, 1.0).confirm(slot)
    answered = [[*messages, assistant("r" * 100), user("?")] for messages in conversations]
    assert there.matched(messages=answered[-1]) == here.matched(messages=answered[-1])
    assert there.matched(messages=answered[-2]) == here.matched(messages=answered[-2])
    # It had room for less, so what was used longest ago went first.
    assert max(there.matched(messages=answered[0])) < 4200 < max(here.matched(messages=answered[0]))
    assert there.fractions(messages=[user("not sent yet")]) == [0, 0, 0]
    assert there.producer.index.held == 0


def test_what_goes_while_it_is_told_is_left_out():
    fleet = Fleet()
    for n in range(30):
        fleet.serve(1, messages=[user(f"{n:03}" * 100_000)])
    pieces = fleet.producer.export(1)
    next(pieces)
    fleet.producer.forget(1)
    assert list(pieces) == []


def test_what_is_shared_is_small():
    assert len(Fleet().match(messages=[user("x" * 32_768)]).shared(1)) < 1_000


NAMED = {"input": "?", "previous_response_id": "resp_1"}


def end(there, slot, **body):
    """What a picker tells of a request, and of its end."""
    usage = body.pop("usage", None)
    match = there.match(RESPONSES, **body)
    learning = match.picked(slot)
    shared = match.shared(slot)
    learning.confirm(slot, usage)
    return shared, learning.told()


def test_the_reply_and_names_that_another_picker_learnt_are_known_here():
    here, there = Fleet(), Fleet()
    usage = Usage(reply=b"r" * 3000, response_id="resp_1")
    shared, (name, told) = end(there, 1, input="q" * 3000, prompt_cache_key="k", usage=usage)
    assert name == "session-prefix-cache-producer"
    assert len(told) < 150
    pick = here.producer.adopt(1, shared, 1.0)
    pick.hear(told)
    pick.confirm(1)
    for fleet in (here, there):
        assert fleet.fractions(RESPONSES, **NAMED) == [0, 1, 0]
        assert fleet.matched(RESPONSES, **NAMED)[1] > 6000
        assert fleet.producer.index.kept == 1
        assert fleet.producer.index.held == 0
        assert len(fleet.producer.names) == 2
    # Turn by turn, each at the other.
    usage = Usage(reply=b"s" * 3000, response_id="resp_2")
    shared, (_, told) = end(here, 1, **NAMED, usage=usage)
    pick = there.producer.adopt(1, shared, 2.0)
    pick.hear(told)
    pick.confirm(1)
    assert there.matched(RESPONSES, input="!", previous_response_id="resp_2")[1] > 9000
    assert there.producer.index.kept == 1


def test_nothing_is_told_of_an_end_without_reply_or_name():
    fleet = Fleet()
    assert end(fleet, 1, input="q")[1] is None
    assert end(fleet, 1, input="q", usage=Usage(prompt_tokens=9, cached_tokens=0))[1] is None
    assert end(fleet, 1, input="q", prompt_cache_key="k")[1] is not None
    learning = fleet.match(messages=PARENT, headers=SESSION).picked(1)
    learning.undo()
    assert learning.told() is None
    learning = fleet.match(COMPLETIONS, prompt=["a", "b"], headers=SESSION).picked(1)
    learning.confirm(1, Usage(reply=b"r"))
    assert learning.told() is None


def test_an_end_that_cannot_be_is_counted_and_the_pick_stays_what_it_was():
    here, there = Fleet(), Fleet()
    shared, (_, told) = end(there, 1, input="q" * 3000, usage=Usage(reply=b"r", response_id="resp_1"))
    for wrong in (b"", b"\xc1", told[:-1], packed(), b"\x96\xcd\x40\x00" + told[2:]):
        pick = here.producer.adopt(1, shared, 1.0)
        pick.hear(wrong)
        pick.confirm(1)
        assert here.fractions(RESPONSES, input="q" * 3000) == [0, 1, 0]
    two = here.producer.adopt(1, packed((b"12345678", b"1234"), (b"12345679", b"1234")), 1.0)
    two.hear(told)
    two.undo()
    assert here.producer.unread[Unread.FROM_PEER] == 6
    assert len(here.producer.names) == 0
    assert here.producer.index.held == 0


def test_an_end_after_a_restart_teaches_nothing():
    here, there = Fleet(), Fleet()
    shared, (_, told) = end(there, 1, input="q" * 3000, usage=Usage(reply=b"r", response_id="resp_1"))
    pick = here.producer.adopt(1, shared, 1.0)
    here.producer.restarted(1)
    pick.hear(told)
    pick.confirm(1)
    assert (here.producer.index.positions, here.producer.index.held, len(here.producer.names)) == (0, 0, 0)


def test_a_picker_that_starts_can_be_told_what_names_stand_for():
    here, there = Fleet(), Fleet()
    for n in range(40):
        reply = Usage(reply=b"r" * 100, response_id=f"resp_{n}")
        here.serve(n % 2, RESPONSES, input=f"{n:02}" * 80_000, usage=reply)
    there.serve(0, RESPONSES, input="newer" * 900, conversation="c")
    here.serve(0, RESPONSES, input="older", conversation="c")
    for slot in range(3):
        for piece in here.producer.export(slot):
            there.producer.adopt(slot, piece, 1.0).confirm(slot)
    pieces = list(here.producer.export_names())
    assert len(pieces) > 1
    assert max(map(len, pieces)) < 200_000
    for piece in pieces:
        there.producer.adopt_names(piece)
    for n in range(40):
        body = {"input": "?", "previous_response_id": f"resp_{n}"}
        assert there.matched(RESPONSES, **body) == here.matched(RESPONSES, **body)
        assert max(there.matched(RESPONSES, **body)) > 160_000
    # Of a conversation that both know, what is longer.
    assert there.matched(RESPONSES, input="?", conversation="c")[0] > 4_500
    assert len(there.producer.names) == 41
    assert not there.producer.unread


@pytest.mark.parametrize("shared", [b"", b"\xc1", b"hello", msgspec.msgpack.encode([(5, b"", b"", 0, True)])])
def test_names_that_are_none_are_counted(shared):
    fleet = Fleet()
    fleet.producer.adopt_names(shared)
    assert len(fleet.producer.names) == 0
    assert fleet.producer.unread == {Unread.FROM_PEER: 1}


def packed(*pairs):
    return msgspec.msgpack.encode(list(pairs))


@pytest.mark.parametrize(
    "shared",
    [
        b"",
        b"\xc1",
        b"hello",
        packed(),
        packed((b"", b"")),
        packed((b"1234567", b"1234")),
        packed((b"12345678", b"12345678")),
        packed((b"12345678" * 20_000, b"1234" * 20_000)),
        packed((b"12345678", struct.pack("I", (1 << 32) - 1))),
        packed((1, 2)),
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([[b"12345678", b"1234", b""]]),
    ],
)
def test_what_another_picker_could_not_have_sent_is_refused(shared):
    fleet = Fleet()
    assert fleet.producer.adopt(1, shared, 1.0) is None
    assert fleet.producer.unread[Unread.FROM_PEER] == (shared != packed())
    assert fleet.producer.index.positions == 0


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=6))
def test_chains_that_are_none_are_taken_back_without_a_trace(chains):
    fleet = Fleet()
    learnings = [
        fleet.producer.adopt(1, packed((struct.pack(f"{len(one)}Q", *one), struct.pack("I", 7) * len(one))), 1.0)
        for one in chains
    ]
    for number, learning in enumerate(learnings):
        learning.confirm(1) if number % 2 else learning.undo()
    fleet.producer.forget(1)
    assert (fleet.producer.index.positions, fleet.producer.index.held) == (0, 0)


# --- Bounds -------------------------------------------------------------------------------------------------------


def test_an_endpoint_keeps_what_its_engines_cache_has_room_for():
    fleet = Fleet()
    (size,) = {fleet.match(messages=session).info.total for session in sessions(9)[:3]}
    fleet.table.observe(1, EngineMetrics(cache_tokens=2.5 * size / 4 / 1.25), 0.0)
    for session in sessions(3):
        fleet.now += 1
        for slot in (0, 1):
            fleet.serve(slot, messages=session)
    assert [fleet.fractions(messages=session)[:2] for session in sessions(3)] == [[1, 0], [1, 1], [1, 1]]
    assert fleet.producer.evicted == {Evicted.CAPACITY: 1}


def test_without_a_known_cache_the_argument_counts():
    fleet = Fleet(cache_tokens=5000)
    assert np.isnan(fleet.table.cache_tokens[0])
    for session in sessions(4):
        fleet.now += 1
        fleet.serve(0, messages=session)
    assert [fleet.fractions(messages=session)[0] for session in sessions(4)] == [0, 0, 1, 1]


def test_sessions_that_are_not_used_are_forgotten():
    fleet = Fleet(session_seconds=10)
    one, two = sessions(2)
    fleet.serve(0, messages=one)
    fleet.serve(0, messages=two)
    fleet.now += 9
    fleet.serve(0, messages=two)
    fleet.now += 9
    assert [fleet.fractions(messages=session)[0] for session in (one, two)] == [0, 1]
    assert fleet.producer.evicted == {Evicted.TIME: 1}


def test_new_arguments_keep_what_has_room():
    fleet = Fleet()
    for session in sessions(3):
        fleet.serve(0, messages=session)
    assert fleet.producer.reconfigure(SessionPrefixCacheArgs(cache_tokens=2500))
    assert [fleet.fractions(messages=session)[0] for session in sessions(3)] == [0, 0, 1]


def test_zero_and_less_mean_the_default():
    assert SessionPrefixCacheArgs(0, -1, 0).effective() == SessionPrefixCacheArgs()
    assert SessionPrefixCacheArgs(1, 2, 3).effective() == SessionPrefixCacheArgs(1, 2, 3)


def test_content_that_is_nested_too_deeply_is_not_matched_and_counted():
    fleet = Fleet()
    body = b'{"messages":[{"role":"user","content":"x","tool_calls":' + b"[" * 900 + b"1" + b"]" * 900 + b"}]}"
    request = Request("id", CHAT, parse(CHAT, body))
    candidates = Candidates(fleet.table, fleet.table.slots, fleet.table.mask)

    def deeper(calls):
        return deeper(calls - 1) if calls else fleet.producer.match(request, candidates, fleet.rng)

    assert request.prompt.unused is None
    assert deeper(300) is None
    assert fleet.producer.unread == {Unread.TOO_DEEP: 1}


def test_content_with_too_many_positions_is_counted():
    fleet = Fleet()
    messages = [user("x")] * 17_000
    fleet.serve(1, messages=messages)
    assert 0.9 < fleet.fractions(messages=messages)[1] < 1
    assert fleet.producer.unread[Unread.TOO_LONG] == 2
