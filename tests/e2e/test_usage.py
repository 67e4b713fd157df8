"""What engines say of tokens is read wherever Envoy shows it, and no answer is changed or held up by that."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import NamedTuple

import pytest

from picker.app.envoy import Template, bootstrap
from tests.support.bodies import chat
from tests.support.http_client import RawClient, send
from tests.support.picker_process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

USAGE = {"prompt_tokens": 1000, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 640}}
DOCUMENT = json.dumps({"object": "chat.completion", "choices": [], "usage": USAGE}).encode()
EVENTS = b'data: {"choices": []}\n\n' * 3 + b"data: " + DOCUMENT + b"\n\ndata: [DONE]\n\n"
HEADERS_OF = {
    "json": (b"content-type: application/json\r\n", DOCUMENT),
    "events": (b"content-type: text/event-stream\r\n", EVENTS),
    "gzip": (b"content-type: application/json\r\ncontent-encoding: gzip\r\n", gzip.compress(DOCUMENT)),
    "silent": (b"content-type: application/json\r\n", b"{}"),
}


class Way(NamedTuple):
    """How responses come to the picker."""

    template: Template
    allow_mode_override: bool
    reads: bool


WAYS = {
    "full-duplex": Way(Template.FULL_DUPLEX, allow_mode_override=False, reads=True),
    "asked-for": Way(Template.BUFFERED, allow_mode_override=True, reads=True),
    "asked-for-in-vain": Way(Template.BUFFERED, allow_mode_override=False, reads=False),
    "observed": Way(Template.OBSERVABILITY, allow_mode_override=False, reads=True),
}


async def answer(reader, writer):
    """Be an engine that answers as the request's `x-kind` says, in chunks of 50 bytes."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length:" in head:
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        elif b"chunked" in head:
            await reader.readuntil(b"0\r\n\r\n")
        kind = head.split(b"x-kind:")[1].split(b"\r\n")[0].strip().decode()
        headers, body = HEADERS_OF[kind]
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + headers + b"\r\n")
        for start in range(0, len(body), 50):
            chunk = body[start : start + 50]
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
async def test_usage_is_read(start_picker, start_envoy_here, wire, way):
    address = f"127.0.0.1:{await wire(answer)}"
    picker = await start_picker(
        {
            "endpoints": {"static": [{"name": "engine", "address": address}]},
            "exchange": {"learnUsage": "from-body"},
            "scrape": {"enabled": False},
        }
    )
    config = bootstrap(
        way.template, picker=picker.address, endpoints=[address], allow_mode_override=way.allow_mode_override
    )
    envoy = await start_envoy_here(config)
    # The first request shows the picker that there are observers.
    assert (await send(envoy.port, chat("hello"), headers=[("x-kind", "silent")])).status == 200
    before = await picker.settled()
    for _ in range(3):
        for kind, (_, body) in HEADERS_OF.items():
            got = await send(envoy.port, chat("hello"), headers=[("x-kind", kind)])
            assert (got.status, got.body) == (200, body)

    async def all_learnt():
        metrics = await picker.settled()
        return metrics if metrics("learned_total", success="true") == 13 else None

    metrics = await until(all_learnt)
    outcomes = {
        outcome: count - before("response_usage_total", outcome=outcome)
        for outcome, count in metrics.series("response_usage_total", "outcome").items()
    }
    assert {outcome: count for outcome, count in outcomes.items() if count} == (
        {"read": 9, "absent": 3} if way.reads else {}
    )
    assert metrics("in_flight_requests") == metrics("open_streams") == 0
    assert metrics("anomalies_total") == metrics("errors_total") == 0


async def test_an_observed_request_that_its_client_leaves_is_over_too(start_picker, start_envoy_here, wire):
    started = asyncio.Event()

    async def begin_and_hang(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"6\r\ndata: \r\n")
        await writer.drain()
        started.set()
        await asyncio.sleep(30)

    address = f"127.0.0.1:{await wire(begin_and_hang)}"
    picker = await start_picker(
        {
            "endpoints": {"static": [{"name": "engine", "address": address}]},
            "exchange": {"learnUsage": "from-body"},
            "scrape": {"enabled": False},
        }
    )
    config = bootstrap(Template.OBSERVABILITY, picker=picker.address, endpoints=[address])
    envoy = await start_envoy_here(config)
    for _ in range(3):
        started.clear()
        client = await RawClient.connect(envoy.port)
        await client.head("POST", "/v1/chat/completions", [("content-length", "2")])
        await client.send(b"{}")
        await started.wait()
        assert (await client.answer_head())[0] == 200
        client.abort()
    metrics = await picker.settled()
    assert metrics("in_flight_requests") == metrics("open_streams") == 0
    assert metrics("errors_total") == 0
