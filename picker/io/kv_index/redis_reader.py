"""Asks Redis which endpoints own the blocks of a prompt, within a budget, and never waits for a Redis that is away."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

import hiredis
import structlog
from msgspec import Struct

from picker.core.block_index.index import TIER_WEIGHTS
from picker.core.kv_index.circuit import CircuitBreaker, CircuitState
from picker.core.kv_index.owners import Candidate, OwnedPrefix, block_key, owned_prefix
from picker.io.kv_index.backoff import Backoff
from picker.io.kv_index.redis_connection import RedisConnection, RedisSettings, RedisUnavailableError
from picker.io.kv_index.redis_stale import delete_stale_owners

logger = structlog.get_logger(__name__)

MOST_OWNERS = 8192
"""Owners of one block; a key with more is nobody's."""


class Lookup(StrEnum):
    """How a lookup ended; the label of a counter. Only OK gave an answer."""

    OK = "ok"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    CIRCUIT_OPEN = "circuit_open"
    REFUSED = "refused"
    """Redis answered with an error."""


class ReaderSettings(Struct, frozen=True):
    """How long to wait for Redis. Times in seconds."""

    budget: float = 0.05
    failures: int = 3
    """Failures in a row after which nothing is asked for `pause`, which doubles up to `most_pause`."""
    pause: float = 0.5
    most_pause: float = 10.0
    reconnect: float = 0.1
    most_reconnect: float = 5.0
    collect_every: float = 3600.0
    """How often ownerships are deleted that are older than `stale_after`, by every picker; 0: never."""
    stale_after: float = 86_400.0


class RedisReader:
    """The index of block ownership in Redis. `run` keeps it connected and free of what nobody keeps true any more.

    `outcomes` counts lookups by how they ended, `owners` ownerships that did not count by reason, `connects`
    connections, `collected` ownerships that were too old.
    """

    def __init__(
        self,
        redis: RedisSettings,
        settings: ReaderSettings = ReaderSettings(),  # noqa: B008 (frozen)
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(Lookup, 0))
        self.owners: Counter[str] = Counter()
        self.connects = 0
        self.collected = 0
        self.circuit = CircuitBreaker(settings.failures, settings.pause, settings.most_pause, jitter)
        self._redis = redis
        self._jitter = jitter
        self._settings = settings
        self._backoff = Backoff(settings.reconnect, settings.most_reconnect, jitter)
        self._connection: RedisConnection | None = None
        self._said = ""

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def run(self) -> None:
        """Stay connected until cancelled: connect again when the connection breaks, and probe an open circuit."""
        collecting = asyncio.create_task(self._collect(), name="redis stale owners")
        try:
            while True:
                try:
                    await self._stay_connected()
                except RedisUnavailableError as error:
                    if str(error) != self._said:
                        self._said = str(error)
                        logger.warning("Redis is not available; requests are routed without it", error=self._said)
                await asyncio.sleep(self._backoff.next())
        finally:
            collecting.cancel()
            self._disconnect()

    async def lookup(
        self,
        model: str,
        hashes: Sequence[int],
        candidates: Mapping[bytes, Candidate],
        tier_weights: Mapping[str, float] = TIER_WEIGHTS,
    ) -> OwnedPrefix | None:
        """Find who owns the blocks of a prompt from the first on; None when Redis gave no answer in time.

        `candidates` are by owner name, `pod.namespace`. Never raises but CancelledError.
        """
        outcome, replies = await self._ask([block_key(model, block) for block in hashes])
        self.outcomes[outcome] += 1
        if outcome is not Lookup.OK:
            return None
        return owned_prefix([self._owners(reply) for reply in replies], candidates, tier_weights, self.owners)

    async def _ask(self, keys: Sequence[str]) -> tuple[Lookup, list[object]]:
        now = asyncio.get_running_loop().time()
        if self.circuit.state(now) is not CircuitState.CLOSED:
            return Lookup.CIRCUIT_OPEN, []
        if self._connection is None:
            return Lookup.UNAVAILABLE, []
        try:
            async with asyncio.timeout(self._settings.budget):
                replies = await self._connection.ask([("HGETALL", key) for key in keys])
        except TimeoutError:
            self._failed()
            return Lookup.TIMEOUT, []
        except RedisUnavailableError:
            return Lookup.UNAVAILABLE, []
        if any(isinstance(reply, hiredis.ReplyError) and not _is_wrong_type(reply) for reply in replies):
            self._failed()
            return Lookup.REFUSED, []
        self.circuit.succeeded()
        return Lookup.OK, replies

    def _failed(self) -> None:
        """Count a failure. An open circuit also gives up the connection, since whatever is stuck in it stays stuck."""
        now = asyncio.get_running_loop().time()
        self.circuit.failed(now)
        if self.circuit.state(now) is not CircuitState.CLOSED:
            self._disconnect()

    def _owners(self, reply: object) -> Iterable[tuple[bytes, bytes]]:
        """Read one HGETALL: names and values in turn."""
        if not isinstance(reply, list) or len(reply) > 2 * MOST_OWNERS:
            self.owners["malformed"] += 1
            return ()
        return zip(reply[::2], reply[1::2], strict=False)

    async def _stay_connected(self) -> None:
        await asyncio.sleep(self.circuit.until_probe(asyncio.get_running_loop().time()))
        connection = await self._probed()
        self.circuit.succeeded()
        self.connects += 1
        self._connection = connection
        self._said = ""
        logger.info("Redis client initialized successfully", host=self._redis.host, port=self._redis.port)
        try:
            connected_at = asyncio.get_running_loop().time()
            await connection.closed.wait()
            if asyncio.get_running_loop().time() - connected_at > self._settings.most_reconnect:
                self._backoff.reset()
        finally:
            connection.close()
            if self._connection is connection:
                self._connection = None

    async def _probed(self) -> RedisConnection:
        """Open a connection on which Redis answers within the budget."""
        connection: RedisConnection | None = None
        try:
            connection = await RedisConnection.open(self._redis)
            async with asyncio.timeout(self._settings.budget):
                await connection.ask([("PING",)])
        except (RedisUnavailableError, TimeoutError) as error:
            if connection is not None:
                connection.close()
            now = asyncio.get_running_loop().time()
            if self.circuit.state(now) is CircuitState.HALF_OPEN:
                self.circuit.failed(now)
            reason = str(error) or f"no answer within {self._settings.budget} s"
            raise RedisUnavailableError(reason) from error
        return connection

    async def _collect(self) -> None:
        """Delete stale ownerships, on a connection of its own so that no lookup waits; pickers do it in turns."""
        while self._settings.collect_every > 0:
            await asyncio.sleep(self._settings.collect_every * (1 + self._jitter()) / 2)
            try:
                connection = await RedisConnection.open(self._redis)
            except RedisUnavailableError:
                continue
            try:
                self.collected += await delete_stale_owners(connection, age=self._settings.stale_after)
            except RedisUnavailableError as error:
                logger.warning("Stale ownerships could not be deleted", error=str(error))
            finally:
                connection.close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_wrong_type(reply: hiredis.ReplyError) -> bool:
    return str(reply).startswith("WRONGTYPE")
