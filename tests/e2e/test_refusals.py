"""Requests that cannot or should not be served, and bodies beyond any limit."""

from __future__ import annotations

import asyncio

import pytest

from picker.app.envoy import Template, bootstrap
from tests.support.bodies import chat, chat_of
from tests.support.engine import PIECE
from tests.support.http_client import RawClient, send
from tests.support.picker_process import KTHENA, OFTEN, over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

MEBIBYTE = 1 << 20


def in_front_of(template, picker, engines, **changes):
    return bootstrap(template, picker=picker.address, endpoints=[engine.address for engine in engines], **changes)


def pieces(body):
    return [body[at : at + PIECE] for at in range(0, len(body), PIECE)]


@pytest.mark.parametrize("template", Template)
async def test_without_endpoints_the_client_is_told(pickers, start_envoy_here, engines, template):
    picker = await pickers(over([]))
    envoy = await start_envoy_here(in_front_of(template, picker, engines))
    before = sum(engine.requests for engine in engines)
    for body in (chat("hello"), b"", chat_of(MEBIBYTE)):
        answer = await send(envoy.port, body)
        assert answer.status == 503
        assert answer.headers["content-type"] == "application/json"
        assert answer.seen["error"]["type"] == "no_endpoints"
        assert "discovery" in answer.seen["error"]["message"]
    assert sum(engine.requests for engine in engines) == before
    metrics = await picker.settled()
    assert metrics("learned_total") == 0
    assert metrics("decisions_total", reason="no_endpoints") >= 3


@pytest.mark.parametrize("template", Template)
async def test_saturated_engines_are_left_alone_until_they_recover(
    start_picker, start_envoy_here, start_engines, template
):
    engines = await start_engines(2)
    for engine in engines:
        engine.waiting = 10
    picker = await start_picker(over(engines, scheduler=KTHENA, exchange={"retryAfterSeconds": 7}, scrape=OFTEN))
    envoy = await start_envoy_here(in_front_of(template, picker, engines))

    async def status():
        return (await send(envoy.port, chat("hello"))).status

    async def refused():
        return await status() == 429

    async def served():
        return await status() == 200

    await until(refused)
    before = sum(engine.requests for engine in engines)
    answers = await asyncio.gather(*(send(envoy.port, chat(f"{number}")) for number in range(10)))
    for answer in answers:
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        assert answer.seen["error"]["type"] == "filtered_out"
    assert sum(engine.requests for engine in engines) == before
    engines[1].waiting = 9
    await until(served)
    assert [await status() for _ in range(5)] == [200] * 5
    assert engines[0].requests == 0
    await picker.settled()


async def test_envoy_refuses_a_body_above_its_limit_and_nothing_is_learnt(start_picker, start_envoy_here, engines):
    picker = await start_picker(over(engines))
    envoy = await start_envoy_here(in_front_of(Template.BUFFERED, picker, engines, buffer_limit=64 * 1024))
    for number in range(5):
        answer = await send(envoy.port, pieces(chat_of(MEBIBYTE, number)))
        assert answer.status == 413
    metrics = await picker.settled()
    assert metrics("decisions_total") == 0
    assert metrics("learned_total") == 0
    assert metrics("anomalies_total") == 0
    assert (await send(envoy.port, chat_of(32 * 1024))).status == 200


async def test_a_body_longer_than_the_picker_keeps_is_routed_by_its_beginning(start_picker, start_envoy_here, engines):
    limits = {"maxBodyBytes": 100_000}
    picker = await start_picker(over(engines, exchange=limits))
    envoy = await start_envoy_here(in_front_of(Template.FULL_DUPLEX, picker, engines))
    for size in (99_000, 300_000, 3_000_000):
        body = chat_of(size, size)
        answer = await send(envoy.port, pieces(body), headers=[("x-tag", f"long-{size}")])
        assert answer.status == 200
        seen = next(found for engine in engines if (found := engine.seen.pop(f"long-{size}", None)))
        assert (seen.length, seen.complete) == (size, True)
    assert [found["prompt_unused"] for found in await picker.decisions(3)] == ["body_truncated", "body_truncated", ""]
    assert (await picker.settled())("anomalies_total", kind="body_too_large") == 2
    assert picker.events("a request body is larger than the picker keeps")


async def test_bodies_beyond_what_all_may_keep_are_routed_by_load(start_picker, start_envoy_here, engines):
    picker = await start_picker(over(engines, exchange={"maxBufferedBytes": 500_000}))
    envoy = await start_envoy_here(in_front_of(Template.FULL_DUPLEX, picker, engines))
    body = chat_of(300_000)
    answers = await asyncio.gather(*(send(envoy.port, pieces(body), every=0.02) for _ in range(6)))
    assert {answer.status for answer in answers} == {200}
    metrics = await picker.settled()
    assert metrics("prompt_unused_total", reason="body_truncated") > 0
    assert (await send(envoy.port, body)).status == 200
    assert (await picker.decisions(1))[0]["prompt_unused"] == ""


async def test_a_message_above_the_limit_of_the_port_costs_no_request(start_picker, start_envoy_here, engines):
    picker = await start_picker(over(engines, listen={"maxMessageBytes": 100_000}))
    envoy = await start_envoy_here(in_front_of(Template.BUFFERED, picker, engines))
    for size in (50_000, 200_000, 50_000):
        answer = await send(envoy.port, chat_of(size, size), headers=[("x-tag", "large")])
        assert answer.status == 200
        seen = next(found for engine in engines if (found := engine.seen.pop("large", None)))
        assert seen.length == size
    metrics = await picker.settled()
    assert metrics("decisions_total", reason="routed") == 2
    assert metrics("transport_rejected_total") == 1


async def test_uploads_that_never_end_do_not_grow(start_picker, start_envoy_here, engines):
    limit = 2_000_000
    picker = await start_picker(over(engines, exchange={"maxBufferedBytes": limit}))
    envoy = await start_envoy_here(in_front_of(Template.FULL_DUPLEX, picker, engines))
    clients = [await RawClient.connect(envoy.port) for _ in range(100)]
    for number, client in enumerate(clients):
        await client.head("POST", "/v1/chat/completions", [("transfer-encoding", "chunked")])
        await client.chunk(chat_of(60_000, number))

    async def all_open():
        metrics = await picker.metrics()
        return metrics("open_streams") == len(clients) and metrics

    metrics = await until(all_open)
    assert metrics("buffered_body_bytes") <= limit
    for client in clients:
        client.abort()
    await picker.settled()
