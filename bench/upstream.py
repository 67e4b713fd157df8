"""Engines that answer at once: one process, many ports. Prints the ports as a JSON list and serves until it is ended."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import cast

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def _answer(content_type: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (content_type, len(body), body)


_COMPLETION = _answer(
    b"application/json",
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1790000000,"model":"meta-llama/'
    b'Llama-3.1-8B-Instruct","choices":[{"index":0,"message":{"role":"assistant","content":"The quick brown fox jumps '
    b'over the lazy dog."},"finish_reason":"stop"}],"usage":{"prompt_tokens":1024,"completion_tokens":12,'
    b'"total_tokens":1036,"prompt_tokens_details":{"cached_tokens":512}}}',
)
_METRICS = _answer(
    b"text/plain; version=0.0.4",
    b'vllm:num_requests_running{model_name="m"} 3.0\nvllm:num_requests_waiting{model_name="m"} 0.0\n'
    b'vllm:kv_cache_usage_perc{model_name="m"} 0.42\nprocess_start_time_seconds 1.79e+09\n',
)


class _Engine(asyncio.Protocol):
    """One connection; requests are not pipelined, which holds for Envoy and for the scraper."""

    def __init__(self) -> None:
        self._request = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        request = self._request = self._request + data if self._request else data
        end = request.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(request, 0, end + 2)
        if length is not None:
            complete = len(request) >= end + 4 + int(length[1])
        else:
            complete = request.startswith(b"GET ") or request.endswith(b"\r\n0\r\n\r\n")
        if complete and self._transport is not None:
            self._request = b""
            self._transport.write(_METRICS if request.startswith(b"GET /metrics") else _COMPLETION)


async def _serve(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Engine, "127.0.0.1", 0) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
