"""Files that are read again when they change, and kept as they were when the change is no good.

Watching is polling: it sees a file written in place, one renamed over another, and the swap of the symbolic link
under which Kubernetes mounts ConfigMaps.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from picker.core.strict import ConfigError

logger = structlog.get_logger(__name__)

T = TypeVar("T")

_SETTLE_SECONDS = 0.05
"""A changed file is read twice, this far apart; a writer that is not done by then is likely to be seen."""
_RECENT_NS = 2 * 10**9
"""File systems with coarse times may not show a second change that comes within this."""

_Signature = tuple[int, int, int, int]


class FileError(Exception):
    """A file that cannot be read, with the reason for a counter: `missing`, `unreadable` or `too_large`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises FileError."""
    return _read(path, most_bytes)[0]


def _read(path: Path, most_bytes: int) -> tuple[bytes, _Signature]:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileError("unreadable", f"{path} is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most_bytes + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise FileError("missing", f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise FileError("unreadable", f"{path} cannot be read: {error}") from None
    if len(content) > most_bytes:
        raise FileError("too_large", f"{path} is larger than {most_bytes} bytes")
    return content, _sign(status)


def _sign(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class WatchedFile(Generic[T]):
    """A file and what it means.

    `parse` turns its content into a value, or raises ConfigError. A file that is missing, cannot be read or parsed is
    refused: logged, counted in `refused` by reason (`missing`, `unreadable`, `too_large`, `invalid`), and described in
    `last_error` until it is good again. It is refused once, not at each look; a look that `check_now` asked for says
    again what is wrong.

    `reloads` counts the contents that were taken, the first included.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], T],
        *,
        most_bytes: int,
        poll_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.poll_seconds = poll_seconds
        self.reloads = 0
        self.refused: Counter[str] = Counter()
        self.last_error = ""
        self._parse = parse
        self._most_bytes = most_bytes
        self._clock = clock
        self._looked_at: bytes | str | None = None
        self._signature: _Signature | None = None
        self._wanted = asyncio.Event()
        self._asked = False

    def check_now(self) -> None:
        """Look at the file at once, even if nothing tells that it changed."""
        self._signature = None
        self._asked = True
        self._wanted.set()

    async def run(self, on_change: Callable[[T], None]) -> None:
        """Tell what the file means now, then what it means after each change, until cancelled."""
        while True:
            self._wanted.clear()
            asked, self._asked = self._asked, False
            refused = self.refused.total()
            try:
                content = await self._changed()
                # In a thread, since ten thousand endpoints take half a second.
                value = None if content is None else await asyncio.to_thread(self._parse, content)
            except FileError as error:
                self._signature = None
                if self._looked_at != str(error):
                    self._looked_at = str(error)
                    self._refuse(error.reason, str(error))
            except ConfigError as error:
                self._refuse("invalid", str(error))
            else:
                if value is not None:
                    self.reloads += 1
                    self.last_error = ""
                    on_change(value)
            if asked and self.last_error and self.refused.total() == refused:
                logger.warning("The file is still refused", path=str(self.path), error=self.last_error)
            await self._pause()

    async def _changed(self) -> bytes | None:
        """The content if it is another than before, and the same at two readings. Raises FileError."""
        if self._signature is not None and self._signature == self._stat():
            return None
        content, signature = _read(self.path, self._most_bytes)
        recent = self._clock() * 1e9 - signature[3] < _RECENT_NS
        if content != self._looked_at:
            await asyncio.sleep(_SETTLE_SECONDS)
            if _read(self.path, self._most_bytes)[0] != content:
                return None
        self._signature = None if recent else signature
        if content == self._looked_at:
            return None
        self._looked_at = content
        return content

    def _stat(self) -> _Signature | None:
        try:
            return _sign(self.path.stat())
        except OSError:
            return None

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self.poll_seconds):
                await self._wanted.wait()
        except TimeoutError:
            return

    def _refuse(self, reason: str, message: str) -> None:
        self.refused[reason] += 1
        self.last_error = message
        logger.warning(
            "The file is refused; what was read from it before stays",
            path=str(self.path),
            reason=reason,
            error=message,
        )
