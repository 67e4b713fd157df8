"""A model server that does what a test tells it and remembers every byte it was sent."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from aiohttp import web

from picker.core.headers import REQUEST_ID

PIECE = 64 * 1024


@lru_cache(64)
def answer_bytes(size: int) -> bytes:
    """The body of an answer of this size: without any pattern, always the same."""
    return random.Random(size).randbytes(size)


@dataclass
class Seen:
    """A request as it reached the engine. `complete` once its body has ended."""

    engine: Engine
    method: str
    target: str
    headers: list[tuple[str, str]]
    length: int = 0
    sha256: str = ""
    complete: bool = False

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def request_id(self) -> str:
        return self.all(REQUEST_ID)[0]


class Engine:
    """Answers requests as their query says: `bytes`, `chunks` (streamed in so many pieces), `every` seconds apart.

    `seen` has the requests by their `x-tag`. `waiting`, `running`, `started` and `first_tokens` are on its metrics
    page; `status` other than 200 makes it fail, `hangs` makes it read requests and say nothing.
    """

    def __init__(self) -> None:
        self.port = 0
        self.seen: dict[str, Seen] = {}
        self.requests = 0
        self.status = 200
        self.hangs = False
        self.waiting = 0
        self.running = 0
        self.started = 1000.0
        self.first_tokens = 5
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:(?s:.*)}", self._answer)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.05, handler_cancellation=True, auto_decompress=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [
            f"vllm:num_requests_waiting {self.waiting}",
            f"vllm:num_requests_running {self.running}",
            "vllm:kv_cache_usage_perc 0.1",
            f"vllm:time_to_first_token_seconds_sum {self.first_tokens * 0.1}",
            f"vllm:time_to_first_token_seconds_count {self.first_tokens}",
            f"process_start_time_seconds {self.started}",
        ]
        return web.Response(text="\n".join([*lines, ""]))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = [(name.decode().lower(), value.decode("latin-1")) for name, value in request.raw_headers]
        seen = Seen(self, request.method, request.raw_path, headers)
        self.seen[request.headers.get("x-tag", "")] = seen
        self.requests += 1
        digest = hashlib.sha256()
        async for data in request.content.iter_any():
            digest.update(data)
            seen.length += len(data)
        seen.sha256 = digest.hexdigest()
        seen.complete = True
        if self.hangs:
            await asyncio.Event().wait()
        if self.status != 200:
            return web.Response(status=self.status, text="this engine fails")
        query = request.query
        body = answer_bytes(int(query.get("bytes", "2")))
        headers_out = {"x-engine": self.address, "x-tag": request.headers.get("x-tag", "")}
        if encoding := query.get("encoding"):
            headers_out["content-encoding"] = encoding
        chunks = int(query.get("chunks", "0"))
        if not chunks:
            await asyncio.sleep(float(query.get("every", "0")))
            return web.Response(body=body, headers=headers_out)
        response = web.StreamResponse(headers={**headers_out, "content-type": "text/event-stream"})
        response.enable_chunked_encoding()
        size = max(1, -(-len(body) // chunks))
        with suppress(ConnectionError):  # the client left
            await response.prepare(request)
            for start in range(0, len(body), size):
                await response.write(body[start : start + size])
                await asyncio.sleep(float(query.get("every", "0")))
        return response
