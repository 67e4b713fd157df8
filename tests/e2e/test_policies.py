"""The default policy on simulated engines behind a real Envoy: a burst, a slow engine, and engines that hang or fail.

What is compared are tokens, shares and counts. `python -m bench --only policies` measures times.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio

from picker.app.envoy import Template, bootstrap
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.support.http_client import RawClient
from tests.support.picker_process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_SECONDS = 4.0
"""After which a client leaves."""


class Fleet:
    """Engines, a picker with nothing but their addresses, and an Envoy that lets the picker see response bodies."""

    def __init__(self, engines, picker, envoy):
        self.engines = engines
        self.picker = picker
        self.port = envoy.port
        self.picks = Counter()
        """By engine number, of requests that were answered."""

    def stats(self, name):
        return [engine.stats()[name] for engine in self.engines]

    @property
    def computed(self):
        return sum(self.stats("prompt_tokens")) - sum(self.stats("cached_tokens"))

    async def fault(self, number, **fault):
        url = f"{self.engines[number].url}/sim/faults"
        async with aiohttp.request("POST", url, json=fault) as answer:
            assert answer.status == 200

    async def ask(self, text, *, stream=True):
        """A streamed completion; returns its status once all of it is there."""
        body = json.dumps({"model": "sim", "prompt": text, "max_tokens": 4, "stream": stream}).encode()
        client = await RawClient.connect(self.port)
        try:
            answer = await client.request(body, path="/v1/completions")
        finally:
            client.abort()
        if answer.status == 200:
            self.picks[int(answer.headers["x-engine"])] += 1
        return answer.status

    async def work(self, count, *, clients, tokens, seed):
        """So many prompts that have nothing in common, from so many clients at a time."""
        prompts = iter([prompt(seed * 10_000 + number, tokens) for number in range(count)])

        async def one():
            statuses = Counter()
            for text in prompts:
                statuses[await self.ask(text)] += 1
            return statuses

        return sum(await asyncio.gather(*(one() for _ in range(clients))), Counter())

    @asynccontextmanager
    async def traffic(self, *, stream=True):
        """New prompts at a steady pace, whatever becomes of them. What it yields lets more come, and returns how many."""
        asked = []

        async def arrive():
            while True:
                request = self.ask(prompt(f"traffic {len(asked)}", 600), stream=stream)
                asked.append(asyncio.create_task(asyncio.wait_for(request, PATIENCE_SECONDS)))
                await asyncio.sleep(0.04)

        async def arrived(seconds):
            before = len(asked)
            await asyncio.sleep(seconds)
            return len(asked) - before

        asked.append(asyncio.create_task(arrive()))
        try:
            yield arrived
        finally:
            for task in asked:
                task.cancel()
            results = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(result) for result in results} <= {int, TimeoutError, asyncio.CancelledError}

    async def is_back(self, number):
        """Wait until an engine has its part of the work again."""
        before = self.stats("finished")[number]

        async def works():
            return self.stats("finished")[number] >= before + 10

        await until(works, 60)  # the last pause between two probes, and work that has piled up elsewhere


def prompt(seed, tokens):
    """Text of so many tokens of the simulated engine, four bytes each."""
    return random.Random(seed).randbytes(2 * tokens).hex()


@pytest_asyncio.fixture(loop_scope="session")
async def fleet_of(start_picker, start_envoy_here):
    started = []

    async def start(count, speed):
        engines = [
            await start_engine(EngineSimConfig(name=str(number), cost=StepCost(speed=speed), grace=0.1))
            for number in range(count)
        ]
        started.extend(engines)
        addresses = [f"127.0.0.1:{engine.port}" for engine in engines]
        picker = await start_picker({"endpoints": {"static": [{"address": address} for address in addresses]}})
        envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address, endpoints=addresses))
        return Fleet(engines, picker, envoy)

    yield start
    for engine in started:
        await engine.close()


async def test_a_burst_with_one_new_prefix_is_spread_as_far_as_it_pays(fleet_of):
    fleet = await fleet_of(8, speed=1)
    prefix, own = prompt(1, 10_000), 75
    burst = asyncio.gather(*(fleet.ask(prefix + prompt(100 + number, own)) for number in range(64)))
    idle_while_queued = 0.0
    looked = time.monotonic()
    while not burst.done():
        await asyncio.sleep(0.01)
        now = time.monotonic()
        if sum(fleet.stats("requests")) == 64:
            waiting = fleet.stats("waiting")
            here = [sum(both) for both in zip(waiting, fleet.stats("running"), strict=True)]
            if min(here) == 0 and max(waiting) >= 2:
                idle_while_queued += now - looked
        looked = now
    assert set(await burst) == {200}
    assert idle_while_queued < 0.1
    used = sum(requests > 0 for requests in fleet.stats("requests"))
    assert used >= 6
    assert fleet.computed <= 1.5 * (used * 10_000 + 64 * own)
    assert max(fleet.stats("requests")) <= 2 * 64 / used


async def test_a_prefix_that_is_asked_for_again_is_computed_once(fleet_of):
    """Shared prefixes one after the other, and conversations: what was sent once is found again."""
    fleet = await fleet_of(4, speed=20)
    prefixes = [prompt(seed, 2_000) for seed in range(8)]
    for turn in range(5):
        await asyncio.gather(*(fleet.ask(text + prompt(100 * turn + 50, 50)) for text in prefixes))
    assert fleet.computed <= 1.25 * 8 * (2_000 + 5 * 50)
    talks = [prompt(1_000 + number, 500) for number in range(8)]
    before = fleet.computed
    for turn in range(6):
        talks = [text + prompt(2_000 + 10 * turn + number, 200) for number, text in enumerate(talks)]
        await asyncio.gather(*map(fleet.ask, talks))
    assert fleet.computed - before <= 1.25 * 8 * (500 + 6 * 200)
    assert min(fleet.stats("requests")) > 0


async def test_an_engine_four_times_slower_gets_far_less_work(fleet_of):
    fleet = await fleet_of(8, speed=2)
    await fleet.fault(0, mode="slow", factor=4)
    assert await fleet.work(48, clients=24, tokens=1_500, seed=1) == {200: 48}
    fleet.picks.clear()
    assert await fleet.work(144, clients=24, tokens=1_500, seed=2) == {200: 144}
    assert fleet.picks[0] < 0.6 * 144 / 8
    rates = (await fleet.picker.metrics()).series("endpoint_prefill_tokens_per_second", "address")
    usual = statistics.median(rates.values())
    assert rates[f"127.0.0.1:{fleet.engines[0].port}"] < 2 / 3 * usual


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_never_answers_gets_probes_only_and_comes_back(fleet_of, stream):
    """A streaming engine sends its headers before it hangs, any other nothing at all."""
    fleet = await fleet_of(4, speed=20)
    # Prompts too short to tell how fast an engine is: one that is taken for slow might get no request to leave unanswered.
    await fleet.work(24, clients=8, tokens=300, seed=1)
    await fleet.fault(0, mode="hang")
    before = fleet.stats("requests")[0]
    async with fleet.traffic(stream=stream) as arrived:
        await arrived(seconds=5.0)
        in_time = fleet.stats("requests")[0]
        assert await arrived(seconds=2.0) > 20
        assert in_time - before < 30
        assert fleet.stats("requests")[0] - in_time <= 4
        metrics = await fleet.picker.metrics()
        assert metrics("suspicions_total", reason="silent") >= 1
        assert metrics("suspect_requests_total", why="probe") >= 1
        await fleet.fault(0, mode="none")
        await fleet.is_back(0)
    await fleet.picker.settled()


async def test_an_engine_that_fails_at_once_gets_probes_only_and_comes_back(fleet_of):
    fleet = await fleet_of(4, speed=20)
    # Too short to tell how fast an engine is, as above.
    await fleet.work(24, clients=8, tokens=300, seed=1)
    await fleet.fault(0, mode="error", status=500)
    async with fleet.traffic() as arrived:
        await arrived(seconds=2.0)
        failed = fleet.stats("faults")[0]["error"]
        assert 1 <= failed < 20
        assert await arrived(seconds=2.0) > 20
        assert fleet.stats("faults")[0]["error"] - failed <= 4
        metrics = await fleet.picker.metrics()
        assert metrics("suspicions_total", reason="failing") >= 1
        assert metrics("suspect_requests_total", why="probe") >= 1
        await fleet.fault(0, mode="none")
        await fleet.is_back(0)
    await fleet.picker.settled()
