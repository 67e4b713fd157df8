"""Lanes: the bit numbers of engine caches, and whose they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice


class Lanes:
    """Gives lanes to slots and takes them back after their bits were swept out of all planes.

    A slot with one lane has that of its own number, unless that one is still being swept. So masks of lanes are masks
    of slots nearly always.
    """

    def __init__(self) -> None:
        self.own = 0
        """Lanes that are the only one of the slot with the same number."""
        self._taken = 0
        self._slots: dict[int, int] = {}  # lane -> slot
        self._others: dict[int, int] = {}  # slot -> its lanes, where these are not just its own
        self._swept: deque[tuple[int, Iterator[None]]] = deque()

    def take(self, slot: int) -> int:
        """Return a free lane for a slot."""
        lane = (~self._taken & (self._taken + 1)).bit_length() - 1 if self._taken >> slot & 1 else slot
        self._taken |= 1 << lane
        self._slots[lane] = slot
        return lane

    def assign(self, slot: int, lanes: int) -> None:
        """Say which lanes are a slot's from now on, none or several."""
        bit = 1 << slot
        self.own &= ~bit
        self._others.pop(slot, None)
        if lanes == bit:
            self.own |= bit
        elif lanes:
            self._others[slot] = lanes

    def retire(self, lane: int, steps: Iterator[None]) -> None:
        """Give a lane back once `steps`, which take its bits out of the planes, are done."""
        self._swept.append((lane, steps))

    def sweep(self, steps: int) -> bool:
        """Do so many steps; returns whether any are left."""
        while self._swept and steps > 0:
            lane, rest = self._swept[0]
            done = sum(1 for _ in islice(rest, steps))
            if done < steps:
                self._swept.popleft()
                self._taken &= ~(1 << lane)
            steps -= done
        return bool(self._swept)

    def of(self, slots: int) -> int:
        """Return all lanes of a mask of slots."""
        lanes = slots & self.own
        for slot, others in self._others.items():
            if slots >> slot & 1:
                lanes |= others
        return lanes

    def slots(self, lanes: int) -> Iterator[int]:
        """Yield the slot of each lane of a mask."""
        while lanes:
            lowest = lanes & -lanes
            yield self._slots[lowest.bit_length() - 1]
            lanes ^= lowest
