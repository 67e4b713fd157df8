"""Observing streams beside the streams that route, in any order in which they may end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from picker.core.scheduling.api import MatchInfo
from picker.core.scheduling.scheduler import Scheduler
from picker.core.tickets import PrefillSignal
from picker.io.extproc import observer
from tests.io.test_extproc_service import BODY, BUFFERED, Rig, body

USAGE = b'{"usage": {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}}'


def request_headers(request_id: str, *, observed: bool) -> bytes:
    message = pb.ProcessingRequest(observability_mode=observed)
    message.protocol_config.request_body_mode = BUFFERED
    values = {":path": "/v1/chat/completions", ":method": "POST", "x-request-id": request_id}
    for key, value in values.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return message.SerializeToString()


def response_headers(*, observed: bool, status: int = 200, end: bool = False) -> bytes:
    message = pb.ProcessingRequest(observability_mode=observed)
    for key, value in {":status": b"%d" % status, "content-type": b"application/json"}.items():
        message.response_headers.headers.headers.add(key=key, raw_value=value)
    message.response_headers.end_of_stream = end
    return message.SerializeToString()


def response_body(data: bytes, *, end: bool) -> bytes:
    message = pb.ProcessingRequest(observability_mode=True)
    message.response_body.body, message.response_body.end_of_stream = data, end
    return message.SerializeToString()


class Learnt(Rig):
    """A service that reads usage, and what each finished request was taught."""

    def __init__(self) -> None:
        super().__init__(wants_response_body=True)
        self.service.observations.seen = True
        self.usages = []
        plain = self.director.scheduler
        self.director.scheduler = Scheduler((), (Learner(self.usages),), plain.scorers, counts_work=True)

    @property
    def prefilled(self) -> int:
        return self.director.prefill_signals[PrefillSignal.RESPONSE_BODY]

    def request(self, request_id: str):
        call, stream = self.open()
        stream.message(request_headers(request_id, observed=False))
        stream.message(body(BODY))
        return call, stream

    def observer(self, request_id: str):
        call, stream = self.open()
        stream.message(request_headers(request_id, observed=True))
        return call, stream

    def outcomes(self):
        return dict(self.service.usage_outcomes)


class Learner:
    """A producer that keeps what usage each successful request was confirmed with."""

    name = "learner"

    def __init__(self, usages) -> None:
        self.usages = usages
        self.info = MatchInfo(np.zeros(3, np.int64), 1, "blocks", 16.0, 100.0)

    def match(self, *_):
        return self

    def picked(self, _):
        return self

    def confirm(self, _, usage) -> None:
        self.usages.append(usage)

    def undo(self) -> None: ...


@pytest.mark.parametrize("observer_ends_first", [True, False])
async def test_usage_reaches_its_request_whichever_stream_ends_first(observer_ends_first):
    rig = Learnt()
    _, first = rig.request("a")
    _, second = rig.request("b")
    call, watching = rig.observer("a")
    watching.message(response_headers(observed=True))
    first.message(response_headers(observed=False))
    second.message(response_headers(observed=False))
    watching.message(response_body(USAGE[:20], end=False))
    assert rig.prefilled == 1
    if observer_ends_first:
        watching.message(response_body(USAGE[20:], end=True))
        first.closed()
    else:
        first.closed()
        assert rig.usages == []
        watching.message(response_body(USAGE[20:], end=True))
    assert [(usage.prompt_tokens, usage.cached_tokens) for usage in rig.usages] == [(100, 64)]
    second.closed()
    watching.closed()
    assert rig.usages[1] is None, "nobody observes the second"
    assert call.sent == [], "an observer gets no answer"
    assert rig.outcomes() == {"read": 1}
    assert rig.value("in_flight_requests") == rig.value("open_streams") == 0


async def test_an_observer_that_is_cut_off_tells_what_it_has():
    rig = Learnt()
    _, stream = rig.request("a")
    _, watching = rig.observer("a")
    watching.message(response_headers(observed=True))
    stream.message(response_headers(observed=False))
    stream.closed()
    watching.closed()
    assert rig.usages == [None]
    assert rig.outcomes() == {"absent": 1}


async def test_a_request_waits_only_so_long_for_its_observer(monkeypatch):
    monkeypatch.setattr(observer, "LINGER_SECONDS", 0.01)
    rig = Learnt()
    _, stream = rig.request("a")
    _, watching = rig.observer("a")
    watching.message(response_headers(observed=True))
    stream.message(response_headers(observed=False))
    stream.closed()
    assert rig.usages == []
    while not rig.usages:
        await asyncio.sleep(0.01)
    assert rig.usages == [None]
    watching.message(response_body(USAGE, end=True))
    assert rig.usages == [None]
    assert rig.outcomes() == {"late": 1, "read": 1}
    assert rig.value("in_flight_requests") == 0


async def test_ids_that_tell_no_request_apart_are_counted_and_cost_nothing_else(monkeypatch):
    monkeypatch.setattr(observer, "MOST_EXPECTED", 2)
    rig = Learnt()
    streams = [rig.request(request_id)[1] for request_id in ("a", "a", "", "b", "c")]
    for request_id in ("nobody", "a", "a"):
        rig.observer(request_id)[1].message(response_headers(observed=True))
    for stream in streams:
        stream.message(response_headers(observed=False))
        stream.closed()
    assert rig.outcomes() == {"duplicate_id": 1, "no_request_id": 1, "too_many": 1, "unmatched": 2}
    assert rig.usages == [None] * 4, "the first waits for its observer"


async def test_informational_responses_and_those_without_body_are_observed_too():
    rig = Learnt()
    _, stream = rig.request("a")
    _, watching = rig.observer("a")
    watching.message(response_headers(observed=True, status=103))
    watching.message(response_headers(observed=True, status=204, end=True))
    stream.message(response_headers(observed=False, status=204, end=True))
    assert rig.usages == [None]
    assert rig.outcomes() == {"absent": 1}


def test_without_a_reader_observers_are_only_counted():
    rig = Rig()
    call, stream = rig.open()
    stream.message(request_headers("a", observed=True))
    stream.message(response_headers(observed=True))
    stream.message(response_body(USAGE, end=True))
    stream.half_closed()
    stream.closed()
    assert call.sent == []
    assert rig.value("open_streams") == 0
    assert rig.value("response_usage_total", outcome="unmatched") == 1


def test_reading_that_fails_costs_the_usage_and_nothing_else(monkeypatch):
    rig = Rig(wants_response_body=True)

    def broken(*_):
        raise RuntimeError("boom")

    monkeypatch.setattr("picker.core.usage.UsageReader.feed", broken)
    call, stream = rig.open()
    message = pb.ProcessingRequest.FromString(request_headers("a", observed=False))
    message.protocol_config.request_body_mode = message.protocol_config.response_body_mode = pb.FULL_DUPLEX_STREAMED
    stream.message(message.SerializeToString())
    stream.message(body(BODY))
    stream.message(response_headers(observed=False))
    for end in (False, True):
        piece = pb.ProcessingRequest()
        piece.response_body.body, piece.response_body.end_of_stream = USAGE, end
        stream.message(piece.SerializeToString())
    stream.closed()
    echoed = [answer.response_body.response.body_mutation.streamed_response.body for answer in call.sent[-2:]]
    assert echoed == [USAGE, USAGE]
    assert rig.value("errors_total", where="usage") == 1
    assert rig.value("learned_total", on="response_body", success="true") == 1
