"""A real vLLM behind a real Envoy: is what was predicted of each request what the engine then reports?

`make test-engine` runs this. Its name keeps it out of `make test`: it needs the environment that
`scripts/install_engine.py` makes, and some minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from picker.app.envoy import Template, bootstrap, start_envoy
from tests.real_engine.traffic import RESPONSES, Request, Traffic
from tests.support.http_client import Answer, send
from tests.support.picker_process import PickerProcess, until
from tests.support.sidecar_process import SidecarProcess

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ENGINE_ENVIRONMENT", ROOT / ".venv-engine")) / "bin" / "python"
REQUESTS = 200
BLOCKS = 72
"""In the engine's cache, of 32 tokens each; one conversation takes up to 30."""
QUIET_SECONDS = 0.12
HASHES = "llm-d-xxh64"
"""What blocks are called in Redis; they cover cache salts and adapters, as Kthena's do not."""
START_SECONDS = 180
COMPILE_SECONDS = 300
"""vLLM compiles what log probabilities need when they are first asked for, once for each installation."""
JSON = [("content-type", "application/json")]


class Publisher(NamedTuple):
    endpoint: str
    replay_endpoint: str


@dataclass
class Vllm:
    """The engine, as what follows engines needs to know it."""

    port: int
    publishers: tuple[Publisher]
    model_directory: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass
class Forecast:
    """What somebody predicted: `total` tokens, of them so many `cached`."""

    cached: int
    total: int
    complete: bool


@dataclass
class Oracle:
    """Somebody who predicts, and how what it said compares with what came."""

    name: str
    url: str
    certain: bool = True
    """Whether it can say that it knows all that the engine holds."""
    exact: int = 0
    over: int = 0
    under: int = 0

    async def ask(self, session: aiohttp.ClientSession, body: bytes) -> Forecast:
        found: dict[str, Any] = {}

        async def answered() -> bool:
            async with session.post(f"{self.url}/v1/cache/predict", data=body) as answer:
                assert answer.status in {200, 503}, (self.name, await answer.text())
                found.update(await answer.json())
                return answer.status == 200

        await until(answered, 30)  # a busy engine may take longer for /tokenize than it has
        (pod,) = found["pod_affinities"]
        return Forecast(pod["cached_tokens"], found["total_prompt_tokens"], pod["complete"])

    def compare(self, forecast: Forecast, cached: int) -> bool:
        self.exact += forecast.cached == cached
        self.over += forecast.cached > cached
        self.under += forecast.cached < cached
        return forecast.cached == cached

    def __str__(self) -> str:
        asked = self.exact + self.over + self.under
        share = f"{self.exact / asked:.1%} of {asked} predictions exact"
        return f"{self.name}: {share}, {self.over} over-predictions, {self.under} under-predictions"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@asynccontextmanager
