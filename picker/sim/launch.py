"""Starts a served engine inside the running process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from picker.sim.config import EngineSimConfig
from picker.sim.events import KvEvent
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


async def start_engine(
    config: EngineSimConfig, publish: Callable[[list[KvEvent], float], None] | None = None
) -> RunningEngine:
    """Serve an engine on the running loop. `publish` gets its cache events, per step. Raises OSError."""
    server = EngineServer(config, publish)
    runner = web.AppRunner(
        server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=config.grace
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError:
        await runner.cleanup()
        raise
    port = runner.addresses[0][1]
    task = asyncio.create_task(server.driver.run(), name=f"engine {config.name}")

    async def close() -> None:
        await runner.cleanup()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def failed() -> None:
        await asyncio.shield(task)

    host = f"[{config.host}]" if ":" in config.host else config.host
    return RunningEngine(f"http://{host}:{port}", port, server.stats, failed, close)
