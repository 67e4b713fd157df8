"""Processes that the demo starts: each says when it is ready, is watched, and is gone at the end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

_POLL_SECONDS = 0.02
_STOP_SECONDS = 5.0
_TAIL_LINES = 15


class DemoError(RuntimeError):
    """The demo cannot go on. The message says why, and what to do."""


class Child:
    """One `picker` subcommand in a process group of its own, which writes to a log file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, name: str, arguments: list[str], log: Path) -> Self:
        """Start `picker` with these arguments."""
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "picker", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(name, process, log)

    async def says(self, pattern: str, seconds: float) -> re.Match[str]:
        """Wait until its log matches. Raises DemoError, with the end of the log, if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self._log.read_text(errors="replace"))):
            if self._process.returncode is not None:
                self._fail(f"ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                self._fail(f"is not ready after {seconds:.0f} s")
            await asyncio.sleep(_POLL_SECONDS)
        return found

    async def ended(self) -> NoReturn:
        """Wait until it ends, which it should not, and raise DemoError with the end of its log."""
        code = await self._process.wait()
        self._fail(f"ended with code {code}")

    async def stop(self) -> None:
        """End it and all that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.returncode is None:
                os.killpg(self._process.pid, number)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)

    def _fail(self, what: str) -> NoReturn:
        raise DemoError(f"{self.name} {what}; the end of its log:\n{tail(self._log.read_text(errors='replace'))}")


def tail(log: str) -> str:
    """The last lines of a log."""
    return "\n".join(log.splitlines()[-_TAIL_LINES:]) or "(empty)"
