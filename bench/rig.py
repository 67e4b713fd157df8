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

from msgspec import Struct

from picker.app.envoy import EnvoyProcess, Template, bootstrap, start_envoy

ENDPOINTS = 8
_START_SECONDS = 20
_TICK = os.sysconf("SC_CLK_TCK")


class Server(Struct, frozen=True):
    """A process that serves on ports of 127.0.0.1."""

    pid: int
    ports: Sequence[int]


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
async def constant_server(transport: str, engine: int) -> AsyncIterator[Server]:
    """A server that names one engine whatever is asked, on `http2` or `grpcio`."""
    async with _script("bench.constant_server", transport, f"127.0.0.1:{engine}") as server:
        yield server


@asynccontextmanager
async def picker(engine_ports: Sequence[int], *, scrape_seconds: float) -> AsyncIterator[Server]:
    """`picker serve` as users run it, with prefix-cache and least-request of equal weight."""
    static = [{"name": f"pod-{port}", "address": f"127.0.0.1:{port}"} for port in engine_ports]
    score = [{"name": name, "weight": 1} for name in ("least-request", "prefix-cache")]
    config = {
        "listen": {"extproc": "127.0.0.1:0", "admin": "127.0.0.1:0", "http": "127.0.0.1:0", "leaveSeconds": 0},
        "endpoints": {"static": static},
        "scheduler": {"plugins": {"Filter": {"enabled": ["least-request"]}, "Score": {"enabled": score}}},
        "scrape": {"intervalSeconds": scrape_seconds},
        "log": {"format": "json"},
    }
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
            yield Server(process.pid, [line["extproc"]])
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
