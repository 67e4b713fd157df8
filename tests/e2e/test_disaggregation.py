"""Prefill and decode on engines of their own: simulated engines in both roles behind a real Envoy."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
import pytest_asyncio

from picker.app.envoy import Template, bootstrap
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.support.bodies import chat
from tests.support.http_client import send
from tests.support.picker_process import over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROLES = ("prefill", "prefill", "decode", "decode")


def body(seed, tokens, tail=""):
    text = random.Random(seed).randbytes(2 * tokens).hex() + tail
    return json.dumps({"model": "sim", "prompt": text, "max_tokens": 4}).encode()


@pytest_asyncio.fixture(loop_scope="session", params=Template)
async def fleet(request, start_picker, start_envoy_here):
    engines = [
        await start_engine(EngineSimConfig(name=f"{role}-{n}", cost=StepCost(speed=20))) for n, role in enumerate(ROLES)
    ]
    entries = [
        {"name": f"{role}-{n}", "address": f"127.0.0.1:{engine.port}", "labels": {"llm-d.ai/role": role}}
        for n, (role, engine) in enumerate(zip(ROLES, engines, strict=True))
    ]
    picker = await start_picker({"endpoints": {"static": entries}})
    places = [entry["address"] for entry in entries if entry["name"].startswith("decode")]
    envoy = await start_envoy_here(bootstrap(request.param, picker=picker.address, endpoints=places))
    yield engines, picker, envoy
    for engine in engines:
        await engine.close()


def total(engines, name):
    return [engine.stats()[name] for engine in engines]


async def test_prompts_are_computed_apart_and_cached_in_both_places(fleet):
    engines, picker, envoy = fleet
    answer = await send(envoy.port, body(1, 2000), path="/v1/completions")
    assert answer.status == 200
    assert answer.headers["x-engine"].startswith("decode")
    computed = [a - b for a, b in zip(total(engines, "prompt_tokens"), total(engines, "cached_tokens"), strict=True)]
    assert sorted(computed[:2]) == [0, 2000]
    assert sorted(total(engines, "transferred_tokens")[2:]) == [0, 1999]
    # A client cannot name the engine that computes its prompt.
    wrong = [("x-prefiller-host-port", f"127.0.0.1:{engines[3].port}")]
    other = await send(envoy.port, body(2, 2000), path="/v1/completions", headers=wrong)
    assert other.status == 200
    assert sum(total(engines, "requests")[:2]) == 2
    # Now little of it is new: the decode engine that holds the rest computes that itself.
    again = await send(envoy.port, body(1, 2000, "and a little more"), path="/v1/completions", headers=wrong)
    assert again.headers["x-engine"] == answer.headers["x-engine"]
    assert again.seen["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1984
    assert sum(total(engines, "requests")[:2]) == 2
    metrics = await picker.settled()
    assert metrics("in_flight_requests") == 0
    assert metrics("prefill_place_total", place="apart") == 2
    assert metrics("prefill_place_total", place="few_tokens") == 1


async def test_load_is_spread_over_both_pools(fleet):
    engines, picker, envoy = fleet
    answers = await asyncio.gather(*(send(envoy.port, body(n, 1500), path="/v1/completions") for n in range(10, 34)))
    assert {answer.status for answer in answers} == {200}
    requests = total(engines, "requests")
    assert sum(requests[:2]) == sum(requests[2:]) == 24
    assert min(requests) >= 8
    assert sum(total(engines, "refused")[n].get("500", 0) for n in range(4)) == 0

    async def at_rest():
        return (await picker.metrics())("in_flight_requests") == 0

    await until(at_rest)


async def test_without_a_prefill_engine_decode_does_it_all(fleet):
    engines, picker, envoy = fleet
    config = {**picker.config, "endpoints": {"static": picker.config["endpoints"]["static"][2:]}}
    picker.write(config)

    async def gone():
        return (await picker.metrics())("endpoints") == 2

    await until(gone)
    answer = await send(envoy.port, body(50, 2000), path="/v1/completions")
    assert answer.status == 200
    assert sum(total(engines, "requests")[:2]) == 0
    assert sum(total(engines, "transferred_tokens")) == 0


@pytest.mark.parametrize("template", Template)
async def test_clients_do_not_name_the_prefill_endpoint_in_a_header_of_another_name(
    start_picker, start_envoy_here, start_engines, template
):
    engines = await start_engines(2)
    config = over(engines, scheduler={"disaggregation": {"header": "X-Prefill-At"}})
    for entry, role in zip(config["endpoints"]["static"], ("prefill", "decode"), strict=True):
        entry["labels"] = {"llm-d.ai/role": role}
    picker = await start_picker(config)
    envoy = await start_envoy_here(bootstrap(template, picker=picker.address, endpoints=[engines[1].address]))
    for tag, prompt, told in (("short", "hello", []), ("long", "hello " * 4000, [engines[0].address])):
        headers = [("x-tag", tag), ("X-Prefill-At", "6.6.6.6:1"), ("x-prefiller-host-port", "6.6.6.6:1")]
        assert (await send(envoy.port, chat(prompt), headers=headers)).status == 200
        assert engines[1].seen[tag].all("x-prefill-at") == told
        assert engines[1].seen[tag].all("x-prefiller-host-port") == []
