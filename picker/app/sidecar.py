"""`picker sidecar`: beside an engine, a drop-in for Kthena's runtime.

It follows the engine's KV events and tells routers, through Redis or by streams, which blocks the engine holds. It also
passes on the engine's metrics and its LoRA endpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvloop
from aiohttp import web

from picker.app.sidecar_predict import SidecarPredictions
from picker.app.sidecar_settings import SettingsError, SidecarSettings, SyncMode, add_arguments, read_settings
from picker.core.kv_index.ownership import Ownership
from picker.core.kv_index.stream_protocol import WRONG_MODE
from picker.io.keep import keep
from picker.io.kv_events.source import KvEventHandler
from picker.io.kv_events.subscriber import KvEventSubscriber
from picker.io.kv_index.engine_face import EngineFace
from picker.io.kv_index.feed import OwnershipFeed
from picker.io.kv_index.redis_writer import RedisWriter, WriterSettings
from picker.io.kv_index.sidecar_metrics import SidecarMetrics
from picker.io.kv_index.stream_server import REGISTER, StreamServer, StreamSettings
from picker.io.telemetry import configure_logging

__all__ = ["Sidecar", "add_arguments", "run"]

logger = structlog.get_logger(__name__)

_WITHDRAW_SECONDS = 3.0
_REFRESH_SECONDS = 5.0
_CERTIFICATE_SECONDS = 30.0
_ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns 2 for settings that make no sense, 1 when the port cannot be had."""
    try:
        settings = read_settings(options, os.environ)
    except SettingsError as error:
        print(f"sidecar: {error}", file=sys.stderr)
        return 2
    configure_logging(os.environ.get("LOG_LEVEL", "info").lower(), "json")
    try:
        uvloop.run(_serve(settings))
    except OSError as error:
        logger.error("The sidecar cannot start", error=str(error))  # noqa: TRY400
        return 1
    return 0


async def _serve(settings: SidecarSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    predictions = SidecarPredictions(settings)
    sidecar = Sidecar(settings, handlers=(predictions.feed,), apps=predictions.apps)
    predictions.ranks = sidecar.subscriber.ranks
    async with predictions:
        await sidecar.start()
        await stop.wait()
        await sidecar.stop()


class Sidecar:
    """One running sidecar. `port` is set once it is started.

    `handlers` are told of the engine's events too; `apps` are served beside its own faces, by path prefix.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        *,
        handlers: Sequence[KvEventHandler] = (),
        apps: Mapping[str, web.Application] | None = None,
    ) -> None:
        self.port = 0
        self.ownership = Ownership(settings.model, protocol=settings.hash_protocol, seed=settings.hash_seed)
        self.redis: RedisWriter | None = None
        self.streams: StreamServer | None = None
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        if settings.mode is SyncMode.MEMORY:
            self.streams = StreamServer(self.ownership, settings.pod, StreamSettings(token=settings.token))
        elif self._registers:
            options = WriterSettings(media=settings.media)
            self.redis = RedisWriter(settings.redis, self.ownership, settings.pod, settings.engine, options)
        self.feed = OwnershipFeed(self.ownership, redis=self.redis, streams=self.streams, then=handlers)
        self.subscriber = KvEventSubscriber(settings.source, self.feed)
        metrics = SidecarMetrics(self.ownership, self.subscriber, self.redis, self.streams)
        app = web.Application()
        engine = EngineFace(settings.base_url, settings.metrics_path, settings.request_timeout, metrics.page)
        engine.add_to(app)
        app.router.add_get("/health", self._health)
        app.router.add_get("/stats", self._stats)
        app.router.add_post(REGISTER, self._register)
        for prefix, sub_app in (apps or {}).items():
            app.add_subapp(prefix, sub_app)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Listen and begin to work. Raises OSError if the port cannot be had or the certificate not be read."""
        settings = self._settings
        for warning in settings.warnings:
            logger.warning(warning)
        context = None
        if settings.certificate is not None:
            context = _tls_context(*settings.certificate)
            self._keep("certificate", partial(_follow_certificate, context, *settings.certificate))
        await self._runner.setup()
        await web.TCPSite(self._runner, settings.host, settings.port, ssl_context=context).start()
        self.port = self._runner.addresses[0][1]
        name = _ENGINE_NAMES[settings.engine]
        means = "stream to registered routers" if settings.mode is SyncMode.MEMORY else "write to Redis"
        logger.info(f"KV event sync mode: {settings.mode} ({means})")  # noqa: G004  Kthena's words, here and below
        if not self._registers:
            logger.warning("Pod identifier or model name not provided, skipping event handler registration")
            return
        if self.redis is not None:
            self._keep("redis", self.redis.run)
        self._keep("refresh", self._refresh)
        self._keep("events", self.subscriber.run)
        logger.info(f"{name} ZMQ subscriber initialized successfully", endpoint=settings.source.endpoint)  # noqa: G004
        logger.info(f"{name} KV-cache event handler registered", pod=settings.pod, model=settings.model)  # noqa: G004

    async def stop(self) -> None:
        """End the streams, take back what was written to Redis, and stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.streams is not None:
            self.streams.stop()
        if self.redis is not None and not await self.redis.withdraw(_WITHDRAW_SECONDS):
            logger.warning("What this engine held is still in Redis", pod=self._settings.pod)
        await self._runner.cleanup()

    @property
    def _registers(self) -> bool:
        return bool(self._settings.pod and self._settings.model)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy", "service": "runtime"})

    async def _stats(self, _: web.Request) -> web.Response:
        settings = self._settings
        stats: dict[str, Any] = {
            "engine": settings.engine,
            "pod": settings.pod,
            "model": settings.model,
            "mode": settings.mode,
            "hash_protocol": settings.hash_protocol,
            "ranks": self.subscriber.stats(),
            "blocks": self.ownership.blocks,
            "unowned": self.ownership.counts,
        }
        if self.redis is not None:
            redis = self.redis
            stats["redis"] = {
                "in_step": redis.in_step,
                "behind": redis.behind,
                **redis.counts,
                "failures": redis.failures,
            }
        if self.streams is not None:
            stats["streams"] = {"open": self.streams.streams, **self.streams.counts}
        return web.json_response(stats)

    async def _register(self, request: web.Request) -> web.StreamResponse:
        if self.streams is None:
            logger.warning(WRONG_MODE)
            return web.json_response({"detail": WRONG_MODE}, status=409)
        return await self.streams.register(request)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            self.feed.refresh()

    def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do something for as long as the sidecar runs, again and again should it ever fail."""
        self._tasks.append(asyncio.create_task(keep(name, work), name=f"sidecar {name}"))


def _tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key, password=lambda: b"")  # fail rather than ask for a password
    return context


async def _follow_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Take a changed certificate for the handshakes to come; one that cannot be used is ignored."""
    loaded = _changed_at(certificate, key)
    while True:
        await asyncio.sleep(_CERTIFICATE_SECONDS)
        with suppress(OSError):
            changed = _changed_at(certificate, key)
            if changed != loaded:
                context.load_cert_chain(certificate, key, password=lambda: b"")
                loaded = changed
                logger.info("The certificate has changed", certificate=str(certificate))


def _changed_at(*paths: Path) -> list[tuple[int, int]]:
    return [(status.st_ino, status.st_mtime_ns) for status in map(Path.stat, paths)]
