"""Asks Redis which endpoints own the blocks of a prompt."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from picker.core.block_index.index import TIER_WEIGHTS
from picker.core.kv_index.owners import Candidate, OwnedPrefix, block_key, owned_prefix
from picker.io.keep import Failed, keep
from picker.io.kv_index.redis_client import ClientSettings, Lookup, RedisClient
from picker.io.kv_index.redis_connection import RedisConnection, RedisSettings, RedisUnavailableError
from picker.io.kv_index.redis_stale import delete_stale_owners

__all__ = ["MOST_OWNERS", "Lookup", "ReaderSettings", "RedisReader"]

logger = structlog.get_logger(__name__)

MOST_OWNERS = 8192
"""Owners of one block; a key with more is nobody's."""


class ReaderSettings(ClientSettings, frozen=True):
    """How long to wait for Redis, and when ownerships are too old. Times in seconds."""

    collect_every: float = 3600.0
    """How often ownerships are deleted that are older than `stale_after`, by every picker; it may take as long."""
    stale_after: float = 86_400.0


class RedisReader:
    """The index of block ownership in Redis. `run` keeps it connected and free of what nobody keeps true any more.

    `outcomes` counts lookups by how they ended, `owners` ownerships that did not count by reason, `collected`
    ownerships that were too old.
    """

    def __init__(
        self,
        redis: RedisSettings,
        settings: ReaderSettings = ReaderSettings(),  # noqa: B008 (frozen)
        *,
        jitter: Callable[[], float] = random.random,
        failed: Failed | None = None,
    ) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(Lookup, 0))
        self.owners: Counter[str] = Counter()
        self.collected = 0
        self.client = RedisClient(redis, settings, without="requests are routed without it", jitter=jitter)
        self._redis = redis
        self._failed = failed
        self._jitter = jitter
        self._settings = settings

    @property
    def connected(self) -> bool:
        return self.client.connected

    @property
    def connects(self) -> int:
        """How often a connection was opened."""
        return self.client.connects

    async def run(self) -> None:
        """Stay connected until cancelled."""
        collecting = asyncio.create_task(keep("redis_stale_owners", self._collect, failed=self._failed))
        try:
            await self.client.run()
        finally:
            collecting.cancel()

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
        commands = [("HGETALL", block_key(model, block)) for block in hashes]
        outcome, replies = await self.client.ask(commands, wrong_type=True)
        self.outcomes[outcome] += 1
        if outcome is not Lookup.OK:
            return None
        return owned_prefix([self._owners(reply) for reply in replies], candidates, tier_weights, self.owners)

    def _owners(self, reply: object) -> Iterable[tuple[bytes, bytes]]:
        """Read one HGETALL: names and values in turn."""
        if not isinstance(reply, list) or len(reply) > 2 * MOST_OWNERS:
            self.owners["malformed"] += 1
            return ()
        return zip(reply[::2], reply[1::2], strict=False)

    async def _collect(self) -> None:
        """Delete stale ownerships, on a connection of its own so that no lookup waits; pickers do it in turns."""
        while True:
            await asyncio.sleep(self._settings.collect_every * (1 + self._jitter()) / 2)
            try:
                connection = await RedisConnection.open(self._redis)
            except RedisUnavailableError:
                continue
            try:
                async with asyncio.timeout(self._settings.collect_every):
                    self.collected += await delete_stale_owners(connection, age=self._settings.stale_after)
            except (RedisUnavailableError, TimeoutError) as error:
                logger.warning("Stale ownerships could not be deleted", error=str(error) or "it took too long")
            finally:
                connection.close()
