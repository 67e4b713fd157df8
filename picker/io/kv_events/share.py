"""How all readers of events together share a loop, and its interpreter, with whatever else runs there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from picker.io.call_soon import call_soon

_LEAST: Final = 0.0005
_MOST: Final = 0.001
_REST: Final = 4.0
"""How much longer than a round took there is none."""
_LONGEST_REST: Final = 0.005
_AFTER: Final = 0.002
"""What a request still takes to be answered after a thread has worked for it, in seconds."""


class Precedence:
    """A request that goes before events whenever it needs the interpreter. Made by a `LoopShare`."""

    __slots__ = ("_loop", "_share")

    def __init__(self, share: LoopShare, loop: asyncio.AbstractEventLoop) -> None:
        self._share = share
        self._loop = loop

    def enter(self) -> None:
        """It needs the interpreter from now on. For any thread."""
        self._share.first.add(self)

    @contextmanager
    def away(self) -> Iterator[None]:
        """It does not meanwhile, which is a good time to read events. For any thread."""
        self._share.first.discard(self)
        if not self._share.first:
            call_soon(self._loop, self._share.lull)
        try:
            yield
        finally:
            self.enter()

    def end(self) -> None:
        """It is answered soon. For any thread."""
        call_soon(self._loop, self._loop.call_later, _AFTER, self._share.leave, self)


class LoopShare:
    """Lets readers take turns, in slices of at most a millisecond, and rest between rounds. One for each loop.

    A slice is no longer than all others held the loop since the last one, or half a millisecond, so that a request
    waits little when events pour in, and events are not left lying when requests do. What comes while all rest is read
    in a row, which costs much less than one by one. A rest is four times as long as the round before it and at most
    5 ms: events that come now and then are hardly delayed.

    What has precedence is waited for, at most `patience` seconds in a round, also within a slice. While a thread works for
    it without the interpreter, the loop has nothing else to do: a rest ends then if it was as long as its round.
    """

    def __init__(self, *, patience: float = 0.02) -> None:
        self.first: set[Precedence] = set()
        """What needs the interpreter. Threads change it, too: one operation at a time."""
        self._patience = patience
        self._turn = asyncio.Lock()
        self._until = 0.0
        self._ended = 0.0
        self._rested = 0.0
        self._spent = 0.0
        self._reading = 0
        self._patient_until = 0.0
        self._calm = asyncio.Event()
        self._rest_over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def precedence(self) -> Precedence:
        """Give precedence to a request of this loop; it is to be ended, whatever happens."""
        return Precedence(self, asyncio.get_running_loop())

    def leave(self, over: Precedence) -> None:
        """Something has precedence no more."""
        self.first.discard(over)
        if not self.first:
            self._calm.set()

    def lull(self) -> None:
        """What has precedence works without the interpreter, if nothing needs it meanwhile."""
        if self.first:
            return
        self._calm.set()
        if time.perf_counter() - self._ended >= self._spent:
            self._rested = time.perf_counter()
            self._rest_over.set()

    async def read(self, read_one: Callable[[], bool]) -> bool:
        """Call `read_one` until it returns False: there is nothing left. Returns whether there was anything."""
        if self._rested > time.perf_counter():
            await self._rest()
        if not self._reading:
            self._spent = 0.0
            self._patient_until = time.perf_counter() + self._patience
        self._reading += 1
        try:
            return await self._read(read_one)
        finally:
            self._reading -= 1

    async def _read(self, read_one: Callable[[], bool]) -> bool:
        clock, first = time.perf_counter, self.first
        left, some = True, False
        while left:
            async with self._turn:  # which is fair: whoever waits longest is next
                await self._give_way()
                began = clock()
                if began >= self._until:
                    await asyncio.sleep(0)
                    await self._give_way()
                    ended, began = began, clock()
                    self._until = began + min(max(began - ended, _LEAST), _MOST)
                patient = began < self._patient_until
                while (left := read_one()) and clock() < self._until and not (first and patient):
                    some = True
                some |= left
                now = clock()
                self._spent += now - began
        self._ended = now
        self._rested = now + min(_REST * self._spent, _LONGEST_REST)
        return some

    async def _rest(self) -> None:
        while (rest := self._rested - time.perf_counter()) > 0:
            if self._timer is None:  # one for all
                self._timer = asyncio.get_running_loop().call_later(rest, self._wake)
            self._rest_over.clear()
            await self._rest_over.wait()

    def _wake(self) -> None:
        self._timer = None
        self._rest_over.set()

    async def _give_way(self) -> None:
        if self.first and (patience := self._patient_until - time.perf_counter()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    while self.first:
                        self._calm.clear()
                        await self._calm.wait()
