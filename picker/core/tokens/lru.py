"""A least-recently-used map that is bounded by the bytes it holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    """Values by key, at most `capacity` bytes of them by the sizes they came with. Not for several threads at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self.evictions = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[K, V]]:
        """Return all that is kept, what was used longest ago first."""
        return [(key, value) for key, (value, _) in self._entries.items()]

    def get(self, key: K) -> V | None:
        """Return the value and keep it longest, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value, dropping those used longest ago. One that is larger than a quarter of all is not kept."""
        if size * 4 > self.capacity:
            return
        old = self._entries.pop(key, None)
        self._entries[key] = (value, size)
        self.bytes += size - (old[1] if old else 0)
        while self.bytes > self.capacity:
            self.bytes -= self._entries.popitem(last=False)[1][1]
            self.evictions += 1
