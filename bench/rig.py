"""The parts that benchmarks run against: processes on loopback, and how much CPU each has used."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from picker.app.envoy import EnvoyProcess, Template, bootstrap, start_envoy

ENDPOINTS = 8
_START_SECONDS = 20
_TICK = os.sysconf("SC_CLK_TCK")


class Server(Struct, frozen=True):
    """A process that serves on ports of 127.0.0.1."""

    pid: int
    ports: Sequence[int]


class KvCacheAware(Struct, frozen=True):
    """What `kvcache-aware` needs: a tokenizer, and where each engine's events are."""

    model_directory: Path
    event_ports: Sequence[int]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


@asynccontextmanager
async def engines() -> AsyncIterator[Server]:
    """Engines that answer at once."""
    async with _script("bench.upstream", str(ENDPOINTS)) as server:
        yield server


@asynccontextmanager
async def event_publisher(blocks_per_second: float) -> AsyncIterator[Server]:
    """The KV events of all engines, so many blocks a second stored or dropped."""
    async with _script("bench.kv_events", str(ENDPOINTS), str(blocks_per_second)) as server:
        yield server


@asynccontextmanager
async def constant_server(transport: str, engine: int) -> AsyncIterator[Server]:
    """A server that names one engine whatever is asked, on `http2` or `grpcio`."""
    async with _script("bench.constant_server", transport, f"127.0.0.1:{engine}") as server:
        yield server


@asynccontextmanager
async def picker(
    engine_ports: Sequence[int],
    *,
    scrape_seconds: float,
    kv_cache: KvCacheAware | None = None,
    learn_usage: bool = False,
) -> AsyncIterator[Server]:
    """`picker serve` as users run it, with prefix-cache or kvcache-aware, and least-request of equal weight.

    Its ports are those of ext_proc, HTTP and, with kvcache-aware, predictions.
    """
    static: list[dict[str, Any]] = [{"name": f"pod-{port}", "address": f"127.0.0.1:{port}"} for port in engine_ports]
    scorers = ["least-request", "prefix-cache"]
    plugins: list[dict[str, Any]] = []
    if kv_cache is not None:
        scorers[1] = "kvcache-aware"
        for endpoint, port in zip(static, kv_cache.event_ports, strict=True):
            endpoint["kvEvents"] = {"endpoint": f"tcp://127.0.0.1:{port}"}
        local = {"indexMode": "direct", "tokenizers": ["local"], "modelDirectory": str(kv_cache.model_directory)}
        plugins.append({"name": "kvcache-aware", "args": local})
    score = [{"name": name, "weight": 1} for name in scorers]
    config = {
        "endpoints": {"static": static},
        "scheduler": {
            "pluginConfig": plugins,
            "plugins": {"Filter": {"enabled": ["least-request"]}, "Score": {"enabled": score}},
        },
        "predict": {"listen": "127.0.0.1:0", "requestsPerSecond": 100_000},
        "exchange": {"learnUsage": "from-body" if learn_usage else "off"},
        "scrape": {"intervalSeconds": scrape_seconds},
    }
    async with picker_process(config) as server:
        yield server


@asynccontextmanager
async def picker_process(config: dict[str, Any]) -> AsyncIterator[Server]:
    """`picker serve` with a configuration, on any free ports of loopback."""
    ports = {"extproc": "127.0.0.1:0", "admin": "127.0.0.1:0", "http": "127.0.0.1:0", "leaveSeconds": 0}
    config = {**config, "listen": ports, "log": {"format": "json"}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)  # JSON is YAML, too
        file.flush()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "picker", "serve", "-c", file.name), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
        )
        try:
            assert process.stderr is not None
            async with asyncio.timeout(_START_SECONDS):
                while "extproc" not in (line := json.loads(await process.stderr.readline())):
                    pass
            log = asyncio.create_task(process.stderr.read())
            yield Server(process.pid, [line[name] for name in ("extproc", "http", "predict") if line.get(name)])
        finally:
            await _end(process)
        await log


@asynccontextmanager
async def envoy(template: Template, server: Server | None, engine_ports: Sequence[int]) -> AsyncIterator[EnvoyProcess]:
    """Envoy with one of the shipped configurations and one worker thread; without a server, without ext_proc.

    Health checks are off: what they cost is not part of a request, and constant servers have none.
    """
    address = None if server is None else f"127.0.0.1:{server.ports[0]}"
    config = bootstrap(template, picker=address, endpoints=[f"127.0.0.1:{port}" for port in engine_ports])
    for cluster in config["static_resources"]["clusters"]:
        cluster.pop("health_checks", None)
    async with await start_envoy(config) as process:
        yield process


@asynccontextmanager
async def _script(module: str, *arguments: str) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdin=DEVNULL, stdout=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            ports = json.loads(await process.stdout.readline())
        yield Server(process.pid, ports)
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
