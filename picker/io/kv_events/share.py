"""How all readers of events together share a loop with whatever else runs on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_LEAST = 0.0005
_MOST = 0.005


class LoopShare:
    """Lets readers take turns: together they hold the loop no longer than all others did since, or half a millisecond.

    So a request waits little when events pour in, and events are not left lying when requests do. One for each loop.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._until = 0.0

    async def read(self, read_one: Callable[[], bool]) -> None:
        """Call `read_one` until it returns False: there is nothing left."""
        left = True
        while left:
            async with self._turn:  # which is fair: whoever waits longest is next
                if time.perf_counter() >= self._until:
                    ended = time.perf_counter()
                    await asyncio.sleep(0)
                    now = time.perf_counter()
                    self._until = now + min(max(now - ended, _LEAST), _MOST)
                while (left := read_one()) and time.perf_counter() < self._until:
                    pass
