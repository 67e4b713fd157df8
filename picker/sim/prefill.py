"""Prompts that another engine computes: what the proxy beside a decode engine does with the prefill endpoint's name."""

from __future__ import annotations

from collections import Counter

import aiohttp
import msgspec
from aiohttp import web

HEADER = "x-prefiller-host-port"
_TIMEOUT = aiohttp.ClientTimeout(total=120)


class Prefillers:
    """Asks prefill engines. `counts` has what came of it: "ok", or "failed", after which the engine computes itself."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._session: aiohttp.ClientSession | None = None

    async def compute(self, request: web.Request, body: bytes) -> bool:
        """Have the prompt of a request computed where its header says; False when it says nothing, or that fails."""
        place = request.headers.get(HEADER)
        if not place:
            return False
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        fields = msgspec.json.decode(body, type=dict)
        fields |= {"max_tokens": 1, "stream": False}
        for name in ("stream_options", "max_completion_tokens", "max_output_tokens"):
            fields.pop(name, None)
        try:
            async with self._session.post(f"http://{place}{request.path}", json=fields) as answer:
                done = answer.status == 200
        except (aiohttp.ClientError, TimeoutError, ValueError):
            done = False
        self.counts["ok" if done else "failed"] += 1
        return done

    async def close(self, _: web.Application) -> None:
        if self._session is not None:
            await self._session.close()
