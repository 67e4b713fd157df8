"""The gate in front of the scheduler: requests that are turned away, and those that wait until there is room."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from picker.core.admission.saturation import flow_of, priority_of, saturation
from picker.core.admission.settings import AdmissionSettings
from picker.core.admission.waiting import Left, Waiter, WaitingLine
from picker.core.director import Director
from picker.core.exchange.effects import Decide

_LOOK_SECONDS = 0.01
"""How often a line that waits for metrics is looked at; ends of requests are noticed at once."""
_ADMITTED_AT_ONCE = 16
"""Of those that wait, between two looks: what they do to the pool has to show first."""


class Entry:
    """One request that waits; `left` is told once, unless it is cancelled."""

    __slots__ = ("_gate", "left", "since", "waiter")

    def __init__(self, gate: Gate, waiter: Waiter, since: float, left: Callable[[Left], None]) -> None:
        self._gate = gate
        self.waiter = waiter
        self.since = since
        self.left = left

    def cancel(self) -> None:
        """Nobody waits for it any more: its place is free at once."""
        self._gate.cancel(self)


def can_matter(settings: AdmissionSettings) -> bool:
    """Whether any request could be turned away or made to wait."""
    lowest = min((settings.default_priority, *settings.objectives.values()))
    return settings.queue.enabled or lowest < 0 or bool(settings.priority_header)


class Gate:
    """Admits requests while the pool has room. `counts` are those that were not simply let through, by what became of them."""

    def __init__(self, director: Director, settings: AdmissionSettings) -> None:
        self._director = director
        self._line = WaitingLine(settings.queue.max_requests, settings.queue.max_bytes)
        self._entries: OrderedDict[Waiter, Entry] = OrderedDict()
        """Of those that wait and nobody else, oldest first: an entry keeps the body of its request."""
        self._timer: asyncio.TimerHandle | None = None
        self._room_until = 0.0
        """Until then requests are admitted without another look."""
        self.counts: Counter[str] = Counter()
        self.waited_seconds = 0.0
        """In all, by requests that were admitted after a wait."""
        self.configure(settings)

    def configure(self, settings: AdmissionSettings) -> None:
        """Take other settings over. Who waits, waits on while there is a queue, and else is sent on, as those to come."""
        self.settings = settings
        self._line.max_requests = settings.queue.max_requests
        self._line.max_bytes = settings.queue.max_bytes
        if not settings.queue.enabled:
            self._look_later()

    def open(self) -> None:
        """Let nobody wait any more."""
        queue = msgspec.structs.replace(self.settings.queue, enabled=False)
        self.configure(msgspec.structs.replace(self.settings, queue=queue))

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def waiting_bytes(self) -> int:
        return self._line.size

    def saturation(self) -> float:
        """How full the emptiest endpoint is, of the fuller role if there are roles; 1 and more is saturated."""
        table, pools = self._director.table, self._director.pools
        return max(saturation(table, pool, self.settings) for pool in pools)

    def enter(self, asked: Decide, left: Callable[[Left], None]) -> Entry | Left:
        """Admit a request, turn it away, or let it wait until `left` is told what became of it."""
        settings = self.settings
        now = self._director.now()
        if not len(self._line):
            if now < self._room_until:
                return Left.ADMITTED
            if self.saturation() < 1:
                self._room_until = now + _LOOK_SECONDS
                return Left.ADMITTED
        priority = priority_of(asked.headers, settings)
        if priority < 0 and self.saturation() >= 1:
            self.counts["shed"] += 1
            return Left.DISPLACED
        if not settings.queue.enabled:
            return Left.ADMITTED
        deadline = now + settings.queue.max_seconds
        waiter = Waiter(priority, flow_of(asked.headers, settings), len(asked.body), deadline)
        joined, displaced = self._line.join(waiter)
        for one in displaced:
            self._tell(one, Left.DISPLACED)
        if not joined:
            self.counts["full"] += 1
            return Left.DISPLACED
        entry = Entry(self, waiter, now, left)
        self._entries[waiter] = entry
        self._look_later()
        return entry

    def room(self) -> None:
        """Something has ended or was measured: admit who can be."""
        if len(self._line):
            self._look()

    def cancel(self, entry: Entry) -> None:
        if self._line.leave(entry.waiter):
            del self._entries[entry.waiter]
            self.counts[Left.CANCELLED] += 1

    def _look_later(self) -> None:
        if self._timer is None and len(self._line):
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self._look()

    def _look(self) -> None:
        try:
            self._admit_and_expire(self._director.now())
        finally:
            self._look_later()

    def _admit_and_expire(self, now: float) -> None:
        for _ in range(_ADMITTED_AT_ONCE):
            if self.settings.queue.enabled and self.saturation() >= 1:
                break
            if (waiter := self._line.take()) is None:
                break
            self.waited_seconds += now - self._entries[waiter].since
            self._tell(waiter, Left.ADMITTED)
        # The settings may have changed meanwhile, so that a later one can have an earlier deadline: it goes a little later.
        while self._entries and (oldest := next(iter(self._entries))).deadline <= now:
            self._line.leave(oldest)
            self._tell(oldest, Left.EXPIRED)

    def _tell(self, waiter: Waiter, left: Left) -> None:
        entry = self._entries.pop(waiter)
        self.counts[left] += 1
        entry.left(left)
