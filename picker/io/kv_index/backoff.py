"""Pauses between attempts: they double, up to a longest, and are never quite the same for two processes."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """`next()` gives the next pause in seconds, `reset()` begins again with the shortest."""

    def __init__(self, shortest: float, longest: float, jitter: Callable[[], float] = random.random) -> None:
        self._shortest = shortest
        self._longest = longest
        self._jitter = jitter
        self._pause = shortest

    def next(self) -> float:
        pause = self._pause
        self._pause = min(2 * pause, self._longest)
        return pause * (1 + self._jitter()) / 2

    def reset(self) -> None:
        self._pause = self._shortest
