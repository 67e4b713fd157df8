from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from picker.io.tokenize.remote import Target

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """A small server that answers everything with one handler, and remembers what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[tuple[str, Any]] = []
        self.connections = 0

    @property
    def target(self) -> Target:
        return Target(self.url)


Serve = Callable[[Handler], Awaitable[Server]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(handler: Handler) -> Server:
            server = Server("")
            peers = set()

            async def handle(request: web.Request) -> web.StreamResponse:
                assert request.transport is not None
                peers.add(request.transport.get_extra_info("peername"))
                server.connections = len(peers)
                server.asked.append((request.path, await request.json()))
                return await handler(request)

            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return server

        yield start


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    raise AssertionError
