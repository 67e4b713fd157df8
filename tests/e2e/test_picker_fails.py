"""The picker dies, hangs, leaves and comes back: what becomes of requests."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE

import pytest
import yaml

from picker.app.envoy import Template, bootstrap
from tests.support.bodies import chat
from tests.support.engine import answer_bytes
from tests.support.http_client import send
from tests.support.load import load
from tests.support.picker_process import over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

AFFINITY = {
    "plugins": {"Score": {"enabled": [{"name": "least-request", "weight": 1}, {"name": "prefix-cache", "weight": 5}]}}
}


def in_front_of(template, picker, engines, **changes):
    return bootstrap(template, picker=picker.address, endpoints=[engine.address for engine in engines], **changes)


async def decided(picker):
    return (await picker.metrics())("decisions_total")


async def test_a_killed_picker_costs_no_request_and_routes_by_cache_when_it_is_back(
    start_picker, start_envoy_here, engines
):
    picker = await start_picker(over(engines, scheduler=AFFINITY))
    envoy = await start_envoy_here(in_front_of(Template.BUFFERED, picker, engines))
    async with load(envoy.port) as traffic:
        await traffic.more(100)
        assert await decided(picker) > 50
        await picker.stop(signal.SIGKILL)
        await traffic.more(150)
        await picker.start()

        async def asked():
            return await decided(picker) > 50

        await until(asked)
        await traffic.more(50)
    assert traffic.errors == {}
    await picker.settled()
    prompt = chat("the same long beginning " * 50)
    served = [(await send(envoy.port, prompt)).headers["x-engine"] for _ in range(6)]
    assert len(set(served)) == 1
    (held,) = [address for address, (matched, total) in (await picker.matched(prompt)).items() if matched == total]
    assert held == served[0]


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_a_picker_that_leaves_loses_no_request_in_the_recommended_configuration(
    start_picker, start_envoy_here, engines, transport
):
    picker = await start_picker(over(engines, listen={"transport": transport, "drainSeconds": 5}))
    envoy = await start_envoy_here(in_front_of(Template.BUFFERED, picker, engines))
    async with load(envoy.port) as traffic:
        await traffic.more(100)
        started = time.monotonic()
        assert await picker.stop(signal.SIGTERM) == 0
        assert time.monotonic() - started < 5
        await traffic.more(100)
    assert traffic.errors == {}
    assert picker.events("The picker is down")[0]["open_streams"] == 0


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("template", Template)
async def test_a_picker_that_leaves_finishes_what_it_began(
    start_picker, start_envoy_here, engines, template, transport
):
    listen = {"leaveSeconds": 0.3, "drainSeconds": 5, "transport": transport}
    picker = await start_picker(over(engines, listen=listen))
    envoy = await start_envoy_here(in_front_of(template, picker, engines))
    path = "/v1/chat/completions?bytes=4000&chunks=20&every=0.05"

    async def slow_upload():
        return await send(envoy.port, [b"{", b"}"] * 5, every=0.05, path="/v1/chat/completions?bytes=4000&chunks=9")

    slow = [asyncio.create_task(send(envoy.port, chat("long"), path=path)) for _ in range(10)]
    slow += [asyncio.create_task(slow_upload()) for _ in range(5)]

    async def begun():
        return (await picker.metrics())("open_streams") == len(slow)

    await until(begun)
    stopped = asyncio.create_task(picker.stop(signal.SIGTERM))

    async def draining():
        return picker.events("The picker is draining")

    await until(draining)
    late = await send(envoy.port, chat("during the time to leave"))
    answers = await asyncio.gather(*slow)
    assert late.status == 200
    assert [(answer.status, answer.body) for answer in answers] == [(200, answer_bytes(4000))] * len(slow)
    assert await stopped == 0
    assert picker.events("The picker is down")[0]["open_streams"] == 0


async def test_a_hung_picker_costs_a_message_timeout_until_it_is_back(start_picker, start_envoy_here, engines):
    picker = await start_picker(over(engines))
    config = in_front_of(Template.BUFFERED, picker, engines, message_timeout=0.2)
    envoy = await start_envoy_here(config)
    async with load(envoy.port) as traffic:
        await traffic.more(50)
        picker.send_signal(signal.SIGSTOP)
        await traffic.more(60)
        stats = await envoy.stats("http.inference.ext_proc.")
        assert stats["http.inference.ext_proc.message_timeouts"] > 0
        picker.send_signal(signal.SIGCONT)
        before = await decided(picker)

        async def asked():
            return await decided(picker) > before + 20

        await until(asked)
        await traffic.more(20)
    assert traffic.errors == {}
    metrics = await picker.settled()
    assert metrics("anomalies_total") == 0


async def test_a_hung_picker_in_full_duplex_holds_requests_up_and_loses_none(start_picker, start_envoy_here, engines):
    picker = await start_picker(over(engines))
    envoy = await start_envoy_here(in_front_of(Template.FULL_DUPLEX, picker, engines))
    async with load(envoy.port) as traffic:
        await traffic.more(50)
        picker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        picker.send_signal(signal.SIGCONT)
        await traffic.more(50)
    assert traffic.errors == {}
    await picker.settled()


async def test_full_duplex_serves_again_once_the_picker_is_back(start_picker, start_envoy_here, engines):
    picker = await start_picker(over(engines))
    envoy = await start_envoy_here(in_front_of(Template.FULL_DUPLEX, picker, engines))
    async with load(envoy.port) as traffic:
        await traffic.more(30)
        await picker.stop(signal.SIGKILL)
    assert set(traffic.answers) <= {200, 503, 0}
    assert (await send(envoy.port, chat("nobody picks"))).status == 503
    await picker.start()

    async def served():
        return (await send(envoy.port, chat("somebody picks"))).status == 200

    await until(served)
    async with load(envoy.port) as traffic:
        await traffic.more(30)
    assert traffic.errors == {}


async def test_a_picker_that_waits_no_longer_costs_no_request(start_picker, start_envoy_here, engines):
    picker = await start_picker(over(engines, listen={"drainSeconds": 0.3}))
    envoy = await start_envoy_here(in_front_of(Template.BUFFERED, picker, engines))
    paths = ("/v1/chat/completions?bytes=90&every=2", "/v1/chat/completions?bytes=90&chunks=20&every=0.1")
    slow = [asyncio.create_task(send(envoy.port, chat("slow"), path=path)) for path in paths]

    async def begun():
        return (await picker.metrics())("in_flight_requests") == len(slow)

    await until(begun)
    assert await picker.stop(signal.SIGINT) == 0
    assert not any(task.done() for task in slow)
    for answer in await asyncio.gather(*slow):
        assert (answer.status, answer.body) == (200, answer_bytes(90))


async def test_a_picker_that_cannot_start_says_why(pickers, engines, tmp_path):
    running = await pickers(over(engines))
    for document, code, words in (
        (yaml.safe_dump({"listen": {"extproc": running.address}}), 1, "listen"),
        ("scheduler: {plugin: {}}", 2, "plugins"),
        ("- a list", 2, "expected a mapping"),
    ):
        path = tmp_path / "picker.yaml"
        path.write_text(document)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "picker", "serve", "-c", str(path)), stdout=PIPE, stderr=PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), 15)
        assert process.returncode == code
        assert words in errors.decode()
        assert "Traceback" not in errors.decode()
