"""Decisions that wait: what is prepared reaches them, and nothing that goes wrong meanwhile reaches the client."""

from __future__ import annotations

import asyncio

from picker.core.scheduling.decision import Reason
from tests.io.test_extproc_service import BODY, BUFFERED, DUPLEX, Rig, body, destinations, headers, response


class Preparation:
    """Gives what it is told, when it is told."""

    def __init__(self) -> None:
        self.asked = []
        self.answer: asyncio.Future = asyncio.get_running_loop().create_future()
        self.cancelled = 0

    def begin(self, asked, request, seconds):
        self.asked.append((asked, request, seconds))
        return self._wait()

    async def _wait(self):
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Watching:
    """A producer that keeps what requests bring."""

    name = "watching"

    def __init__(self) -> None:
        self.seen = []

    def match(self, request, candidates, rng):  # noqa: ARG002
        self.seen.append(dict(request.prepared))


def rig(**settings):
    made = Rig(**settings)
    made.preparation = made.director.preparation = Preparation()
    made.watching = Watching()
    made.director.scheduler.producers += (made.watching,)
    return made


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_decision_waits_for_its_preparation_and_gets_what_it_found():
    made = rig()
    call, stream = made.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    await settle()
    assert len(call.sent) == 1
    assert made.value("buffered_body_bytes") == len(BODY)
    made.preparation.answer.set_result({"tokens": (1, 2)})
    await settle()
    assert len(destinations(call.sent[1].request_body)) == 3
    assert made.watching.seen == [{"tokens": (1, 2)}]
    ((asked, request, seconds),) = made.preparation.asked
    assert (asked.body, request.path, seconds) == (BODY, "/v1/chat/completions", 0.1)
    assert made.value("buffered_body_bytes") == 0
    stream.message(response())
    stream.half_closed()
    stream.closed()
    assert made.value("learned_total", on="stream_end", success="true") == 1
    assert made.value("in_flight_requests") == 0


async def test_in_full_duplex_nothing_is_answered_until_then():
    made = rig()
    call, stream = made.open()
    stream.message(headers(DUPLEX))
    stream.message(body(BODY))
    await settle()
    assert call.sent == []
    made.preparation.answer.set_result({})
    await settle()
    set_headers = call.sent[0].request_headers.response.header_mutation.set_headers
    assert "x-gateway-destination-endpoint" in [option.header.key for option in set_headers]
    assert call.sent[1].request_body.response.body_mutation.streamed_response.body == BODY


async def test_a_prompt_that_cannot_be_used_is_not_waited_for():
    made = rig()
    call, stream = made.open()
    stream.message(headers(BUFFERED))
    stream.message(body(b"not json"))
    assert len(call.sent) == 2
    assert made.preparation.asked == []


async def test_a_preparation_that_fails_leaves_the_decision_without_it():
    made = rig()
    call, stream = made.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    made.preparation.answer.set_exception(RuntimeError("boom"))
    await settle()
    assert len(destinations(call.sent[1].request_body)) == 3
    assert made.watching.seen == [{}]
    assert made.value("errors_total", where="prepare") == 1


async def test_a_preparation_that_cannot_even_begin_leaves_the_decision_without_it():
    made = rig()

    def broken(*_):
        raise RuntimeError("boom")

    made.preparation.begin = broken
    call, stream = made.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    assert len(destinations(call.sent[1].request_body)) == 3
    assert made.value("errors_total", where="prepare") == 1


async def test_a_stream_that_ends_meanwhile_ends_its_preparation():
    for half in (True, False):
        made = rig()
        call, stream = made.open()
        stream.message(headers(BUFFERED))
        stream.message(body(BODY))
        await settle()
        if half:
            stream.half_closed()
        stream.closed()
        await settle()
        assert made.preparation.cancelled == 1
        assert len(call.sent) == 1
        assert made.watching.seen == []
        for gauge in ("in_flight_requests", "open_streams", "buffered_body_bytes"):
            assert made.value(gauge) == 0


async def test_a_stream_may_end_before_its_preparation_began():
    made = rig()
    _, stream = made.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    stream.closed()
    await settle()
    assert made.value("open_streams") == 0


async def test_a_response_that_overtakes_the_decision_teaches_nothing():
    made = rig()
    _, stream = made.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    await settle()
    stream.message(response(413))
    made.preparation.answer.set_result({})
    await settle()
    stream.closed()
    assert made.value("decisions_total", reason=Reason.ROUTED, model="<other>") == 1
    assert made.value("learned_total", on="stream_end", success="false") == 1
    assert made.value("in_flight_requests") == 0
