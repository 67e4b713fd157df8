"""Starts a served engine inside the running process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import zmq.asyncio
from aiohttp import web

from picker.sim.config import EngineSimConfig
from picker.sim.events import KvEvent
from picker.sim.publisher import KvEventPublisher, open_publishers
from picker.sim.server import EngineServer


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that serves.

    `failed` waits for as long as the engine works, and then raises why it does no more; `close` ends it, giving
    running requests the configured grace.
    """

    url: str
    port: int
    stats: Callable[[], dict[str, Any]]
    failed: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    publishers: tuple[KvEventPublisher, ...] = ()
    """Of the KV events, one for each data-parallel rank."""


async def start_engine(
    config: EngineSimConfig, publish: Callable[[list[KvEvent], float], None] | None = None
) -> RunningEngine:
    """Serve an engine on the running loop. Raises OSError.

    `publish` gets its cache events, per step and of all ranks, where `config.kv_events` does not have them published.
    """
    context = zmq.asyncio.Context()
    ranks = config.data_parallel_size
    publishers: list[KvEventPublisher] = []
    if config.kv_events is not None:
        publishers = open_publishers(config.kv_events, config.host, ranks, config.loras, context)
    server = EngineServer(config, [publisher.publish for publisher in publishers] or [publish] * ranks, publishers)
    runner = web.AppRunner(
        server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=config.grace
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError:
        await runner.cleanup()
        _close_publishers(publishers, context)
        raise
    port = runner.addresses[0][1]
    tasks = [asyncio.create_task(driver.run(), name=f"engine {config.name}") for driver in server.drivers]

    async def close() -> None:
        await runner.cleanup()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        _close_publishers(publishers, context)

    async def failed() -> None:
        await asyncio.shield(asyncio.gather(*tasks))

    host = f"[{config.host}]" if ":" in config.host else config.host
    return RunningEngine(f"http://{host}:{port}", port, server.stats, failed, close, tuple(publishers))


def _close_publishers(publishers: list[KvEventPublisher], context: zmq.asyncio.Context) -> None:
    for publisher in publishers:
        publisher.close()
    context.term()
