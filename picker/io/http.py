"""The HTTP port: metrics, health and statistics for machines; configuration and decisions for people.

Nothing here shows a prompt, a query string or a secret. Names that clients chose leave as JSON, and the one page
there is puts them into text nodes only.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
import time
from collections.abc import Callable
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from picker import __version__
from picker.core.director import Director
from picker.io.admin import MAX_INPUT_BYTES, ExplainError, explain
from picker.io.telemetry import RECENT_DECISIONS, Hub, Record

_PAGE = files("picker.io").joinpath("debug_scores.html").read_text("utf-8")
_LIST_LENGTH = 50
_SECRET_NAME = re.compile(
    r"passw|secret|credential|private.?key|api.?key|authorization|(^|[a-z_-])token$", re.IGNORECASE
)
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


class _Explain(Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    body: str | None = None
    path: str = ""
    model: str = ""


def create_app(
    director: Director,
    hub: Hub,
    *,
    not_ready: Callable[[], str | None],
    config: Callable[[], Any],
    clock: Callable[[], float] = time.time,
) -> web.Application:
    """Make the application.

    `not_ready` says why the picker should get no traffic, or None when it should. `config` gives the effective
    configuration as plain values; what looks like a secret in it is hidden.
    """
    faces = _Faces(director, hub, not_ready, config, clock)
    # JSON escapes characters: a body may be longer in an Explain than it is.
    app = web.Application(client_max_size=2 * MAX_INPUT_BYTES)
    app.on_response_prepare.append(_harden)
    app.add_routes(
        [
            web.get("/metrics", faces.metrics),
            web.get("/health", faces.health),
            web.get("/stats", faces.stats),
            web.get("/debug/config", faces.config),
            web.get("/debug/scores", faces.page),
            web.get("/debug/scores.json", faces.scores),
            web.post("/debug/explain", faces.explain),
        ]
    )
    return app


class _Faces:
    def __init__(
        self,
        director: Director,
        hub: Hub,
        not_ready: Callable[[], str | None],
        config: Callable[[], Any],
        clock: Callable[[], float],
    ) -> None:
        self._director = director
        self._hub = hub
        self._not_ready = not_ready
        self._config = config
        self._clock = clock
        self._started = clock()

    async def metrics(self, _: web.Request) -> web.Response:
        self._hub.settle()
        pages = []
        for family in self._hub.metrics.registry.collect():
            pages.append(generate_latest(SimpleNamespace(collect=lambda family=family: [family])))
            # With hundreds of endpoints a page takes tens of milliseconds; requests go on in between.
            await asyncio.sleep(0)
        return web.Response(body=b"".join(pages), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def health(self, _: web.Request) -> web.Response:
        reason = self._not_ready()
        if reason is None:
            return _json({"status": "ok"})
        return _json({"status": "not ready", "reason": reason}, status=503)

    async def stats(self, _: web.Request) -> web.Response:
        return _json(self._stats())

    async def config(self, _: web.Request) -> web.Response:
        return _json(_without_secrets(msgspec.to_builtins(self._config())))

    async def page(self, _: web.Request) -> web.Response:
        return web.Response(text=_PAGE, content_type="text/html", headers={"Content-Security-Policy": _page_policy()})

    async def scores(self, request: web.Request) -> web.Response:
        """The recent decisions in short, newest first; or one of them in full, as `?decision=NUMBER`."""
        number = _integer(request, "decision", None)
        if number is not None:
            record = next((record for record in self._hub.recent if record.number == number), None)
            if record is None:
                return _json({"error": f"decision: {number} is none of the last {RECENT_DECISIONS}"}, status=404)
            return _json(record.view())
        limit = _integer(request, "limit", _LIST_LENGTH)
        newest = list(self._hub.recent)[::-1][:limit]
        return _json({**self._stats(), "decisions": [_summary(record) for record in newest]})

    async def explain(self, request: web.Request) -> web.Response:
        """Score a prompt or a body, given as JSON; the fields are those of `picker.v1.ExplainRequest`."""
        # A form of a foreign page cannot send this type without asking first.
        if request.content_type != "application/json":
            return _json({"error": "Content-Type: send application/json"}, status=415)
        try:
            asked = msgspec.json.decode(await request.read(), type=_Explain)
            body = None if asked.body is None else asked.body.encode()
            decision = await explain(self._director, prompt=asked.prompt, body=body, path=asked.path, model=asked.model)
        except (msgspec.DecodeError, ExplainError) as error:
            return _json({"error": str(error)}, status=400)
        return _json({"time": self._clock(), **decision.view()})

    def _stats(self) -> dict[str, Any]:
        director, table = self._director, self._director.table
        loads = ("waiting", "running", "kv_usage", "ttft", "tpot")
        indexes = list(self._hub.metrics.prefix_indexes())
        return {
            "version": __version__,
            "uptime_seconds": round(self._clock() - self._started, 3),
            "in_flight": director.in_flight,
            "prefix_cache": {
                "entries": sum(index.entries for index in indexes),
                "held": sum(index.held for index in indexes),
            },
            "endpoints": [
                {
                    "name": table.endpoints[slot].name,
                    "namespace": table.endpoints[slot].namespace,
                    "address": table.endpoints[slot].address,
                    "in_flight": int(table.in_flight[slot]),
                    **{load: _known(getattr(table, load)[slot]) for load in loads},
                }
                for slot in table.slots.tolist()
            ],
        }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _summary(record: Record) -> dict[str, Any]:
    decision = record.decision
    request = decision.request
    best: dict[str, Any] | None = None
    if decision.order:
        position = decision.order[0]
        endpoint = decision.endpoints[position]
        match = next((plugin.match for plugin in decision.plugins if plugin.match is not None), None)
        best = {
            "name": endpoint.name,
            "namespace": endpoint.namespace,
            "address": endpoint.address,
            "total": float(decision.totals[position]),
            "matched": int(match.matched[position]) if match else 0,
            "of": match.total if match else 0,
        }
    return {
        "number": record.number,
        "time": record.time,
        "request_id": request.request_id,
        "model": request.prompt.model,
        "path": request.path,
        "reason": str(decision.reason),
        "prompt_unused": str(request.prompt.unused or ""),
        "candidates": len(decision.endpoints),
        "microseconds": sum(decision.steps) / 1000,
        "destination": best,
    }


def _integer(request: web.Request, name: str, default: int | None) -> int | None:
    text = request.query.get(name)
    if text is None:
        return default
    # A decision's number may have any length; a list never is longer than what is kept.
    if re.fullmatch(r"[1-9][0-9]{0,17}", text) is None:
        message = msgspec.json.encode({"error": f"{name}: {text[:40]!r} is no positive whole number"})
        raise web.HTTPBadRequest(text=message.decode(), content_type="application/json")
    return int(text)


def _without_secrets(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item, name) for item in value]
    if isinstance(value, str):
        return "***" if value and _SECRET_NAME.search(name) else _SECRET_IN_URL.sub("***@", value)
    return value


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _page_policy() -> str:
    """Allow the page its own style and script, by their hashes, and to ask this server; nothing else."""

    def source(element: str) -> str:
        content = _PAGE.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
        return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


async def _harden(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["Cache-Control"] = "no-store"
