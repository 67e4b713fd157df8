"""Requests that wait for their turn: higher priorities first, flows of one priority in turns, each flow in order.

Bounded in requests and bytes. Who comes when it is full takes the place of the latest request of the lowest priority, if
that is lower than its own. Everything but a displacement takes constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum


class Left(StrEnum):
    """Why a request no longer waits."""

    ADMITTED = "admitted"
    EXPIRED = "expired"
    DISPLACED = "displaced"
    CANCELLED = "cancelled"


class Waiter:
    """One request that waits, at most until `deadline`; `size` is that of its body."""

    __slots__ = ("deadline", "flow", "priority", "size")

    def __init__(self, priority: int, flow: str, size: int, deadline: float) -> None:
        self.priority = priority
        self.flow = flow
        self.size = size
        self.deadline = deadline


class _Band:
    """The waiters of one priority, by flow. The first flow is the one whose turn it is."""

    __slots__ = ("count", "flows", "size")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.flows: OrderedDict[str, OrderedDict[Waiter, None]] = OrderedDict()


class WaitingLine:
    """Waiters in the order of their turns. A waiter is in it from `join` until `leave` or `take` gives it back."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.size = 0
        """Bytes of all that wait."""
        self._count = 0
        self._bands: dict[int, _Band] = {}
        self._priorities: list[int] = []
        """Those with waiters, highest first."""

    def __len__(self) -> int:
        return self._count

    def join(self, waiter: Waiter) -> tuple[bool, list[Waiter]]:
        """Put a request in line; returns whether there was a place, and who lost theirs to it."""
        lower = [band for priority, band in self._bands.items() if priority < waiter.priority]
        staying = self._count - sum(band.count for band in lower)
        staying_bytes = self.size - sum(band.size for band in lower)
        if staying >= self.max_requests or staying_bytes + waiter.size > self.max_bytes:
            return False, []
        displaced: list[Waiter] = []
        while self._count >= self.max_requests or self.size + waiter.size > self.max_bytes:
            latest = self._latest(self._priorities[-1])
            self.leave(latest)
            displaced.append(latest)
        self._add(waiter)
        return True, displaced

    def take(self) -> Waiter | None:
        """The one whose turn it is, out of the line."""
        if not self._count:
            return None
        band = self._bands[self._priorities[0]]
        flow, waiters = next(iter(band.flows.items()))
        waiter = next(iter(waiters))
        band.flows.move_to_end(flow)
        self.leave(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> bool:
        """Take a request out of the line; False when it is not in it."""
        band = self._bands.get(waiter.priority)
        waiters = None if band is None else band.flows.get(waiter.flow)
        if band is None or waiters is None or waiter not in waiters:
            return False
        del waiters[waiter]
        self._count -= 1
        self.size -= waiter.size
        band.count -= 1
        band.size -= waiter.size
        if not waiters:
            del band.flows[waiter.flow]
            if not band.flows:
                del self._bands[waiter.priority]
                self._priorities.remove(waiter.priority)
        return True

    def _add(self, waiter: Waiter) -> None:
        band = self._bands.get(waiter.priority)
        if band is None:
            band = self._bands[waiter.priority] = _Band()
            self._priorities.append(waiter.priority)
            self._priorities.sort(reverse=True)
        band.flows.setdefault(waiter.flow, OrderedDict())[waiter] = None
        self._count += 1
        self.size += waiter.size
        band.count += 1
        band.size += waiter.size

    def _latest(self, priority: int) -> Waiter:
        """The last in line of the flow of this priority that has most waiters."""
        flows = self._bands[priority].flows
        longest = max(flows.values(), key=len)
        return next(reversed(longest))
