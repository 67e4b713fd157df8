"""An HTTP client over raw sockets: it sends what it is told, in any pieces, and keeps what comes as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Headers = Sequence[tuple[str, str]]


@dataclass
class Answer:
    """An HTTP response as it came over the wire. `interim` are the statuses of informational ones before it."""

    status: int
    headers: dict[str, str]
    body: bytes
    fields: list[tuple[str, str]] = field(default_factory=list)
    interim: list[int] = field(default_factory=list)

    @property
    def seen(self) -> Any:
        """The body as JSON: from an upstream that echoes, what it saw, with its header names and values as `headers`."""
        return json.loads(self.body)

    def seen_headers(self, name: str) -> list[str]:
        return [value for key, value in self.seen["headers"] if key == name]


class RawClient:
    """One HTTP/1 connection on which a request can be sent in any pieces, and dropped at any point."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**20))

    async def head(self, method: str, path: str, headers: Headers, *, version: str = "1.1") -> None:
        lines = [f"{method} {path} HTTP/{version}", "host: test", *(f"{name}: {value}" for name, value in headers)]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def last_chunk(self, trailers: Headers = ()) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in trailers)
        await self.send(f"0\r\n{lines}\r\n".encode())

    async def request(
        self,
        body: bytes | Sequence[bytes] = b"",
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        headers: Headers = (),
        trailers: Headers = (),
        every: float = 0.0,
    ) -> Answer:
        """One request. A sequence as body is uploaded in chunks, `every` seconds apart."""
        if isinstance(body, bytes):
            length = [("content-length", str(len(body)))] if body or method not in ("GET", "HEAD", "OPTIONS") else []
            await self.head(method, path, [*headers, *length])
            await self.send(body)
        else:
            await self.head(method, path, [*headers, ("transfer-encoding", "chunked")])
            for piece in body:
                await self.chunk(piece)
                await asyncio.sleep(every)
            await self.last_chunk(trailers)
        return await asyncio.wait_for(self.answer(method), 20)

    async def answer(self, method: str = "POST") -> Answer:
        """The next answer on the connection; IncompleteReadError when it is cut short."""
        interim = []
        while True:
            status, fields = await self.answer_head()
            if status >= 200:
                break
            interim.append(status)
        headers = dict(fields)
        if method == "HEAD" or status in (204, 304):
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join([piece async for piece in self.chunks()])
        elif "content-length" in headers:
            body = await self._reader.readexactly(int(headers["content-length"]))
        else:
            body = await self._reader.read()
        return Answer(status, headers, body, fields, interim)

    async def answer_head(self) -> tuple[int, list[tuple[str, str]]]:
        """Status and header fields of the next answer; its body is left."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(":", 1) for line in head[1:] if line]
        return int(head[0].split()[1]), [(name.lower(), value.strip()) for name, value in pairs]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Chunks of a chunked body as they come."""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        while await self._reader.readuntil(b"\r\n") != b"\r\n":
            pass

    async def rest(self, until: bytes) -> bytes:
        """What comes up to and with `until`, as it is."""
        return await self._reader.readuntil(until)

    def abort(self) -> None:
        """Drop the connection without a word."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def send(
    port: int,
    body: bytes | Sequence[bytes] = b"",
    *,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    headers: Headers = (),
    trailers: Headers = (),
    every: float = 0.0,
) -> Answer:
    """One request on a connection of its own. A sequence as body is uploaded in chunks, `every` seconds apart."""
    client = await RawClient.connect(port)
    try:
        return await client.request(body, method=method, path=path, headers=headers, trailers=trailers, every=every)
    finally:
        await client.close()
