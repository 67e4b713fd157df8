"""The configuration file, read again when it changes or when the process gets SIGHUP."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from picker.app.config import MOST_BYTES, Config, Loaded, in_force, load, needs_restart
from picker.io.file_watch import WatchedFile

logger = structlog.get_logger(__name__)


class ConfigFile(WatchedFile[Loaded]):
    """The file that the configuration `started` came from, with `overrides` that go before it. A bad change is refused and the configuration stays.

    What only a restart puts in force stays as `started` has it. Changes of it are named in the log, each time until the
    restart, and in `needs_restart`.
    """

    def __init__(
        self,
        path: Path,
        started: Config,
        *,
        overrides: Mapping[str, Any] = MappingProxyType({}),
        poll_seconds: float = 1.0,
    ) -> None:
        super().__init__(path, partial(load, overrides=overrides), most_bytes=MOST_BYTES, poll_seconds=poll_seconds)
        self.needs_restart: list[str] = []
        self._started = started
        self._current = started

    async def run(self, on_change: Callable[[Loaded], None]) -> None:
        """Tell what is in force by each configuration that differs from the one before, until cancelled. SIGHUP looks at once."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.check_now)
        try:
            await super().run(lambda loaded: self._take(loaded, on_change))
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which would end the process

    def _take(self, loaded: Loaded, on_change: Callable[[Loaded], None]) -> None:
        if loaded.config == self._current:
            return
        self._current = loaded.config
        logger.info("The configuration has changed", path=str(self.path))
        for warning in loaded.warnings:
            logger.warning("The configuration is odd", path=str(self.path), warning=warning)
        self.needs_restart = needs_restart(self._started, loaded.config)
        if self.needs_restart:
            logger.warning("Some changes need a restart", path=str(self.path), settings=self.needs_restart)
        on_change(msgspec.structs.replace(loaded, config=in_force(self._started, loaded.config)))
