"""Deadlines of the streams of one connection."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush


class Deadlines:
    """A heap of (time, stream). Streams that end in time are not taken out but forgotten in bulk."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """The earliest deadline; its stream may have ended since."""
        return self._heap[0][0] if self._heap else None

    def add(self, when: float, stream_id: int, open_streams: Collection[int]) -> None:
        """Add a deadline; once most belong to streams that are no longer open, drop those."""
        heap = self._heap
        heappush(heap, (when, stream_id))
        if len(heap) > 2 * len(open_streams) + 64:
            heap[:] = [entry for entry in heap if entry[1] in open_streams]
            heapify(heap)

    def pop_due(self, now: float) -> Iterator[int]:
        """Take out the streams whose deadline is not after `now`."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            yield heappop(heap)[1]

    def clear(self) -> None:
        self._heap.clear()
