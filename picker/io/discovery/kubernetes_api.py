"""Carry out what a `Watch` wants to know: GET a page, or GET a stream and read it line by line.

A silent stream is the failure that matters: the connection of a server that is gone looks like a quiet one. TCP keeps
asking the peer whether it is there, and a stream without a frame for `silence` seconds ends (a bookmark comes about
once a minute).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Self

import aiohttp
from aiohttp.typedefs import LooseHeaders
from msgspec import Struct

from picker import __version__
from picker.core.kubernetes.objects import MalformedError, Status, decode
from picker.core.kubernetes.watch import Failure, Get, Watch
from picker.io.discovery.kubernetes_access import Access, AccessError

MOST_PAGE_BYTES = 64 * 1024 * 1024
MOST_FRAME_BYTES = 8 * 1024 * 1024
"""An API server holds no object of more than some 2 MiB."""
_MOST_STATUS_BYTES = 64 * 1024
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))


class ApiSettings(Struct, frozen=True):
    """Times in seconds: of a request for a page or until a stream begins, and of a stream without any frame."""

    request: float = 30.0
    silence: float = 75.0


class _TooLargeError(Exception):
    pass


class KubernetesApi:
    """Connections to one API server. `access` gives its address and credentials, anew with each `open`."""

    def __init__(self, access: Access, settings: ApiSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._access = access
        self._settings = settings
        self._clock = clock
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=access.tls() or True, socket_factory=_socket, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={
                "accept": "application/json",
                "accept-encoding": "identity",
                "user-agent": f"picker/{__version__}",
            },
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def follow(self, watch: Watch[Any], path: str, changed: Callable[[], None]) -> None:
        """Keep a watch going until cancelled; `changed` is called when its copy changed."""
        while True:
            get = watch.ask(self._clock())
            await asyncio.sleep(get.pause)
            try:
                await self._get(watch, path, get, changed)
            except TimeoutError:
                self._failed(watch, Failure.UNREACHABLE, "does not answer")
            except _TooLargeError:
                self._failed(watch, Failure.TOO_LARGE, "answers more than can be")
            except AccessError as error:
                watch.failed(Failure.UNAUTHORIZED, str(error), self._clock())
            except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
                self._failed(watch, Failure.CUT, f"broke off: {error}")
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self._failed(watch, Failure.UNREACHABLE, f"cannot be reached: {error}")

    def _failed(self, watch: Watch[Any], failure: Failure, text: str) -> None:
        watch.failed(failure, f"the API server {self._access.server} {text}", self._clock())

    async def _get(self, watch: Watch[Any], path: str, get: Get, changed: Callable[[], None]) -> None:
        url = self._access.server + path
        headers: LooseHeaders = self._access.headers()
        name = self._access.server_name
        async with (
            asyncio.timeout(self._settings.request) as deadline,
            self._session.get(
                url, params=get.query, headers=headers, server_hostname=name, allow_redirects=False
            ) as response,
        ):
            if response.status != 200:
                status = _status(await _read(response, _MOST_STATUS_BYTES), response)
                watch.refused(response.status, status, _seconds(response), self._clock())
            elif not get.stream:
                if watch.page(await _read(response, MOST_PAGE_BYTES), self._clock()):
                    changed()
            else:
                deadline.reschedule(None)
                await self._stream(watch, response, changed)

    async def _stream(self, watch: Watch[Any], response: aiohttp.ClientResponse, changed: Callable[[], None]) -> None:
        loop, silence = asyncio.get_running_loop(), self._settings.silence
        try:
            async with asyncio.timeout(silence) as deadline:
                async for lines in _lines(response):
                    different, goes_on = False, True
                    for line in lines:
                        one, goes_on = watch.frame(line, self._clock())
                        different |= one
                        if not goes_on:
                            break
                    if different:
                        changed()
                    if not goes_on:
                        response.close()
                        return
                    if lines:
                        deadline.reschedule(loop.time() + silence)
        except TimeoutError:
            response.close()
            self._failed(watch, Failure.SILENT, f"sent nothing for {silence:g} seconds")
        else:
            watch.closed(self._clock())


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """The complete lines of each piece that comes. What comes after the last line break is of no use."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MOST_FRAME_BYTES:
            raise _TooLargeError
        yield [line for line in lines if line.strip()]


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most:
            raise _TooLargeError
        parts.append(part)
    return b"".join(parts)


def _status(body: bytes, response: aiohttp.ClientResponse) -> Status:
    with suppress(MalformedError):
        return decode(body, Status)
    return Status(reason=response.reason or "", message=body[:300].decode("utf-8", "replace"))


def _seconds(response: aiohttp.ClientResponse) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None


def _socket(info: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
