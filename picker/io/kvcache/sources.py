"""What the ways to learn what engines hold have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from picker.core.block_index.index import BlockIndex
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.kv_events.events import EventBatch


class Followed(NamedTuple):
    """An endpoint in a slot; another generation is another endpoint, or the same one that came back."""

    generation: int
    endpoint: Endpoint


def engine_start(table: EndpointTable, slot: int) -> float | None:
    """Return when a slot's engine started, in Unix seconds, by its metrics and its container; None: neither says."""
    starts = (table.started_at[slot], table.endpoints[slot].started_at)
    return max((start for start in starts if start is not None), default=None)


class Sources(Protocol):
    """Keeps the indexes at what the followed engines say. `events` and `dropped` count over all of them."""

    @property
    def events(self) -> Mapping[str, int]: ...

    @property
    def dropped(self) -> Mapping[str, int]: ...

    def follow(self, endpoints: Mapping[int, Followed]) -> None:
        """Make these the endpoints, by slot. Slots that mean another endpoint than before were forgotten already."""

    async def run(self) -> None:
        """Follow until cancelled; nothing is known of any endpoint before and after."""

    def tend(self) -> None:
        """Do what is to be done now and then, in less than a millisecond."""

    def is_connected(self, slot: int) -> bool:
        """Whether a slot's source can be heard now."""

    def is_complete(self, slot: int) -> bool:
        """Whether all that a slot holds was heard, as far as its source can tell."""

    def place(self, slot: int) -> str:
        """Where a slot's source is, for people."""

    def lag(self, slot: int) -> float | None:
        """Seconds from a slot's last event to its arrival, where events say when they happened."""

    def stats(self, slot: int) -> dict[str, Any]:
        """What a slot's source has seen, for people."""


class EngineFeed:
    """Applies one endpoint's events to the index, a `KvEventHandler`, until it is `closed`.

    `clock` is that of requests, in seconds.

    `batches` counts what came. Ranks count by where they were heard, whatever they call
    themselves: what is said of a restart has to mean the same rank.
    """

    def __init__(self, index: BlockIndex, slot: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slot = slot
        self.batches = 0
        self.closed = False
        self._index = index
        self._clock = clock

    def open(self, ranks: int) -> None:
        """Announce the ranks: until they say something, they hold nothing."""
        for rank in range(ranks):
            self._index.open(self.slot, "", self._clock(), rank=rank)

    def on_batch(self, batch: EventBatch, rank: int) -> None:
        if self.closed:
            return
        if batch.data_parallel_rank != rank:
            batch = replace(batch, data_parallel_rank=rank)
        self.batches += 1
        self._index.apply(self.slot, "", batch, self._clock())

    def on_restart(self, rank: int) -> None:
        if self.closed:
            return
        self._index.open(self.slot, "", self._clock(), rank=rank)
        self._index.restart(self.slot, rank)
        self._index.mark_complete(self.slot, rank)

    def on_incomplete(self, rank: int, since: int) -> None:  # noqa: ARG002
        if self.closed:
            return
        now = self._clock()
        self._index.open(self.slot, "", now, rank=rank)
        self._index.restart(self.slot, rank)
        self._index.mark_incomplete(self.slot, rank, now)
