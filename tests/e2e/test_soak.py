"""Many small requests: nothing piles up."""

from __future__ import annotations

import asyncio

import pytest

from picker.app.envoy import Template, bootstrap
from tests.support.bodies import chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

REQUESTS = 20_000
CONNECTIONS = 24
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
METRICS = b"HTTP/1.1 200 OK\r\ncontent-length: 28\r\n\r\nvllm:num_requests_waiting 0\n"


class QuickEngine(asyncio.Protocol):
    """Answers small requests with as little work as there can be."""

    def connection_made(self, transport):
        self.transport = transport
        self.data = b""

    def data_received(self, data):
        self.data += data
        if self.data.startswith(b"GET"):
            if self.data.endswith(b"\r\n\r\n"):
                self.data = b""
                self.transport.write(METRICS)
        elif self.data.endswith(b"}"):
            self.data = b""
            self.transport.write(ANSWER)


class QuickClient(asyncio.Protocol):
    """Sends the requests it is given one after the other."""

    def __init__(self, requests, done):
        self.requests, self.done, self.data = requests, done, b""

    def connection_made(self, transport):
        self.transport = transport
        transport.write(next(self.requests))

    def data_received(self, data):
        self.data += data
        if not self.data.endswith(b"\r\n\r\nok"):
            return
        if not self.data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(AssertionError(self.data))
        self.data = b""
        if (request := next(self.requests, None)) is None:
            self.transport.close()
            self.done.set_result(None)
        else:
            self.transport.write(request)

    def connection_lost(self, error):
        if not self.done.done():
            self.done.set_exception(error or EOFError())


def requests(count, seed):
    for number in range(count):
        body = chat(f"conversation {(seed + number * CONNECTIONS) % 500} " * 20 + f"turn {number}")
        yield b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def run(port, count):
    loop = asyncio.get_running_loop()
    dones = [loop.create_future() for _ in range(CONNECTIONS)]
    for seed, done in enumerate(dones):
        share = requests(count // CONNECTIONS, seed)
        await loop.create_connection(lambda share=share, done=done: QuickClient(share, done), "127.0.0.1", port)
    async with asyncio.timeout(120):
        await asyncio.gather(*dones)


async def test_memory_is_flat_and_everything_is_counted_out(start_picker, start_envoy_here):
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(QuickEngine, "127.0.0.1", 0) for _ in range(3)]
    addresses = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    # A small cache, so that it is full, and evicts, long before the first memory is read.
    scheduler = {"pluginConfig": [{"name": "prefix-cache", "args": {"maxHashCacheSize": 1000}}]}
    static = {"static": [{"address": address} for address in addresses]}
    picker = await start_picker({"endpoints": static, "scheduler": scheduler})
    envoy = await start_envoy_here(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))
    try:
        await run(envoy.port, REQUESTS // 2)
        middle = await picker.settled()
        await run(envoy.port, REQUESTS // 2)
        end = await picker.settled()
    finally:
        for server in servers:
            server.close()
    served = REQUESTS // 2 // CONNECTIONS * CONNECTIONS * 2
    assert end("learned_total", success="true") == served
    assert end("anomalies_total") == 0
    assert end("prefix_cache_entries") <= 3 * 1000
    assert end("prefix_cache_evictions_total") > 0
    assert end.memory / middle.memory < 1.02
