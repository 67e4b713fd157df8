"""A saturated pool behind a real Envoy: who is turned away, who waits, and that nobody waits in vain."""

from __future__ import annotations

import asyncio

import pytest

from picker.app.envoy import Template, bootstrap
from tests.support.bodies import chat
from tests.support.http_client import RawClient, send
from tests.support.picker_process import OFTEN, over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

OBJECTIVE = "x-gateway-inference-objective"
ADMISSION = {"objectives": {"batch": -1, "urgent": 10}, "queue": {"enabled": True, "maxSeconds": 4}}


async def saturated(start_picker, start_envoy_here, start_engines, template, **queue):
    engines = await start_engines(2)
    for engine in engines:
        engine.waiting = 50
    admission = {**ADMISSION, "queue": {**ADMISSION["queue"], **queue}}
    picker = await start_picker(over(engines, admission=admission, scrape=OFTEN))
    envoy = await start_envoy_here(
        bootstrap(template, picker=picker.address, endpoints=[engine.address for engine in engines])
    )

    async def full():
        return (await picker.metrics())("admission_saturation") >= 1

    await until(full)
    return engines, picker, envoy


@pytest.mark.parametrize("template", Template)
async def test_the_sheddable_are_turned_away_and_others_wait_for_room(
    start_picker, start_envoy_here, start_engines, template
):
    engines, picker, envoy = await saturated(start_picker, start_envoy_here, start_engines, template)
    shed = await send(envoy.port, chat("batch"), headers=[(OBJECTIVE, "batch")])
    assert shed.status == 429
    assert shed.headers["retry-after"] == "1"
    assert shed.seen["error"]["type"] == "saturated"
    waiting = [asyncio.create_task(send(envoy.port, chat(f"waits {n}"))) for n in range(5)]
    # Longer than Envoy's own patience of one second in the modes in which it has any.
    await asyncio.sleep(1.5)
    assert not any(one.done() for one in waiting)
    assert (await picker.metrics())("admission_waiting") == 5
    assert sum(engine.requests for engine in engines) == 0
    for engine in engines:
        engine.waiting = 0
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
    metrics = await picker.settled()
    assert metrics("admission_total", outcome="admitted") == 5
    assert metrics("admission_total", outcome="shed") == 1
    assert metrics("admission_waiting") == metrics("in_flight_requests") == 0


@pytest.mark.parametrize("template", Template)
async def test_who_waits_in_vain_is_told_and_who_leaves_gives_its_place_back(
    start_picker, start_envoy_here, start_engines, template
):
    engines, picker, envoy = await saturated(start_picker, start_envoy_here, start_engines, template, maxSeconds=1.5)
    client = await RawClient.connect(envoy.port)
    body = chat("gone")
    await client.head("POST", "/v1/chat/completions", [("content-length", str(len(body)))])
    await client.send(body)

    async def one_waits():
        return (await picker.metrics())("admission_waiting") == 1

    await until(one_waits)
    client.abort()

    async def none_waits():
        return (await picker.metrics())("admission_waiting") == 0

    await until(none_waits, 1.2)
    late = await send(envoy.port, chat("late"))
    assert late.status == 429
    metrics = await picker.settled()
    assert metrics("admission_total", outcome="cancelled") == 1
    assert metrics("admission_total", outcome="expired") == 1
    assert sum(engine.requests for engine in engines) == 0


@pytest.mark.parametrize("template", Template)
async def test_a_picker_that_drains_sends_on_who_waits(start_picker, start_envoy_here, start_engines, template):
    engines, picker, envoy = await saturated(start_picker, start_envoy_here, start_engines, template, maxSeconds=30)
    waiting = [asyncio.create_task(send(envoy.port, chat(f"waits {n}"))) for n in range(5)]

    async def all_wait():
        return (await picker.metrics())("admission_waiting") == 5

    await until(all_wait)
    assert await picker.stop() == 0
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * 5
    assert sum(engine.requests for engine in engines) == 5
