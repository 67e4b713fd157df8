"""Two simulated engines with KV events, what tells of them, a picker with `kvcache-aware`, and an Envoy before all."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from picker.app.envoy import Template, bootstrap
from picker.sim.config import EngineSimConfig
from picker.sim.launch import RunningEngine, start_engine
from picker.sim.limits import EngineLimits, StepCost
from picker.sim.publisher import KvEventSettings
from tests.support.http_client import send
from tests.support.picker_process import OFTEN, PickerProcess, until
from tests.support.sidecar_process import SidecarProcess

BLOCK = 16
MODES = ("direct", "memory", "redis")
SCORES = {"Score": {"enabled": [{"name": "least-request", "weight": 1}, {"name": "kvcache-aware", "weight": 3}]}}


def prompt(seed: int, tokens: int, tail: str = "") -> str:
    """Text of so many tokens of the simulated engine, four bytes each, and no block of it like another."""
    return random.Random(seed).randbytes(2 * tokens).hex() + tail


def body(text: str, model: str = "sim", **more: object) -> bytes:
    return json.dumps({"model": model, "prompt": text, "max_tokens": 1, **more}).encode()


@dataclass
class Fleet:
    """Two engines with what tells of them, a picker, and an Envoy before all."""

    engines: list[RunningEngine]
    picker: PickerProcess
    port: int
    predict: str
    session: aiohttp.ClientSession
    sidecars: list[SidecarProcess] = field(default_factory=list)
    redis: Any = None

    def named(self, name: str) -> RunningEngine:
        return next(engine for engine in self.engines if engine.stats()["name"] == name)

    async def send(self, request: bytes) -> tuple[str, int]:
        """Send a request through Envoy; returns the engine that served it, and what it reports as cached."""
        answer = await send(self.port, request, path="/v1/completions")
        assert answer.status == 200, answer.body
        return answer.headers["x-engine"], answer.seen["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def ask(self, engine: RunningEngine, request: bytes) -> int:
        """Send a request past everything."""
        async with self.session.post(f"{engine.url}/v1/completions", data=request) as answer:
            assert answer.status == 200
            return (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def predicted(self, request: bytes) -> dict[str, int]:
        """The predicted cached tokens by engine, empty while there is no answer."""
        async with self.session.post(f"{self.predict}/v1/cache/predict", data=request) as answer:
            if answer.status != 200:
                return {}
            return {pod["pod_id"]: pod["cached_tokens"] for pod in (await answer.json())["pod_affinities"]}

    async def until_predicted(self, request: bytes, name: str, tokens: int, seconds: float = 12) -> None:
        async def is_it() -> bool:
            return (await self.predicted(request)).get(name) == tokens

        await until(is_it, seconds)


def simulated(number: int, blocks: int) -> EngineSimConfig:
    """An engine with an adapter, and a cache of so many blocks."""
    return EngineSimConfig(
        name=f"sim-{number}",
        loras=("adapter",),
        limits=EngineLimits(block_size=BLOCK, num_gpu_blocks=blocks),
        cost=StepCost(speed=500),
        grace=0,
        kv_events=KvEventSettings(),
    )


def entry(engine: RunningEngine, *, events: bool) -> dict[str, Any]:
    """The picker's configuration of an engine."""
    found: dict[str, Any] = {"name": engine.stats()["name"], "address": engine.url.removeprefix("http://")}
    if events:
        (publisher,) = engine.publishers
        found["kvEvents"] = {"endpoint": publisher.endpoint, "replayEndpoint": publisher.replay_endpoint}
    return found


def picker_config(
    mode: str, entries: list[dict[str, Any]], plugins: dict[str, Any] = SCORES, **args: Any
) -> dict[str, Any]:
    """A picker's configuration with arguments for the plugin; without `plugins` they are those of `token-cost`."""
    plugin = {"name": "kvcache-aware", "args": {"indexMode": mode, **args}}
    return {
        "predict": {"listen": "127.0.0.1:0", "requestsPerSecond": 1000},
        "endpoints": {"static": entries},
        "exchange": {"learnUsage": "from-body"},
        "scrape": OFTEN,
        "scheduler": {"pluginConfig": [plugin], **({"plugins": plugins} if plugins else {})},
    }


@asynccontextmanager
async def fleets(
    start_picker: Any, start_envoy: Any, make_redis: Any
) -> AsyncIterator[Callable[..., Awaitable[Fleet]]]:
    """Starts a fleet; all of it ends with the context."""
    async with AsyncExitStack() as stack:

        async def start(mode: str, blocks: int = 200, template: Template = Template.FULL_DUPLEX, **args: Any) -> Fleet:
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)))
            engines = [await start_engine(simulated(number, blocks)) for number in range(2)]
            for engine in engines:
                stack.push_async_callback(engine.close)
            entries = [entry(engine, events=mode == "direct") for engine in engines]
            sidecars: list[SidecarProcess] = []
            redis = None
            if mode != "direct":
                environment = {"KV_EVENT_SYNC_MODE": mode, "KV_EVENT_HASH_PROTOCOL": args.get("hashProtocol", "")}
                if mode == "redis":
                    redis = make_redis()
                    args["redis"] = {"address": f"127.0.0.1:{redis.port}"}
                    environment |= {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis.port)}
                sidecars = [SidecarProcess(one, f"{one.stats()['name']}.default", **environment) for one in engines]
                for sidecar, known in zip(sidecars, entries, strict=True):
                    stack.push_async_callback(sidecar.close)
                    known["runtime"] = sidecar.address
                await asyncio.gather(*(sidecar.start() for sidecar in sidecars))
            picker = await start_picker(picker_config(mode, entries, **args))
            addresses = [known["address"] for known in entries]
            envoy = await start_envoy(bootstrap(template, picker=picker.address, endpoints=addresses))
            (up,) = picker.events("The picker is up")
            predict = f"http://127.0.0.1:{up['predict']}"
            fleet = Fleet(engines, picker, envoy.port, predict, session, sidecars, redis)

            async def ready() -> bool:
                return (await picker.metrics())("kv_sources_connected") == 2

            await until(ready)
            return fleet

        yield start
