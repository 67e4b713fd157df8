"""The stream from one endpoint's sidecar, kept open, feeding what is known of the endpoint.

What a stream says counts for the endpoint that was dialled and for no other. A stream that ends, or that cannot be
understood, takes all that it said with it; the next one begins with everything.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable

import aiohttp
import structlog
from msgspec import Struct

from picker.core.kv_index.hash_index import HashIndex
from picker.core.kv_index.ownership import Cleared, Removed
from picker.core.kv_index.stream_protocol import (
    MAX_LINE_BYTES,
    BlocksStored,
    EngineBatch,
    EngineBegins,
    Extended,
    LineError,
    Message,
    Unknown,
    parse_line,
    registration,
)
from picker.io.kv_events.source import KvEventHandler
from picker.io.kv_index.backoff import Backoff
from picker.io.kv_index.stream_server import REGISTER

logger = structlog.get_logger(__name__)

SLICE = 1000
"""Blocks that are taken over before others get the loop."""


StartedAt = Callable[[int], float | None]
"""When the engine of a slot started, in Unix seconds; None: that is not known."""


class ClientSettings(Struct, frozen=True):
    """Times in seconds."""

    router_id: str
    silence: float = 30.0
    """A stream that says nothing for so long is opened anew."""
    connect: float = 3.0
    reconnect: float = 0.2
    most_reconnect: float = 10.0
    most_bytes_per_second: int = 64 << 20
    """A stream that says more is read more slowly."""
    token: str = ""
    tls: ssl.SSLContext | None = None


class StreamError(Exception):
    """A stream has ended; `reason` is the label of a counter."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason


class Stream:
    """The stream from one endpoint's sidecar. Its public attributes say what it is like now."""

    def __init__(
        self,
        slot: int,
        address: str,
        settings: ClientSettings,
        index: HashIndex,
        engine: KvEventHandler | None,
        counts: Counter[str],
        clock: Callable[[], float],
        started_at: StartedAt,
    ) -> None:
        self.slot = slot
        self.address = address
        self.connected = False
        self.extended = False
        self.opened = 0
        self.heard_at = 0.0
        self.error = ""
        self._settings = settings
        self._index = index
        self._engine = engine
        self._counts = counts
        self._clock = clock
        self._started_at = started_at
        self._since: float | None = None
        self._ranks: set[int] = set()

    def notice_start(self) -> float:
        """Return when the engine started, as far as is known, and see that nothing counts that is from before."""
        started = self._started_at(self.slot)
        if started is not None and started != self._since:
            self._index.forget_older(self.slot, started)
        self._since = started
        return 0.0 if started is None else started

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Stream until cancelled."""
        backoff = Backoff(self._settings.reconnect, self._settings.most_reconnect)
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self._stream(session)
            except StreamError as error:
                self._counts[error.reason] += 1
                if str(error) != self.error:
                    self.error = str(error)
                    logger.warning("The stream of a sidecar has ended", address=self.address, error=self.error)
            finally:
                self.connected = False
                self._forget()
            if asyncio.get_running_loop().time() - started > self._settings.most_reconnect:
                backoff.reset()
            await asyncio.sleep(backoff.next())

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        scheme = "https" if self._settings.tls else "http"
        headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
        if self._settings.token:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        body = registration(self._settings.router_id, extended=self._engine is not None)
        url = f"{scheme}://{self.address}{REGISTER}"
        await self._swept()
        try:
            async with session.post(
                url, data=body, headers=headers, ssl=self._settings.tls or True, allow_redirects=False
            ) as response:
                if response.status != 200:
                    text = (await response.content.read(300)).decode("utf-8", "replace")
                    raise StreamError(f"status_{response.status}", f"{response.status} {text}")
                self.connected = True
                self.opened += 1
                async for line in self._lines(response.content):
                    self.heard_at = self._clock()
                    await self._take(line)
        except TimeoutError as error:
            raise StreamError("silent" if self.connected else "timeout") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise StreamError("broken" if self.connected else "unreachable", str(error)) from error
        raise StreamError("ended", "the sidecar ended the stream")

    async def _lines(self, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        """Cut what comes into lines, no faster than allowed."""
        loop = asyncio.get_running_loop()
        rest = bytearray()
        began, taken = loop.time(), 0
        async for chunk in content.iter_any():
            *lines, last = chunk.split(b"\n")
            if lines:
                lines[0] = bytes(rest) + lines[0]
                rest.clear()
            rest += last
            if len(rest) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in lines):
                raise StreamError("line_too_long")
            for line in lines:
                if line.strip():
                    yield line
            taken += len(chunk)
            ahead = taken / self._settings.most_bytes_per_second - (loop.time() - began)
            if ahead > 0.05:
                self._counts["throttled"] += 1
                await asyncio.sleep(ahead)
            elif ahead < -1:
                began, taken = loop.time(), 0

    async def _take(self, line: bytes) -> None:
        try:
            messages = parse_line(line)
        except LineError as error:
            raise StreamError(str(error), f"a line cannot be understood: {error}") from error
        self._counts["lines"] += 1
        for message in messages:
            if isinstance(message, Extended):
                self.extended = self._engine is not None
            elif isinstance(message, Unknown):
                self._counts["unknown_events"] += 1
            elif isinstance(message, EngineBegins | EngineBatch):
                self._take_engine(message)
            elif not self.extended:
                await self._take_hashes(message)
        await asyncio.sleep(0)

    def _take_engine(self, message: EngineBegins | EngineBatch) -> None:
        if self._engine is None:
            return
        self._ranks.add(message.rank)
        if isinstance(message, EngineBatch):
            self._engine.on_batch(message.batch, message.rank)
        elif message.since:
            self._engine.on_incomplete(message.rank, message.since)
        else:
            self._engine.on_restart(message.rank)

    async def _take_hashes(self, message: Message) -> None:
        index, slot = self._index, self.slot
        if isinstance(message, Cleared) or (isinstance(message, BlocksStored) and message.replace):
            index.clear(slot, message.model)
            await self._swept()
        if isinstance(message, BlocksStored):
            now, since = self._clock(), self.notice_start()
            # A store time from the future would outlive the endpoint's restart.
            blocks = [
                (time if 0 < time < now else now, block)
                for time, block in zip(message.timestamps, message.hashes, strict=True)
            ]
            blocks = sorted(((time, block) for time, block in blocks if time > since), key=lambda block: block[0])
            self._counts["before_start"] += len(message.hashes) - len(blocks)
            for start in range(0, len(blocks), SLICE):
                await self._swept()
                some = blocks[start : start + SLICE]
                index.store(slot, message.model, [block for _, block in some], [at for at, _ in some])
                await asyncio.sleep(0)
        elif isinstance(message, Removed):
            for start in range(0, len(message.hashes), SLICE):
                index.remove(slot, message.model, message.hashes[start : start + SLICE])
                await asyncio.sleep(0)

    async def _swept(self) -> None:
        """See that what the slot had is gone, so that it can take new blocks."""
        while self._index.is_hidden(self.slot):
            self._index.sweep(SLICE)
            await asyncio.sleep(0)

    def _forget(self) -> None:
        self.extended = False
        self._index.forget(self.slot)
        for rank in self._ranks:
            if self._engine is not None:
                self._engine.on_incomplete(rank, 1)
        self._ranks.clear()
