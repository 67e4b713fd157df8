"""A circuit breaker: after some failures in a row nothing is tried for a while, then one probe decides."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from math import inf


class CircuitState(StrEnum):
    """CLOSED: everything is tried. OPEN: nothing is. HALF_OPEN: a probe is due or under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after `failures` in a row for `pause` seconds, doubled up to `most_pause` while probes fail.

    `jitter()` gives 0..1; a pause is between half and all of its length. `now` is any monotonic time in seconds.
    """

    def __init__(self, failures: int, pause: float, most_pause: float, jitter: Callable[[], float]) -> None:
        self.opened = 0
        """How often it opened."""
        self._allowed = failures
        self._shortest = pause
        self._most_pause = most_pause
        self._jitter = jitter
        self._failures = 0
        self._pause = pause
        self._until = -inf

    def state(self, now: float) -> CircuitState:
        """Return what may be tried now."""
        if self._failures < self._allowed:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self._until else CircuitState.HALF_OPEN

    def succeeded(self) -> None:
        """Take in that a try went well."""
        self._failures = 0
        self._pause = self._shortest

    def failed(self, now: float) -> None:
        """Take in that a try, or a probe, failed."""
        was_open = self._failures >= self._allowed
        self._failures += 1
        if self._failures < self._allowed or (was_open and now < self._until):
            return
        self.opened += 1
        self._until = now + self._pause * (1 + self._jitter()) / 2
        self._pause = min(2 * self._pause, self._most_pause)

    def until_probe(self, now: float) -> float:
        """Return the seconds until a probe is due."""
        return max(self._until - now, 0.0)
