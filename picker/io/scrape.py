"""Scrape the engines' metrics: every endpoint by itself, so that a slow one delays no other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from picker.core.director import Director
from picker.core.endpoints import Endpoint
from picker.core.engine_page import PageReader
from picker.io.keep import Failed, log_failure

MAX_PAGE_BYTES = 8 * 1024 * 1024
"""A page that is longer is not an engine's; real ones have some hundred kilobytes."""


_NO_MODELS: dict[str, Any] = {"models": None}
_HEADERS = {"accept": "text/plain, application/json", "accept-encoding": "identity", "user-agent": "picker"}


class Outcome(StrEnum):
    """How a scrape ended; the label of a counter."""

    OK = "ok"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    BAD_STATUS = "bad_status"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    ERROR = "error"
    """Something went wrong here; the log has a traceback."""


class ScrapeSettings(Struct, frozen=True):
    """What scraping takes from the configuration. Times in seconds."""

    interval: float = 0.2
    timeout: float = 1.0
    path: str = "/metrics"
    models_interval: float | None = None
    """How often the served model names are asked for; None when no plugin needs them."""


class _ScrapeError(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class _Models(Struct):
    data: list[_Model]


class _Model(Struct):
    id: str
    parent: str | None = None


class Scraper:
    """Keeps the load in the endpoint table fresh, and forgets what a restarted engine held.

    `on_restart(endpoint)` is told after the director forgot, `failed` of unexpected errors that were survived, as
    `scrape`. `outcomes` counts scrapes by how they ended.
    """

    def __init__(
        self,
        director: Director,
        settings: ScrapeSettings,
        on_restart: Callable[[Endpoint], None],
        failed: Failed = log_failure,
    ) -> None:
        self.settings = settings
        self.outcomes: Counter[str] = Counter()
        self._director = director
        self._on_restart = on_restart
        self._failed = failed
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Scrape until cancelled. Endpoints come and go with the director's table."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False, headers=_HEADERS) as session:
            self._session = session
            try:
                while True:
                    self._follow_table()
                    self._director.table.expire(time.monotonic())
                    await asyncio.sleep(self.settings.interval)
            finally:
                for task in self._tasks.values():
                    task.cancel()
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)
                self._tasks.clear()

    def _follow_table(self) -> None:
        table = self._director.table
        wanted = {(int(slot), table.generation[slot]) for slot in table.slots}
        for key in self._tasks.keys() - wanted:
            self._tasks.pop(key).cancel()
        for key in wanted - self._tasks.keys():
            self._tasks[key] = asyncio.create_task(self._watch(*key))

    async def _watch(self, slot: int, generation: int) -> None:
        """Scrape what a slot holds for as long as that is the same endpoint."""
        table = self._director.table
        endpoint = table.endpoints[slot]
        reader = PageReader(endpoint.engine)
        models = _NO_MODELS
        models_at = -float("inf")
        while True:
            started = time.monotonic()
            outcome = Outcome.OK
            try:
                every = self.settings.models_interval
                if every is not None and started - models_at >= every:
                    models_at = started
                    models = _models(await self._get(endpoint, "/v1/models"))
                page = await self._get(endpoint, self.settings.path)
                if table.generation[slot] != generation:
                    return
                metrics, restarted = reader.read(page)
                if restarted:
                    self._director.restarted(slot)
                    self._on_restart(endpoint)
                table.observe(slot, msgspec.structs.replace(metrics, **models), time.monotonic())
            except _ScrapeError as error:
                outcome = error.outcome
            except Exception as error:  # noqa: BLE001  one bad moment must not leave an endpoint's load unknown for good
                outcome = Outcome.ERROR
                self._failed("scrape", error)
            self.outcomes[outcome] += 1
            await asyncio.sleep(max(self.settings.interval - (time.monotonic() - started), 0.01))

    async def _get(self, endpoint: Endpoint, path: str) -> bytes:
        assert self._session is not None  # noqa: S101  set for as long as tasks run
        try:
            async with (
                asyncio.timeout(self.settings.timeout),
                self._session.get(f"http://{endpoint.address}{path}", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise _ScrapeError(Outcome.BAD_STATUS)
                return await _read(response)
        except TimeoutError as error:
            raise _ScrapeError(Outcome.TIMEOUT) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _ScrapeError(Outcome.UNREACHABLE) from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_PAGE_BYTES:
            raise _ScrapeError(Outcome.TOO_LARGE)
        parts.append(part)
    return b"".join(parts)


def _models(body: bytes) -> dict[str, Any]:
    """The fields of `EngineMetrics` about models. An adapter names the model that it belongs to as its parent."""
    with suppress(msgspec.DecodeError, RecursionError):
        cards = msgspec.json.decode(body, type=_Models).data
        return {
            "models": frozenset(card.id for card in cards),
            "bases": tuple(card.id for card in cards if card.parent is None),
        }
    raise _ScrapeError(Outcome.MALFORMED)
