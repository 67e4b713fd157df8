"""A closed loop of HTTP/1.1 clients: each connection sends its next request when the last one is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from statistics import quantiles
from typing import cast

from msgspec import Struct

_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: bench\r\naccept: */*\r\n"
    b"content-type: application/json\r\nauthorization: Bearer sk-0123456789abcdef\r\ncontent-length: %d\r\n\r\n"
)


class Load(Struct, frozen=True):
    """What a run of the loop saw; latencies in seconds."""

    seconds: float
    latencies: list[float]

    @property
    def requests(self) -> int:
        return len(self.latencies)

    @property
    def percentiles(self) -> list[float]:
        """p1 to p99."""
        return quantiles(self.latencies, n=100)


class LoadError(RuntimeError):
    """A request was not answered with 200."""


async def closed_loop(port: int, body: Callable[[], bytes], *, connections: int, seconds: float) -> Load:
    """Load 127.0.0.1:port. Raises LoadError at the first answer that is not 200, and when a connection is lost."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(lambda: _Client(body), "127.0.0.1", port))[1] for _ in range(connections)]
    started = time.perf_counter()
    try:
        for client in clients:
            client.begin(started + seconds)
        async with asyncio.timeout(seconds + 20):
            await asyncio.gather(*(client.done for client in clients))
    finally:
        for client in clients:
            client.close()
    return Load(time.perf_counter() - started, [latency for client in clients for latency in client.latencies])


class _Client(asyncio.Protocol):
    def __init__(self, body: Callable[[], bytes]) -> None:
        self.latencies: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._body = body
        self._transport: asyncio.WriteTransport | None = None
        self._answer = b""
        self._sent = self._until = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def begin(self, until: float) -> None:
        self._until = until
        self._send()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        assert self._transport is not None
        body = self._body()
        self._sent = time.perf_counter()
        self._transport.write(_HEAD % len(body) + body)

    def data_received(self, data: bytes) -> None:
        answer = self._answer = self._answer + data if self._answer else data
        if not _complete(answer):
            return
        now = time.perf_counter()
        if not answer.startswith(b"HTTP/1.1 200 "):
            self._fail(f"the answer was {answer[:200]!r}")
            return
        self._answer = b""
        self.latencies.append(now - self._sent)
        if now < self._until:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(f"the connection was lost: {exc}")

    def _fail(self, text: str) -> None:
        if not self.done.done():
            self.done.set_exception(LoadError(text))


def _complete(answer: bytes) -> bool:
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    length = answer.find(b"\r\ncontent-length: ", 0, end)
    if length < 0:
        return answer.endswith(b"\r\n0\r\n\r\n")
    return len(answer) >= end + 4 + int(answer[length + 18 : answer.index(b"\r\n", length + 18)])