async def running_vllm(directory: Path) -> AsyncIterator[Vllm]:
    """Serve until the context ends; what vLLM says is in `directory`."""
    port, events, replay = free_ports(3)
    model, log = directory / "model", directory / "vllm.log"
    command = (PYTHON, ROOT / "scripts" / "serve_engine.py", model, "--blocks", str(BLOCKS), "--port", str(port))
    ports = ("--events-port", str(events), "--replay-port", str(replay))
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, *ports, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    engine = Vllm(port, (Publisher(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"),), model)

    async def healthy() -> bool:
        assert process.returncode is None, log.read_text()[-4000:]
        with suppress(aiohttp.ClientError, OSError):
            async with aiohttp.request("GET", f"{engine.url}/health") as answer:
                return answer.status == 200
        return False

    try:
        await until(healthy, START_SECONDS)
        await ask_for_log_probabilities(engine)
        yield engine
    finally:
        # Its workers are processes of their own.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def ask_for_log_probabilities(engine: Vllm) -> None:
    """Of a prompt shorter than a block, so that the cache stays empty."""
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}
    timeout = aiohttp.ClientTimeout(COMPILE_SECONDS)
    async with aiohttp.request("POST", f"{engine.url}/v1/completions", json=body, timeout=timeout) as answer:
        assert answer.status == 200, await answer.text()


def picker_for(engine: Vllm, endpoint: dict[str, Any], **args: Any) -> PickerProcess:
    entry = {"name": "vllm", "address": f"127.0.0.1:{engine.port}", **endpoint}
    scores = [{"name": "least-request", "weight": 1}, {"name": "kvcache-aware", "weight": 3}]
    return PickerProcess(
        {
            "predict": {"listen": "127.0.0.1:0", "requestsPerSecond": 1000},
            "endpoints": {"static": [entry]},
            # Everything shares a machine with the engine; how fast all this is, is not asked here.
            "exchange": {"learnUsage": "from-body", "decisionSeconds": 5},
            "scheduler": {
                "pluginConfig": [{"name": "kvcache-aware", "args": args}],
                "plugins": {"Score": {"enabled": scores}},
            },
        }
    )


class Stack(NamedTuple):
    """What stands before the engine: two pickers with an Envoy each, and one that only predicts; and two sidecars."""

    pickers: list[PickerProcess]
    envoys: list[int]
    oracles: list[Oracle]
    sidecars: list[SidecarProcess]

    async def settled(self, session: aiohttp.ClientSession) -> None:
        """Wait until no event came for a while, and all that came is in Redis."""
        before, quiet = None, 0.0
        while quiet < QUIET_SECONDS:
            seen = [(await picker.metrics())("kv_events_total") for picker in self.pickers]
            quiet = quiet + 0.02 if seen == before else 0.0
            before = seen
            await asyncio.sleep(0.02)

        async def written() -> bool:
            streaming, writing = [await self._stats(session, sidecar) for sidecar in self.sidecars]
            seen = [stats["ranks"]["0"]["last_seq"] for stats in (streaming, writing)]
            return bool(writing["redis"]["in_step"] and seen[0] == seen[1])

        await until(written, 30)

    async def _stats(self, session: aiohttp.ClientSession, sidecar: SidecarProcess) -> dict[str, Any]:
        async with session.get(f"http://{sidecar.address}/stats") as answer:
            found: dict[str, Any] = await answer.json()
            return found


@asynccontextmanager
async def stack_before(engine: Vllm, redis: Any) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as stack:
        sidecar = SidecarProcess(engine, "vllm.default", model="tiny", KV_EVENT_SYNC_MODE="memory")
        environment = {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis.port), "KV_EVENT_HASH_PROTOCOL": HASHES}
        writer = SidecarProcess(engine, "vllm.default", model="tiny", KV_EVENT_SYNC_MODE="redis", **environment)
        for each in (sidecar, writer):
            stack.push_async_callback(each.close)
            await each.start()
        (publisher,) = engine.publishers
        events = {"endpoint": publisher.endpoint, "replayEndpoint": publisher.replay_endpoint, "topic": "kv-events"}
        local = {"tokenizers": ["local"], "modelDirectory": str(engine.model_directory)}
        pickers = [
            picker_for(engine, {"kvEvents": events}, indexMode="direct", **local),
            picker_for(engine, {"runtime": sidecar.address}, indexMode="memory", tokenizers=["engine"]),
            picker_for(
                engine,
                {},
                indexMode="redis",
                blockSizeToHash=32,
                hashProtocol=HASHES,
                redis={"address": f"127.0.0.1:{redis.port}", "budgetSeconds": 1.0},
                **local,
            ),
        ]
        ports, oracles = [], []
        templates = (Template.FULL_DUPLEX, Template.BUFFERED, None)
        for name, picker, template in zip(("direct", "memory", "redis"), pickers, templates, strict=True):
            stack.push_async_callback(picker.close)
            await picker.start()
            if template is not None:
                config = bootstrap(template, picker=picker.address, endpoints=[f"127.0.0.1:{engine.port}"])
                ports.append((await stack.enter_async_context(await start_envoy(config))).port)
            (up,) = picker.events("The picker is up")
            url = f"http://127.0.0.1:{up['predict']}"
            oracles.append(Oracle(f"picker, {name}", url, certain=template is not None))

            async def connected(picker: PickerProcess = picker) -> bool:
                return (await picker.metrics())("kv_sources_connected") == 1

            await until(connected)
        oracles.append(Oracle("sidecar", f"http://{sidecar.address}"))
        yield Stack(pickers, ports, oracles, [sidecar, writer])
        assert [line for picker in pickers for line in picker.complaints()] == []


def usage_of(request: Request, answer: Answer) -> tuple[int, int]:
    """The prompt's tokens, and those of them that the engine found in its cache."""
    body = answer.body
    if request.body.get("stream"):
        chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
        (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    else:
        usage = json.loads(body)["usage"]
    if request.path == RESPONSES:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_predictions_are_what_a_real_engine_reports(tmp_path: Path, redis_server: Any) -> None:
    traffic = Traffic(seed=1, model="tiny", block=32)
    kinds: Counter[str] = Counter()
    hits, computed, misses = 0, 0, []
    async with (
        running_vllm(tmp_path) as engine,
        stack_before(engine, redis_server) as stack,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
    ):
        for number in range(REQUESTS):
            request = traffic.next()
            body = json.dumps(request.body).encode()
            await stack.settled(session)
            forecasts = [await oracle.ask(session, body) for oracle in stack.oracles]
            answer = await send(stack.envoys[number % 2], body, path=request.path, headers=JSON)
            assert answer.status == 200, (request, answer.body)
            total, cached = usage_of(request, answer)
            kinds[request.kind.partition(":")[0].partition(",")[0]] += 1
            hits += cached > 0
            computed += (total - cached) // 32
            for oracle, forecast in zip(stack.oracles, forecasts, strict=True):
                assert forecast.complete or not oracle.certain
                if not oracle.compare(forecast, cached) or forecast.total != total:
                    misses.append((number, request.kind, oracle.name, forecast, total, cached))
            if request.conversation is not None:
                request.conversation.answer(json.loads(answer.body)["choices"][0]["message"])
        routing = stack.pickers[: len(stack.envoys)]
        decided = [(await picker.settled())("decisions_total", reason="routed") for picker in routing]
        outcomes = [(await picker.metrics()).series("kvcache_preparations_total", "outcome") for picker in routing]
        compared = [(await picker.metrics()).series("predictions_compared_total", "outcome") for picker in routing]
    asked = REQUESTS * len(stack.oracles)
    exact, over = sum(oracle.exact for oracle in stack.oracles), sum(oracle.over for oracle in stack.oracles)
    report = [
        f"\n{REQUESTS} requests, {hits} with cached tokens, {computed} blocks computed for a cache of {BLOCKS}: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        *map(str, misses),
        *map(str, stack.oracles),
        f"{exact / asked:.2%} of all {asked} predictions exact, {over} over-predictions",
    ]
    print("\n".join(report))  # noqa: T201  what this run is for
    assert decided == [REQUESTS / 2] * 2
    assert outcomes == [{"ok": REQUESTS / 2}] * 2
    assert all(set(outcomes) == {"exact"} for outcomes in compared if outcomes), compared
    assert compared[0], "responses that pass in full duplex were not read"
    assert hits > REQUESTS / 4
    assert computed > 5 * BLOCKS
    for oracle in stack.oracles:
        assert oracle.exact >= 0.99 * REQUESTS, oracle
        assert oracle.over == 0, oracle
