"""`POST /v1/cache/predict`: how many tokens of a request are cached where. Nothing reaches an engine's generation.

The answers are an oracle on what others have asked: cache salts keep tenants apart, and where it can be reached from
other machines a bearer token and a rate limit guard it.
"""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from picker.io.kvcache.oracle import Oracle, PredictionError

MAX_BODY_BYTES = 16 * 1024 * 1024


class PredictSettings(Struct, frozen=True):
    """Who may ask how often: `token` empty lets everybody, at most `per_second` requests, and as many at once.

    `loopback_only` lets only this machine in, where the listener is there for others too.
    """

    token: str = ""
    per_second: float = 100.0
    loopback_only: bool = False


class Gate:
    """Lets requests in. `counts` has them by outcome: `ok`, `failed`, `unauthorized`, `forbidden`, `rate_limited`."""

    def __init__(self, settings: PredictSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter({"ok": 0})
        self._clock = clock
        self._left = settings.per_second
        self._at = clock()

    def check(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that may not come in."""
        if self.settings.loopback_only and not _is_loopback(request.remote):
            self.counts["forbidden"] += 1
            return _error(403, "without a bearer token only this machine may ask")
        token = self.settings.token
        if token:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
                self.counts["unauthorized"] += 1
                return _error(401, "Authorization: send the bearer token", {"WWW-Authenticate": "Bearer"})
        now, rate = self._clock(), self.settings.per_second
        self._left = min(self._left + (now - self._at) * rate, max(rate, 1.0))
        self._at = now
        if self._left < 1.0:
            self.counts["rate_limited"] += 1
            return _error(429, f"more than {rate:g} requests a second", {"Retry-After": "1"})
        self._left -= 1.0
        return None


def prediction_app(oracle: Oracle, gate: Gate) -> web.Application:
    """Make the application to be mounted at `/v1/cache`; it has POST `/predict`."""

    async def predict(request: web.Request) -> web.Response:
        refused = gate.check(request)
        if refused is not None:
            return refused
        try:
            answer = await oracle.predict(await request.read(), request.query.get("hashes", ""))
        except PredictionError as error:
            gate.counts["failed"] += 1
            return _error(error.status, str(error))
        gate.counts["ok"] += 1
        return _json(answer)

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/predict", predict)
    return app


def create_predict_app(oracle: Oracle, gate: Gate, stats: Callable[[], Any]) -> web.Application:
    """Make the application of a listener of its own: predictions, `/stats` behind the same gate, and `/health`."""

    async def read_stats(request: web.Request) -> web.Response:
        return gate.check(request) or _json(stats())

    async def health(_: web.Request) -> web.Response:
        return _json({"status": "ok"})

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_subapp("/v1/cache", prediction_app(oracle, gate))
    app.router.add_get("/stats", read_stats)
    app.router.add_get("/health", health)
    return app


def _is_loopback(remote: str | None) -> bool:
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return _json({"error": {"message": text, "code": status}}, status, headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})}
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )
