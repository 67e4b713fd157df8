"""Engines die, fail, hang and come back: what becomes of requests, and what is learnt from them."""

from __future__ import annotations

import asyncio

import pytest

from picker.app.envoy import Template, bootstrap
from tests.support.bodies import chat
from tests.support.http_client import RawClient, send
from tests.support.load import load
from tests.support.picker_process import KTHENA, over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ONLY_LOAD = {"name": "least-request", "weight": 1}


def in_front_of(template, picker, engines, **changes):
    return bootstrap(template, picker=picker.address, endpoints=[engine.address for engine in engines], **changes)


def long_prompt(number):
    return chat(f"prompt {number} " * 100)


async def test_requests_of_a_dead_engine_go_to_the_fallbacks_and_teach_about_them(
    start_picker, start_envoy_here, start_engines
):
    engines = await start_engines(3)
    picker = await start_picker(over(engines, scheduler=KTHENA))
    envoy = await start_envoy_here(in_front_of(Template.BUFFERED, picker, engines))
    async with load(envoy.port) as traffic:
        await traffic.more(60)
        await engines[0].kill()
        begun = set(traffic.begun)
        await traffic.more(100)
    assert traffic.errors.keys() <= begun

    before = await picker.settled()
    answers = await asyncio.gather(*(send(envoy.port, long_prompt(number)) for number in range(30)))
    assert {answer.status for answer in answers} == {200}
    assert engines[0].address not in {answer.headers["x-engine"] for answer in answers}
    after = await picker.settled()
    elsewhere = after("served_elsewhere_total", by="fallback") - before("served_elsewhere_total", by="fallback")
    assert elsewhere > 0
    assert after("served_elsewhere_total", by="other") == 0
    for number, answer in enumerate(answers):
        matched = await picker.matched(long_prompt(number))
        assert matched[engines[0].address][0] < matched[engines[0].address][1]
        assert matched[answer.headers["x-engine"]][0] == matched[answer.headers["x-engine"]][1] > 10

    await engines[0].start()

    async def serves_again():
        answers = await asyncio.gather(*(send(envoy.port, long_prompt(number)) for number in range(40, 60)))
        return engines[0].address in {answer.headers["x-engine"] for answer in answers}

    await until(serves_again)


@pytest.mark.parametrize("template", Template)
async def test_an_engine_that_fails_teaches_nothing(start_picker, start_envoy_here, start_engines, template):
    engines = await start_engines(2)
    picker = await start_picker(over(engines, scheduler=KTHENA))
    envoy = await start_envoy_here(in_front_of(template, picker, engines))
    for status in (400, 404, 500, 503):
        for engine in engines:
            engine.status = status
        for number in range(3):
            answer = await send(envoy.port, long_prompt(number))
            assert (answer.status, answer.body) == (status, b"this engine fails")
    metrics = await picker.settled()
    assert metrics("learned_total", success="false") == 12
    assert metrics("learned_total", success="true") == 0
    assert metrics("requests_finished_total", status="4xx") == metrics("requests_finished_total", status="5xx") == 6
    assert metrics("prefix_cache_entries") == 0
    assert {matched for matched, _ in (await picker.matched(long_prompt(0))).values()} == {0}

    for engine in engines:
        engine.status = 200
    served = (await send(envoy.port, long_prompt(0))).headers["x-engine"]
    await picker.settled()
    matched = await picker.matched(long_prompt(0))
    assert matched[served][0] == matched[served][1]
    assert sum(blocks for blocks, _ in matched.values()) == matched[served][1]


@pytest.mark.parametrize("template", Template)
async def test_a_hanging_engine_gets_no_more_requests_and_those_that_give_up_are_counted_out(
    start_picker, start_envoy_here, start_engines, template
):
    engines = await start_engines(3)
    picker = await start_picker(over(engines, scheduler={"plugins": {"Score": {"enabled": [ONLY_LOAD]}}}))
    envoy = await start_envoy_here(in_front_of(template, picker, engines))
    engines[0].hangs = True
    hung = []

    async def all_see_it():
        client = await RawClient.connect(envoy.port)
        body = chat(f"number {len(hung)}")
        await client.head("POST", "/v1/chat/completions", [("content-length", str(len(body)))])
        await client.send(body)
        hung.append(client)
        return engines[0].requests

    await until(all_see_it)
    address = engines[0].address

    async def holds_one():
        return (await picker.metrics())("endpoint_in_flight_requests", address=address) == 1

    await until(holds_one)
    for number in range(10):
        answer = await asyncio.wait_for(send(envoy.port, chat(f"after {number}")), 5)
        assert answer.status == 200
    assert engines[0].requests == 1
    for client in hung:
        client.abort()
    metrics = await picker.settled()
    assert metrics("requests_finished_total", status="none") == 1
    assert metrics("learned_total", success="false") == 1


async def test_an_engine_that_cuts_its_answers_short_leaves_nothing_behind(start_picker, start_envoy_here, wire):
    async def cut(reader, writer):
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nonly this")
        await asyncio.sleep(0.1)

    address = f"127.0.0.1:{await wire(cut)}"
    picker = await start_picker({"endpoints": {"static": [{"address": address}]}, "scrape": {"enabled": False}})
    for template in Template:
        envoy = await start_envoy_here(bootstrap(template, picker=picker.address, endpoints=[address]))
        sent = [send(envoy.port, b"{}") for _ in range(5)]
        for result in await asyncio.gather(*sent, return_exceptions=True):
            assert isinstance(result, EOFError | ConnectionError)
    metrics = await picker.settled()
    assert metrics("learned_total") == 5 * len(Template)
    assert metrics("anomalies_total") == 0


async def test_metrics_that_fail_do_not_fail_requests(start_picker, start_envoy_here, wire):
    async def no_metrics(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"GET /metrics"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n\xff\x00rubbish")
            else:
                await reader.readuntil(b"}")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    address = f"127.0.0.1:{await wire(no_metrics)}"
    picker = await start_picker({"endpoints": {"static": [{"address": address}]}})
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    assert (await send(envoy.port, b"{}")).body == b"ok"

    async def scraped():
        return (await picker.metrics())("scrapes_total") > 2

    await until(scraped)
    assert (await send(envoy.port, b"{}")).body == b"ok"
