"""Keeps somebody connected to Redis: connects again when that fails, and says so once, not at every attempt."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

import structlog

from picker.io.kv_index.backoff import Backoff
from picker.io.kv_index.redis_connection import Away, RedisUnavailableError

logger = structlog.get_logger(__name__)

REMEDIES: Mapping[Away, str] = {
    Away.UNREACHABLE: "check host and port, that it runs, and that network policies let us through",
    Away.TIMEOUT: "look at the load of Redis and of its machine, and at the network between",
    Away.REFUSED: "check user, password, database and what the user may do; one that is full needs more memory",
    Away.BROKEN: "Redis's own log says why it ended the connection",
}


class Reconnecting:
    """Either connected or away. `failures` counts by reason.

    `away` and `back` are what the log says of either. Pauses in seconds: they double from `shortest` to `longest`, and
    begin again with the shortest after a connection that lasted longer than `longest`.
    """

    def __init__(
        self,
        *,
        away: str,
        back: str,
        shortest: float = 0.1,
        longest: float = 5.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.failures: Counter[str] = Counter(dict.fromkeys(Away, 0))
        self.connected = False
        self._away = away
        self._back = back
        self._longest = longest
        self._backoff = Backoff(shortest, longest, jitter)
        self._since = 0.0
        self._told: set[Away] = set()

    async def run(self, stay: Callable[[], Awaitable[NoReturn]]) -> NoReturn:
        """Do `stay` until cancelled; it connects, calls `is_back`, and ends by RedisUnavailableError only."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await stay()
            except RedisUnavailableError as error:
                pause = self.is_away(error, clock())
            await asyncio.sleep(pause)

    def is_back(self, now: float, **facts: object) -> None:
        """Note that it is connected; facts go into the log. Calling it again changes nothing."""
        if not self.connected:
            self.connected = True
            self._since = now
            self._told.clear()
            logger.info(self._back, **facts)

    def is_away(self, error: RedisUnavailableError, now: float) -> float:
        """Note a failure; returns how long to wait. Of one absence every reason is told once."""
        if self.connected and now - self._since > self._longest:
            self._backoff.reset()
        self.connected = False
        self.failures[error.reason] += 1
        if error.reason not in self._told:
            self._told.add(error.reason)
            logger.warning(self._away, error=str(error), remedy=REMEDIES[error.reason])
        return self._backoff.next()
