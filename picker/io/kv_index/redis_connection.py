"""One connection to Redis that any number of callers share: commands go out at once, replies come back in order.

A prompt's lookup is a hundred commands in one round trip; on hiredis and a plain protocol that costs a tenth of what it
does with a general client, and a caller that gives up waiting leaves the connection as it is.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import hiredis
from msgspec import Struct

MOST_WAITING = 4096
"""Callers that wait for replies."""

MAX_REPLY_BYTES = 64 << 20
"""Longest single reply."""

Command = tuple[str | int | float | bytes | memoryview, ...]


class Away(StrEnum):
    """Why Redis cannot be asked; the label of counters."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    """It answers with errors."""
    BROKEN = "broken"
    """The connection is gone, or what comes over it is not Redis."""


class RedisUnavailableError(Exception):
    """Redis cannot be asked; `reason` says what kind of failure that is."""

    def __init__(self, text: str, reason: Away = Away.BROKEN) -> None:
        super().__init__(text)
        self.reason = reason


class RedisSettings(Struct, frozen=True):
    """Where Redis is and how to get in. Times in seconds."""

    host: str
    port: int = 6379
    db: int = 0
    username: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None
    connect_timeout: float = 2.0


class _Waiting:
    __slots__ = ("future", "missing", "replies")

    def __init__(self, missing: int, future: asyncio.Future[list[Any]]) -> None:
        self.missing = missing
        self.future = future
        self.replies: list[Any] = []


class RedisConnection(asyncio.Protocol):
    """An open connection; `closed` says whether it still is."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._waiting: deque[_Waiting] = deque()
        self._transport: asyncio.Transport | None = None
        self._unparsed = 0
        self._error: Exception | None = None
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, settings: RedisSettings) -> RedisConnection:
        """Connect, authenticate and select the database. Raises RedisUnavailableError."""
        loop = asyncio.get_running_loop()
        connection: RedisConnection | None = None
        try:
            async with asyncio.timeout(settings.connect_timeout):
                _, connection = await loop.create_connection(cls, settings.host, settings.port, ssl=settings.tls)
                await connection.log_in(settings)
        except (OSError, TimeoutError, RedisUnavailableError) as error:
            if connection is not None:
                connection.close()
            text = f"Redis at {settings.host}:{settings.port}: {str(error) or 'timed out'}"
            raise RedisUnavailableError(text, why(error)) from error
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        return connection

    async def log_in(self, settings: RedisSettings) -> None:
        """Authenticate and select the database. Raises RedisUnavailableError when Redis refuses."""
        commands: list[Command] = []
        if settings.password:
            commands.append(("AUTH", *filter(None, (settings.username,)), settings.password))
        if settings.db:
            commands.append(("SELECT", settings.db))
        for reply in await self.ask([*commands, ("PING",)]):
            if isinstance(reply, hiredis.ReplyError):
                raise RedisUnavailableError(str(reply), Away.REFUSED)

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together; returns their replies, errors among them as `hiredis.ReplyError`.

        Raises RedisUnavailableError when the connection is gone, or too many wait for it. No timeout.
        """
        if self.closed.is_set() or self._transport is None:
            raise RedisUnavailableError("the connection is closed") from self._error
        if len(self._waiting) >= MOST_WAITING:
            raise RedisUnavailableError("too many requests wait for Redis")
        if not commands:
            return []
        waiting = _Waiting(len(commands), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._transport.write(_packed(commands))
        return await waiting.future

    def close(self) -> None:
        """Close it. Whoever waits gets an error."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's is one

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._unparsed = 0
                self._take(reply)
        except hiredis.ProtocolError as error:
            self._error = error
            self.close()
        if self._unparsed > MAX_REPLY_BYTES:
            self._error = hiredis.ProtocolError(f"a reply has more than {MAX_REPLY_BYTES} bytes")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc)

    def _take(self, reply: Any) -> None:
        if not self._waiting:
            raise hiredis.ProtocolError("a reply to nothing")
        waiting = self._waiting[0]
        waiting.replies.append(reply)
        waiting.missing -= 1
        if not waiting.missing:
            self._waiting.popleft()
            if not waiting.future.done():
                waiting.future.set_result(waiting.replies)

    def _fail(self, error: Exception | None) -> None:
        self._error = self._error or error
        self.closed.set()
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(RedisUnavailableError(f"the connection broke: {self._error or 'closed'}"))


def scanned(reply: object) -> tuple[bytes, list[bytes]]:
    """Read the reply to a SCAN: cursor and keys. Raises RedisUnavailableError when it is none."""
    match reply:
        case [bytes() as cursor, list() as keys]:
            return cursor, keys
    raise RedisUnavailableError(f"SCAN was answered with {reply!r:.200}")


def run_id(reply: object) -> str | None:
    """Read the reply to INFO server: what tells this Redis process from others, None if it does not say."""
    if isinstance(reply, bytes):
        for line in reply.decode("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name == "run_id":
                return value
    return None


def why(error: Exception) -> Away:
    """Say what kind of failure an error is that came up while connecting."""
    if isinstance(error, RedisUnavailableError):
        return error.reason
    return Away.TIMEOUT if isinstance(error, TimeoutError) else Away.UNREACHABLE


def _packed(commands: Iterable[Command]) -> bytes:
    return b"".join([hiredis.pack_command(command) for command in commands])  # type: ignore[arg-type]  # of any length
