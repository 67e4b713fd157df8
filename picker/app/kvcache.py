"""The part of a picker that is there while `kvcache-aware` is enabled, and the listener for predictions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from aiohttp import web

from picker.app.config_settings import Predict
from picker.core.director import Director
from picker.core.plugins.kvcache_aware import KvCacheProducer
from picker.io.keep import Failed
from picker.io.kvcache.oracle import Oracle
from picker.io.kvcache.runtime import KvCacheRuntime
from picker.io.predict import Gate, PredictSettings, create_predict_app

logger = structlog.get_logger(__name__)

_LISTEN_AGAIN_SECONDS = 5.0

Keep = Callable[[str, Callable[[], Awaitable[None]]], asyncio.Task[None]]
"""Runs something for as long as the picker runs, under a name."""


class PredictError(ValueError):
    """The listener for predictions cannot be had as it is configured."""


class KvCachePart:
    """`port` is that of the listener, once there is one; `runtime` is what is in force, or None.

    A listener that the start did not need is tried for again every `pause` seconds until there is one. `failed` is told
    of unexpected errors that were survived.
    """

    def __init__(
        self,
        director: Director,
        predict: Predict,
        keep: Keep,
        failed: Failed,
        *,
        pause: float = _LISTEN_AGAIN_SECONDS,
    ) -> None:
        self.port: int | None = None
        self.runtime: KvCacheRuntime | None = None
        self.gate = Gate(_settings(predict, os.environ))
        self._director = director
        self._predict = predict
        self._keep = keep
        self._failed = failed
        self._pause = pause
        self._task: asyncio.Task[None] | None = None
        self._listening: web.AppRunner | None = None
        self._started = False
        self._late: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to work, and listen if the plugin is enabled. OSError if the port cannot be had."""
        self.configure()
        self._started = True
        if self.runtime is not None and self._predict.enabled:
            await self._listen()

    def configure(self) -> None:
        """Follow the scheduler in force. To be called whenever it changed."""
        producers = self._director.scheduler.producers
        producer = next((one for one in producers if isinstance(one, KvCacheProducer)), None)
        current = self.runtime
        if producer is None:
            self._end()
        elif current is None or current.producer is not producer or current.args is not producer.args:
            self._end()
            self.runtime = self._director.preparation = KvCacheRuntime(self._director, producer, self._failed)
            self.runtime.follow()
            self._task = self._keep("kvcache", self.runtime.run)
            if self._started and self._listening is None and self._late is None and self._predict.enabled:
                self._late = asyncio.create_task(self._listen_late())

    def follow(self) -> None:
        """Take over changed endpoints."""
        if self.runtime is not None:
            self.runtime.follow()

    async def stop(self) -> None:
        """End everything."""
        task = self._task
        self._end()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        if self._late is not None:
            self._late.cancel()
            await asyncio.gather(self._late, return_exceptions=True)
        if self._listening is not None:
            await self._listening.cleanup()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self.runtime is not None:
            self.runtime.sources.follow({})
        self._task = self.runtime = self._director.preparation = None

    async def _listen_late(self) -> None:
        """Listen as soon as it is possible; what is in the way is said once."""
        said = ""
        while True:
            try:
                await self._listen()
            except OSError as taken:
                if str(taken) != said:
                    said = str(taken)
                    logger.error("Predictions cannot be asked for; free the port or change predict.listen", error=said)  # noqa: TRY400
            except Exception as error:  # noqa: BLE001  the picker goes on without it meanwhile
                self._failed("predict", error)
            else:
                return
            await asyncio.sleep(self._pause)

    async def _listen(self) -> None:
        host, _, port = self._predict.listen.rpartition(":")
        oracle = Oracle(lambda: self.runtime.chain if self.runtime else None, lambda: self.runtime)
        runner = web.AppRunner(create_predict_app(oracle, self.gate, self._stats), access_log=None)
        try:
            await runner.setup()
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._listening = runner
        self.port = runner.addresses[0][1]
        logger.info("Predictions can be asked for", host=host, port=self.port)

    def _stats(self) -> dict[str, Any]:
        return {"engines": [] if self.runtime is None else self.runtime.stats()}


def _settings(predict: Predict, environment: Mapping[str, str]) -> PredictSettings:
    name = predict.token_environment
    if name and not environment.get(name):
        raise PredictError(
            f"predict.tokenEnvironment is {name!r}, which the environment does not have: set it, or remove it"
        )
    return PredictSettings(environment.get(name, "") if name else "", predict.requests_per_second)
