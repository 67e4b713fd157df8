"""One data-parallel rank of one endpoint, over all lives of its cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from picker.core.block_index.cache import EngineCache
from picker.core.block_index.layout import Layout


class SourceStats(Struct, frozen=True):
    """What is known of a source. `evicted` blocks were too many; `dropped` is by reason."""

    slot: int
    rank: int
    model: str
    block_sizes: tuple[int, ...]
    blocks: int
    tombstones: int
    orphans: int
    evicted: int
    dropped: Mapping[str, int]
    incomplete_since: float | None
    heard_at: float


class Source:
    """A source of events. Its cache is another one after every restart and clear; counters go on."""

    __slots__ = ("cache", "dropped", "evicted", "heard_at", "incomplete_since", "layout", "model", "rank", "slot")

    def __init__(self, slot: int, rank: int, model: str, now: float) -> None:
        self.slot = slot
        self.rank = rank
        self.model = model
        self.heard_at = now
        self.incomplete_since: float | None = None
        self.evicted = 0
        self.dropped: Counter[str] = Counter()
        self.layout: Layout
        self.cache: EngineCache

    def stats(self) -> SourceStats:
        """Return counters and gauges."""
        cache = self.cache
        return SourceStats(
            slot=self.slot,
            rank=self.rank,
            model=self.model,
            block_sizes=tuple(sorted({shape.block_size for shape in cache.shapes.values()})),
            blocks=cache.blocks,
            tombstones=cache.tombstones,
            orphans=cache.orphans,
            evicted=self.evicted,
            dropped=dict(self.dropped),
            incomplete_since=self.incomplete_since,
            heard_at=self.heard_at,
        )
