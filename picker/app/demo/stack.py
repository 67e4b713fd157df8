"""Envoy, simulated engines and perhaps the picker, on loopback."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import aiohttp
import yaml

from picker.app.demo.children import Child, DemoError, tail
from picker.app.demo.load import MODEL
from picker.app.demo.workload import BLOCK_TOKENS, Shape
from picker.app.envoy import EnvoyProcess, Template, bootstrap, start_envoy

T = TypeVar("T")

_HOST = "127.0.0.1"
_READY_SECONDS = 30.0
_WATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the stack listens on loopback; 0 is any free port."""

    listener: int = 0
    """Envoy's, for clients."""
    extproc: int = 0
    admin: int = 0
    http: int = 0

    def require_free(self) -> None:
        """Raise DemoError if somebody listens on one of them."""
        for field in fields(self):
            port = getattr(self, field.name)
            try:
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((_HOST, port))
            except OSError as error:
                option = "--port" if field.name == "listener" else f"--{field.name}-port"
                raise DemoError(
                    f"port {port} cannot be had ({error.strerror}): free it, or choose another with {option} (0: any)"
                ) from None


@dataclass(frozen=True, slots=True)
class Stack:
    """What runs."""

    engines: tuple[str, ...]
    """Names, as in the header x-engine."""
    ports: Ports
    """The real ones; zero for the picker's where there is none."""
    directory: Path
    """Logs and configuration; removed at the end."""
    envoy: EnvoyProcess
    children: tuple[Child, ...]
    predict: int = 0
    """The picker's port for predictions, where it follows KV events."""

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://{_HOST}:{self.ports.listener}"

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work while every process runs. Raises DemoError as soon as one ends."""
        task = asyncio.create_task(work)
        watchers = [asyncio.create_task(child.ended()) for child in self.children]
        watchers.append(asyncio.create_task(_ended(self.envoy)))
        try:
            await asyncio.wait({task, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            for watcher in watchers:
                if watcher.done():
                    await watcher
            return await task
        finally:
            for each in (task, *watchers):
                each.cancel()
            await asyncio.gather(task, *watchers, return_exceptions=True)


@asynccontextmanager
async def round_robin_stack(shape: Shape, engines: int, ports: Ports) -> AsyncIterator[Stack]:
    """Fresh engines behind Envoy alone, which takes them in turn. Raises DemoError or EnvoyError."""
    async with _started(shape, engines) as (exits, directory, children, addresses):
        config = bootstrap(
            Template.BUFFERED,
            picker=None,
            endpoints=list(addresses.values()),
            listener=f"{_HOST}:{ports.listener}",
            fallback_policy="round_robin",
        )
        envoy = await exits.enter_async_context(await start_envoy(config))
        yield Stack(tuple(addresses), Ports(envoy.port), directory, envoy, tuple(children))


@asynccontextmanager
async def picker_stack(
    shape: Shape, engines: int, ports: Ports, template: Template, *, kv_events: bool = False
) -> AsyncIterator[Stack]:
    """Fresh engines behind Envoy and the picker with its default policy. Raises DemoError or EnvoyError.

    With `kv_events` the picker goes by what the engines say they hold, in the place of what it sent them.
    """
    async with _started(shape, engines, kv_events=kv_events) as (exits, directory, children, addresses):
        config = picker_config(addresses, ports)
        if kv_events:
            config = follow_events(config, {name: await _event_source(at) for name, at in addresses.items()})
        (directory / "picker.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        picker = await _child(exits, "picker", ["serve", "-c", str(directory / "picker.yaml")], directory)
        children.append(picker)
        up = await picker.says(r'"http":(\d+),"admin":(\d+),"extproc":(\d+).*"The picker is up"', _READY_SECONDS)
        http, admin, extproc = map(int, up.groups())
        predict = re.search(r'"predict":(\d+)', up[0])
        config = bootstrap(
            template,
            picker=f"{_HOST}:{extproc}",
            endpoints=list(addresses.values()),
            listener=f"{_HOST}:{ports.listener}",
        )
        envoy = await exits.enter_async_context(await start_envoy(config))
        found = Ports(envoy.port, extproc, admin, http)
        port = int(predict[1]) if predict else 0
        yield Stack(tuple(addresses), found, directory, envoy, tuple(children), port)


def follow_events(config: dict[str, Any], sources: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The same configuration and policy, with what engines say they hold in the place of what they were sent."""
    entries = [{**entry, "kvEvents": sources[entry["name"]]} for entry in config["endpoints"]["static"]]
    return {
        **config,
        "endpoints": {"static": entries},
        "predict": {"listen": f"{_HOST}:0"},
        "scheduler": {"pluginConfig": [{"name": "kvcache-aware", "args": {"indexMode": "direct"}}]},
    }


async def _event_source(address: str) -> dict[str, str]:
    """Where an engine publishes, as it says."""
    async with aiohttp.request("GET", f"http://{address}/kv_event_sources") as answer:
        source = (await answer.json())["0"]
    return {"endpoint": source["endpoint"], "replayEndpoint": source["replay_endpoint"]}


def picker_config(addresses: dict[str, str], ports: Ports) -> dict[str, Any]:
    """The picker's configuration for engines by name: all defaults, but for where it listens."""
    return {
        "listen": {
            "extproc": f"{_HOST}:{ports.extproc}",
            "admin": f"{_HOST}:{ports.admin}",
            "http": f"{_HOST}:{ports.http}",
            "leaveSeconds": 0,
            "drainSeconds": 1,
        },
        "endpoints": {"static": [{"name": name, "address": address} for name, address in addresses.items()]},
    }


@asynccontextmanager
async def _started(
    shape: Shape, engines: int, *, kv_events: bool = False
) -> AsyncIterator[tuple[AsyncExitStack, Path, list[Child], dict[str, str]]]:
    """Engines that serve, by name and address, in a directory of their own; ends what is pushed on the exit stack."""
    async with AsyncExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="picker-demo-")))
        names = [f"engine-{number}" for number in range(engines)]
        children = [
            await _child(exits, name, _engine_arguments(name, shape, kv_events=kv_events), directory) for name in names
        ]
        ready = [await child.says(r"listening on http://(\S+)", _READY_SECONDS) for child in children]
        yield exits, directory, children, {name: match[1] for name, match in zip(names, ready, strict=True)}


async def _child(exits: AsyncExitStack, name: str, arguments: list[str], directory: Path) -> Child:
    child = await Child.start(name, arguments, directory / f"{name}.log")
    exits.push_async_callback(child.stop)
    return child


def _engine_arguments(name: str, shape: Shape, *, kv_events: bool) -> list[str]:
    options: dict[str, Any] = {
        "port": 0,
        "name": name,
        "model": MODEL,
        "speed": shape.speed,
        "block-size": BLOCK_TOKENS,
        "num-gpu-blocks": shape.cache_blocks,
        "grace": 0.2,
    }
    if kv_events:
        options |= {"kv-events-port": 0, "kv-events-replay-port": 0}
    return ["engine-sim", *(f"--{option}={value}" for option, value in options.items())]


async def _ended(envoy: EnvoyProcess) -> NoReturn:
    while True:
        try:
            os.kill(envoy.pid, 0)
        except ProcessLookupError:
            raise DemoError(f"Envoy ended; the end of its log:\n{tail(envoy.log())}") from None
        await asyncio.sleep(_WATCH_SECONDS)
