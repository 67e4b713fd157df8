"""What it is all for: prompts go where their beginning is, and the engines really had it."""

from __future__ import annotations

import asyncio
import json

import pytest
import pytest_asyncio

from picker.app.envoy import Template, bootstrap
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.support.bodies import chat
from tests.support.http_client import send
from tests.support.picker_process import OFTEN, over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


def weighed(load, prefix):
    """A scheduler with these weights."""
    scorers = [{"name": "least-request", "weight": load}, {"name": "prefix-cache", "weight": prefix}]
    return {"plugins": {"Score": {"enabled": scorers}}}


def in_front_of(template, picker, addresses):
    return bootstrap(template, picker=picker.address, endpoints=addresses)


@pytest_asyncio.fixture(loop_scope="session")
async def simulated():
    """Four engines with a real prefix cache, fast ones."""
    cost = StepCost(speed=200)
    running = [await start_engine(EngineSimConfig(name=f"sim-{number}", cost=cost, grace=0)) for number in range(4)]
    yield {engine.stats()["name"]: engine.url.removeprefix("http://") for engine in running}
    for engine in running:
        await engine.close()


@pytest.mark.parametrize("template", Template)
async def test_prompts_that_begin_alike_hit_the_cache_of_their_engine(
    start_picker, start_envoy_here, simulated, template
):
    entries = [{"name": name, "address": address} for name, address in simulated.items()]
    picker = await start_picker({"endpoints": {"static": entries}, "scheduler": weighed(1, 1)})
    envoy = await start_envoy_here(in_front_of(template, picker, list(simulated.values())))
    groups = [f"You are helper number {number}. " * 60 for number in range(8)]
    homes = {}
    for turn in range(4):
        for number, group in enumerate(groups):
            system = {"role": "system", "content": group}
            question = {"role": "user", "content": f"question {turn} of {number}"}
            body = json.dumps({"model": "sim", "messages": [system, question], "max_tokens": 4}).encode()
            answer = await send(envoy.port, body)
            assert answer.status == 200
            usage = answer.seen["usage"]
            if turn == 0:
                homes[number] = answer.headers["x-engine"]
            else:
                assert answer.headers["x-engine"] == homes[number]
                # All that prompts of a group share was in the cache: only the block with the question was not.
                assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= 16
    assert len(set(homes.values())) > 1
    metrics = await picker.settled()
    assert metrics("learned_total", success="true") == 32
    assert metrics("served_elsewhere_total") == 0


@pytest.mark.parametrize("template", Template)
async def test_a_burst_of_one_new_prompt_sticks_together_where_prefixes_outweigh_load(
    start_picker, start_envoy_here, engines, template
):
    picker = await start_picker(over(engines, scheduler=weighed(1, 5)))
    envoy = await start_envoy_here(in_front_of(template, picker, [engine.address for engine in engines]))
    answers = await burst(envoy.port)
    assert len({answer.headers["x-engine"] for answer in answers}) == 1
    decisions = await in_order(picker, 64)
    matched = [best_of(decision)["matched"] for decision in decisions]
    assert matched[0] == 0
    assert set(matched[1:]) == {best_of(decisions[0])["total"]}


@pytest.mark.parametrize("template", Template)
async def test_a_burst_of_one_new_prompt_spreads_as_the_scores_say(start_picker, start_envoy_here, engines, template):
    picker = await start_picker(over(engines, scheduler=weighed(1, 1)))
    envoy = await start_envoy_here(in_front_of(template, picker, [engine.address for engine in engines]))
    answers = await burst(envoy.port)
    counts = dict.fromkeys((engine.address for engine in engines), 0)
    for answer in answers:
        counts[answer.headers["x-engine"]] += 1
    assert max(counts.values()) - min(counts.values()) <= 2
    decisions = await in_order(picker, 64)
    in_flight, begun = dict.fromkeys(counts, 0), set()
    for decision in decisions:
        seen = {endpoint["address"]: endpoint for endpoint in decision["endpoints"]}
        # Nothing has ended yet, so that what is in flight is what was picked before.
        assert {address: endpoint["in_flight"] for address, endpoint in seen.items()} == in_flight
        best = decision["endpoints"][0]
        assert best["total"] == max(endpoint["total"] for endpoint in seen.values())
        for endpoint in seen.values():
            load, prefix = (plugin["score"] for plugin in endpoint["plugins"])
            assert endpoint["total"] == load + prefix
            # Who was picked once is known to have the prompt at once; nobody else is.
            assert prefix == (100 if endpoint["address"] in begun else 0)
        begun.add(best["address"])
        in_flight[best["address"]] += 1


async def burst(port):
    """64 requests at once with one prompt that is new; none ends before all have begun."""
    prompt, path = chat("a beginning that nobody has seen " * 30), "/v1/chat/completions?bytes=10&every=1"
    return await asyncio.gather(*(send(port, prompt, path=path) for _ in range(64)))


async def in_order(picker, count):
    found = await picker.decisions(count)
    assert len(found) == count
    return [await picker.decision(decision["number"]) for decision in reversed(found)]


def best_of(decision):
    return next(plugin for plugin in decision["endpoints"][0]["plugins"] if plugin["plugin"] == "prefix-cache")


@pytest.mark.parametrize("sign", ["a later start", "counters that fell"])
async def test_an_engine_that_restarts_is_taken_for_empty(start_picker, start_envoy_here, start_engines, sign):
    engines = await start_engines(3)
    picker = await start_picker(over(engines, scheduler=weighed(1, 5), scrape=OFTEN))
    addresses = [engine.address for engine in engines]
    envoy = await start_envoy_here(in_front_of(Template.BUFFERED, picker, addresses))
    prompts = [chat(f"prompt {number} " * 60) for number in range(9)]
    homes = [(await send(envoy.port, prompt)).headers["x-engine"] for prompt in prompts]
    await picker.settled()
    restarted = next(engine for engine in engines if engine.address == homes[0])
    if sign == "a later start":
        restarted.started += 60
    else:
        restarted.first_tokens = 1

    async def logged():
        return picker.events("An engine has restarted")

    (line,) = await until(logged)
    assert line["endpoint"] == homes[0]
    for prompt, home in zip(prompts, homes, strict=True):
        matched, total = (await picker.matched(prompt))[home]
        assert matched == (0 if home == homes[0] else total)
