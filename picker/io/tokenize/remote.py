"""Tokenizing by asking: an engine's `/tokenize`, a renderer, or a Tokenizer Service.

Connections are kept and reused. A target that fails is followed by the next within the deadline, and left alone for a
while when it fails repeatedly, or says that it does not offer this.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import count, islice
from types import TracebackType
from typing import Self

import aiohttp
import structlog
from msgspec import Struct

from picker.core.endpoints import Endpoint
from picker.core.tokens.prompt import EngineRequest, Served, UnsupportedRequestError
from picker.io.tokenize.breaker import Breaker
from picker.io.tokenize.requests import ReplyError, read_rendered, read_tokenized, render_body, tokenize_bodies
from picker.io.tokenize.step import Outcome, StepError, Tokens

logger = structlog.get_logger(__name__)

MAX_REPLY_BYTES = 32 * 1024 * 1024
MAX_ATTEMPTS = 3
"""Targets that one request asks, at most."""
DISABLED_SECONDS = 60.0
"""How long a target is left alone that says it does not offer this; it may be restarted with other flags."""

_HEADERS = {
    "content-type": "application/json",
    "accept": "application/json",
    "accept-encoding": "identity",
    "user-agent": "picker",
}
_REFUSED = frozenset({400, 413, 422})
_NOT_OFFERED = frozenset({401, 403, 404, 405, 501})


class Remotely(StrEnum):
    """Whom to ask; also the step's name."""

    ENGINE = "engine"
    RENDER = "render"
    SERVICE = "service"


class Target(Struct, frozen=True):
    """A server that tokenizes: `http://host:port`, and the base model's name there when it is another than usual."""

    url: str
    model: str = ""


def engine_targets(endpoints: Iterable[Endpoint], ports: Mapping[str, int]) -> list[Target]:
    """Return the endpoints whose engine tokenizes, at their own port or at that of `ports`, by engine."""
    targets = []
    for endpoint in endpoints:
        engine = endpoint.engine.lower()
        if engine in ("vllm", "sglang"):
            host, _, own = endpoint.address.rpartition(":")
            targets.append(Target(f"http://{host}:{ports.get(engine, own)}", endpoint.model))
    return targets


class _AttemptError(Exception):
    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class Remote:
    """A step that asks servers; use it as an asynchronous context manager. `targets()` are those that are ready now.

    `headers` go with every request, such as an `authorization`. `attempts` counts requests sent by how they ended.
    """

    def __init__(
        self,
        whom: Remotely,
        targets: Callable[[], Sequence[Target]],
        *,
        headers: Mapping[str, str] | None = None,
        connections: int = 32,
    ) -> None:
        self.name = whom.value
        self.attempts: Counter[str] = Counter()
        self._whom = whom
        self._targets = targets
        self._headers = _HEADERS | dict(headers or {})
        self._connections = connections
        self._breakers: dict[str, Breaker] = {}
        self._turn = count()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit_per_host=self._connections, limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def tokenize(self, request: EngineRequest, served: Served, seconds: float) -> list[Tokens]:
        """See `Step`. An adapter's prompt is tokenized under the base model's name, which every target knows."""
        deadline = time.monotonic() + seconds
        candidates = self._candidates(deadline - seconds)
        last = StepError(Outcome.DISABLED, "no target is ready, or all were given up for a while")
        for index, target in enumerate(candidates):
            now = time.monotonic()
            share = (deadline - now) / (len(candidates) - index)
            if share <= 0:
                raise StepError(Outcome.TIMEOUT, "no time is left")
            if not self._breaker(target).ready(now):
                continue
            try:
                return await self._ask(target, request, target.model or served.model, share)
            except _AttemptError as error:
                last = StepError(error.outcome, f"{target.url}: {error}")
                if error.outcome is Outcome.UNSUPPORTED:
                    break
        raise last

    def _candidates(self, now: float) -> list[Target]:
        """The targets to ask, in order: each request starts at the next one, and passes over those given up."""
        targets = self._targets()
        for url in self._breakers.keys() - {target.url for target in targets}:
            del self._breakers[url]
        start = next(self._turn) % max(len(targets), 1)
        ready = (target for target in (*targets[start:], *targets[:start]) if self._breaker(target).ready(now))
        return list(islice(ready, MAX_ATTEMPTS))

    def _breaker(self, target: Target) -> Breaker:
        return self._breakers.setdefault(target.url, Breaker())

    async def _ask(self, target: Target, request: EngineRequest, model: str, seconds: float) -> list[Tokens]:
        breaker = self._breaker(target)
        try:
            bodies = self._bodies(request, model)
        except UnsupportedRequestError as error:
            raise _AttemptError(Outcome.UNSUPPORTED, str(error)) from error
        breaker.begin(time.monotonic())
        try:
            async with asyncio.timeout(seconds):
                tokens = await self._send(target, request, bodies)
        except TimeoutError:
            failure = _AttemptError(Outcome.TIMEOUT, f"no answer within {seconds:.3f} s")
        except _AttemptError as error:
            failure = error
        except (aiohttp.ClientError, OSError, ReplyError, ValueError) as error:
            failure = _AttemptError(Outcome.ERROR, repr(error)[:200])
        else:
            breaker.succeeded()
            self.attempts[Outcome.OK] += 1
            return tokens
        self.attempts[failure.outcome] += 1
        now = time.monotonic()
        if failure.outcome is Outcome.DISABLED:
            breaker.give_up(now, DISABLED_SECONDS)
            logger.warning("tokenizing_not_offered", step=self.name, target=target.url, answer=str(failure))
        elif failure.outcome is not Outcome.UNSUPPORTED and breaker.failed(now):
            logger.warning("tokenizing_target_fails", step=self.name, target=target.url, error=str(failure))
        raise failure

    def _bodies(self, request: EngineRequest, model: str) -> list[bytes]:
        return [render_body(request, model)] if self._whom is Remotely.RENDER else tokenize_bodies(request, model)

    async def _send(self, target: Target, request: EngineRequest, bodies: list[bytes]) -> list[Tokens]:
        if self._whom is Remotely.RENDER:
            return read_rendered(await self._post(f"{target.url}/v1{request.api}/render", bodies[0]), request)
        posts = (self._post(f"{target.url}/tokenize", body) for body in bodies)
        tokens = []
        for reply in await asyncio.gather(*posts, return_exceptions=True):
            if isinstance(reply, BaseException):
                raise reply
            tokens.append(read_tokenized(reply))
        return tokens

    async def _post(self, url: str, body: bytes) -> bytes:
        assert self._session is not None  # noqa: S101  inside the context manager
        async with self._session.post(url, data=body, allow_redirects=False) as response:
            if response.status == 200:
                return await _read(response)
            text = (await response.content.read(1000)).decode("utf-8", "replace")
            raise _AttemptError(_outcome(response.status, text), f"status {response.status}: {text[:200]}")


def _outcome(status: int, text: str) -> Outcome:
    """What a status means. A model that is not found is this request's fault, a path that is not found the target's."""
    if status in _REFUSED or (status == 404 and '"error"' in text):
        return Outcome.UNSUPPORTED
    return Outcome.DISABLED if status in _NOT_OFFERED else Outcome.ERROR


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise ReplyError(f"the answer is longer than {MAX_REPLY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
