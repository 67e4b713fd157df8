"""How all readers of events together share a loop with whatever else runs on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_LEAST = 0.0005
_MOST = 0.001
_REST = 4.0
"""How much longer than a round took there is none."""
_LONGEST_REST = 0.005


class LoopShare:
    """Lets readers take turns, in slices of at most a millisecond, and rest between rounds. One for each loop.

    A slice is no longer than all others held the loop since the last one, or half a millisecond, so that a request
    waits little when events pour in, and events are not left lying when requests do. What comes while all rest is read
    in a row, which costs much less than one by one. A rest is four times as long as the round before it and at most
    5 ms: events that come now and then are hardly delayed. While something is urgent a round waits, at most
    `patience` seconds in all.
    """

    def __init__(self, *, patience: float = 0.02) -> None:
        self._patience = patience
        self._turn = asyncio.Lock()
        self._until = 0.0
        self._rested = 0.0
        self._spent = 0.0
        self._urgent = 0
        self._calm = asyncio.Event()
        self._calm.set()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Let readers rest meanwhile."""
        self._urgent += 1
        self._calm.clear()
        try:
            yield
        finally:
            self._urgent -= 1
            if not self._urgent:
                self._calm.set()

    async def read(self, read_one: Callable[[], bool]) -> bool:
        """Call `read_one` until it returns False: there is nothing left. Returns whether there was anything."""
        clock = time.perf_counter
        if (rest := self._rested - clock()) > 0:
            await asyncio.sleep(rest)
        if not self._turn.locked():
            self._spent = 0.0
        left, some = True, False
        while left:
            async with self._turn:  # which is fair: whoever waits longest is next
                if self._urgent:
                    await self._wait_for_calm()
                began = clock()
                if began >= self._until:
                    await asyncio.sleep(0)
                    ended, began = began, clock()
                    self._until = began + min(max(began - ended, _LEAST), _MOST)
                while (left := read_one()) and clock() < self._until:
                    some = True
                some |= left
                now = clock()
                self._spent += now - began
        self._rested = now + min(_REST * self._spent, _LONGEST_REST)
        return some

    async def _wait_for_calm(self) -> None:
        patience = self._rested + self._patience - time.perf_counter()
        if patience > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._calm.wait()
