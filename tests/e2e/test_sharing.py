"""Two pickers that share their picks through a real Redis, each behind an Envoy of its own."""

from __future__ import annotations

import asyncio
import json
import random
import signal

import pytest
import pytest_asyncio

from picker.app.envoy import Template
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.support.http_client import send
from tests.support.pair import healthy, peers, start_pair
from tests.support.picker_process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


def body(seed, tokens=1500, tail=""):
    text = random.Random(seed).randbytes(2 * tokens).hex() + tail
    return json.dumps({"model": "sim", "prompt": text, "max_tokens": 2}).encode()


@pytest_asyncio.fixture(loop_scope="session")
async def pair(request, redis_server, start_picker, start_envoy_here):
    engines = [await start_engine(EngineSimConfig(name=f"engine-{n}", cost=StepCost(speed=20))) for n in range(3)]
    entries = [{"name": f"e{n}", "address": f"127.0.0.1:{engine.port}"} for n, engine in enumerate(engines)]
    config = {"endpoints": {"static": entries}, "scheduler": getattr(request, "param", {})}
    pair = await start_pair(start_picker, start_envoy_here, redis_server, config, Template.BUFFERED)
    yield engines, pair.pickers, pair.envoys
    for engine in engines:
        await engine.close()


BY_SESSION = {
    "pluginConfig": [
        {"name": "prefix-cache-scorer", "args": {"prefixMatchInfoProducerName": "session-prefix-cache-producer"}}
    ],
    "plugins": {
        "Filter": {"enabled": []},
        "Score": {"enabled": [{"name": "least-request", "weight": 1}, {"name": "prefix-cache-scorer", "weight": 3}]},
    },
}


@pytest.mark.parametrize("pair", [{}, BY_SESSION], ids=["default", "by session"], indirect=True)
async def test_what_one_has_sent_the_other_knows_and_so_does_one_that_was_killed(pair):
    _, pickers, envoys = pair
    for picker in pickers:
        await peers(picker, 1)
    await healthy(pickers, envoys)
    homes = {}
    for number in range(9):
        answer = await send(envoys[number % 2].port, body(number), path="/v1/completions")
        assert answer.status == 200
        homes[number] = answer.headers["x-engine"]
    await asyncio.sleep(0.1)

    async def hits(envoy):
        for number, home in homes.items():
            answer = await send(envoy.port, body(number, tail="more"), path="/v1/completions")
            assert answer.headers["x-engine"] == home
            assert answer.seen["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1480

    # Each finds what the other has sent.
    await hits(envoys[1])
    await hits(envoys[0])
    await pickers[0].stop(signal.SIGKILL)
    await pickers[0].start()
    await peers(pickers[0], 1)
    await healthy(pickers, envoys)
    await hits(envoys[0])
    for picker in pickers:
        metrics = await picker.settled()
        assert metrics("in_flight_requests") == 0
        assert sum(metrics.series("endpoint_in_flight_requests", "address").values()) == 0
        assert metrics("sharing_messages_total", outcome="malformed") == 0


async def test_each_goes_on_alone_while_redis_is_away_and_they_agree_when_it_is_back(pair, redis_server):
    _, pickers, envoys = pair
    for picker in pickers:
        await peers(picker, 1)
    await healthy(pickers, envoys)
    redis_server.kill()
    homes = {}
    for number in range(20, 26):
        answer = await send(envoys[0].port, body(number), path="/v1/completions")
        assert answer.status == 200
        homes[number] = answer.headers["x-engine"]
    await peers(pickers[1], 0)
    redis_server.start()
    for picker in pickers:
        await peers(picker, 1)

    async def caught_up():
        matched = [await pickers[1].matched(body(number), "token-cost", "/v1/completions") for number in homes]
        return all(any(have == of for have, of in found.values()) for found in matched)

    await until(caught_up, 10)
    for number, home in homes.items():
        answer = await send(envoys[1].port, body(number), path="/v1/completions")
        assert answer.headers["x-engine"] == home
