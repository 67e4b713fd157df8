"""The engine's own HTTP faces that a sidecar passes on: its metrics, under Kthena's names too, and its LoRA adapters."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from aiohttp import web

MAX_PAGE_BYTES = 16 << 20
PASSED_ON = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

KTHENA_NAMES: Mapping[str, tuple[str, ...]] = {
    "generation_tokens_total": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "num_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "time_per_output_token_seconds": (
        "vllm:time_per_output_token_seconds",
        "vllm:inter_token_latency_seconds",
        "sglang:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
    ),
    "e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
}
"""Kthena's name, without its prefix, and what engines call it; of several the first that is on the page counts."""


class EngineFace:
    """Asks the engine. `own_page` gives the sidecar's metrics, which follow the engine's. Times in seconds."""

    def __init__(self, base_url: str, metrics_path: str, timeout: float, own_page: Callable[[], bytes]) -> None:
        self._base_url = base_url.rstrip("/")
        self._metrics_url = f"{self._base_url}/{metrics_path.lstrip('/')}"
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._own_page = own_page
        self._session: aiohttp.ClientSession | None = None

    def add_to(self, app: web.Application) -> None:
        """Let an application show these faces."""
        app.cleanup_ctx.append(self._open_session)
        app.router.add_get("/metrics", self._metrics)
        for path in PASSED_ON:
            app.router.add_post(path, self._pass_on)

    async def _open_session(self, _: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=self._timeout, auto_decompress=False) as self._session:
            yield

    async def _metrics(self, _: web.Request) -> web.Response:
        status, page, _content_type = await self._ask("GET", self._metrics_url, b"", {"Accept": "text/plain"})
        if status != 200:
            raise web.HTTPBadGateway(text=f"the engine's metrics answer {status}")
        whole = b"".join([page, b"" if page.endswith(b"\n") else b"\n", renamed(page), self._own_page()])
        return web.Response(body=whole, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _pass_on(self, request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in ("Content-Type", "Authorization") if name in request.headers}
        status, body, content_type = await self._ask(
            "POST", self._base_url + request.path, await request.read(), headers
        )
        return web.Response(body=body, status=status, headers={"Content-Type": content_type})

    async def _ask(self, method: str, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, str]:
        assert self._session is not None  # noqa: S101  open for as long as requests come
        headers["Accept-Encoding"] = "identity"
        try:
            async with self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False
            ) as response:
                answer = bytearray()
                async for part in response.content.iter_any():
                    answer += part
                    if len(answer) > MAX_PAGE_BYTES:
                        raise web.HTTPBadGateway(text=f"the engine's answer has more than {MAX_PAGE_BYTES} bytes")
                content_type = response.headers.get("Content-Type", "application/octet-stream")
                return response.status, bytes(answer), content_type
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise web.HTTPBadGateway(text=f"the engine cannot be asked: {reason}") from error


def renamed(page: bytes) -> bytes:
    """Return copies of what Kthena looks for on an engine's page, under the names that Kthena has for it."""
    copies: list[bytes] = []
    for ours, theirs in KTHENA_NAMES.items():
        for name in theirs:
            lines = _lines_of(name).findall(page)
            if lines:
                copies.extend(line.replace(name.encode(), b"kthena:" + ours.encode(), 1) + b"\n" for line in lines)
                break
    return b"".join(copies)


def _lines_of(name: str) -> re.Pattern[bytes]:
    """Samples of a metric and what is said about it."""
    return re.compile(
        rb"^(?:# (?:HELP|TYPE) )?" + re.escape(name.encode()) + rb"(?:_bucket|_sum|_count|_created)?[ {][^\n]*",
        re.MULTILINE,
    )
