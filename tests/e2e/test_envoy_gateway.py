"""The picker behind what Envoy Gateway makes of the manifests: prompts find their cache, and nothing needs the picker."""

from __future__ import annotations

import json
import signal

import pytest

from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.manifests.builds import build
from tests.manifests.envoy_gateway import bootstrap
from tests.support.bodies import chat
from tests.support.http_client import send
from tests.support.picker_process import over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_prompts_find_their_cache_and_outlive_the_picker(start_picker, start_envoy_here):
    running = [
        await start_engine(EngineSimConfig(name=f"sim-{n}", cost=StepCost(speed=200), grace=0)) for n in range(3)
    ]
    try:
        addresses = {engine.stats()["name"]: engine.url.removeprefix("http://") for engine in running}
        entries = [{"name": name, "address": address} for name, address in addresses.items()]
        picker = await start_picker({"endpoints": {"static": entries}})
        config = bootstrap(build("envoy-gateway"), picker=picker.address, endpoints=list(addresses.values()))
        envoy = await start_envoy_here(config)

        async def ask(group: int, turn: int):
            system = {"role": "system", "content": f"You are helper number {group}. " * 60}
            question = {"role": "user", "content": f"question {turn}"}
            body = {"model": "sim", "messages": [system, question], "max_tokens": 4}
            return await send(envoy.port, json.dumps(body).encode())

        homes = [(await ask(group, 0)).headers["x-engine"] for group in range(12)]
        assert len(set(homes)) > 1
        for turn in (1, 2):
            for group, home in enumerate(homes):
                answer = await ask(group, turn)
                assert answer.headers["x-engine"] == home
                usage = answer.seen["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2

        async def all_learnt() -> bool:
            return (await picker.metrics())("learned_total", success="true") == 36

        await until(all_learnt)
        assert (await picker.metrics()).series("learned_total", "on").keys() == {"stream_end"}
        assert (await picker.metrics())("served_elsewhere_total") == 0
        await picker.stop(signal.SIGKILL)
        assert {(await ask(group, 3)).status for group in range(6)} == {200}
    finally:
        for engine in running:
            await engine.close()


async def test_the_picker_refuses_for_the_gateway(start_picker, start_envoy_here, engines):
    """503 of the picker is an answer, not a failure that is passed over."""
    picker = await start_picker(over([]))
    addresses = [engine.address for engine in engines]
    envoy = await start_envoy_here(bootstrap(build("envoy-gateway"), picker=picker.address, endpoints=addresses))
    answer = await send(envoy.port, chat("anything"))
    assert answer.status == 503
    assert (await picker.metrics()).series("decisions_total", "reason") == {"no_endpoints": 1}
