"""Which endpoint slots were sent which blocks: `hash -> bitmask`, with an LRU list for each slot.

Entries are *recorded* (a request succeeded) or *held* (a request is on its way). A lookup sees both, so that a
burst with one new prefix sticks together; a held entry vanishes with its request, so that afterwards the index is
exactly what recorded requests made of it.

A prompt is recorded from its last block to its first. The first blocks are thus always fresher than those that
follow, an LRU list drops chains from their ends, and a chain never has a hole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Hold(NamedTuple):
    """Blocks that one request on its way makes visible for one slot; give it back to `PrefixIndex.release`."""

    slot: int
    hashes: Sequence[int]
    counts: dict[int, int]


class PrefixIndex:
    """Blocks by slot. `capacity` is the number of recorded blocks each slot may keep, over all models.

    `on_evict(model)` is called for every recorded block that a full list drops; removals are not evictions.
    """

    __slots__ = ("_capacity", "_held", "_masks", "_on_evict", "_recorded")

    def __init__(self, capacity: int, on_evict: Callable[[str], None]) -> None:
        self._capacity = capacity
        self._on_evict = on_evict
        self._masks: dict[int, int] = {}
        self._recorded: dict[int, OrderedDict[int, str]] = {}
        self._held: dict[int, dict[int, int]] = {}

    @property
    def entries(self) -> int:
        """Recorded blocks over all slots."""
        return sum(map(len, self._recorded.values()))

    @property
    def held(self) -> int:
        """Distinct held blocks over all slots."""
        return sum(map(len, self._held.values()))

    def match(self, hashes: Sequence[int], candidates: int) -> list[tuple[int, int]]:
        """Group the candidates by how many leading blocks they have, longest first.

        Returns `(blocks, mask of slots)` pairs with at least one block; candidates in no pair have none.
        """
        get = self._masks.get
        groups: list[tuple[int, int]] = []
        alive = candidates
        depth = 0
        for digest in hashes:
            still = alive & get(digest, 0)
            if still != alive:
                if depth:
                    groups.append((depth, alive ^ still))
                alive = still
                if not still:
                    break
            depth += 1
        if alive and depth:
            groups.append((depth, alive))
        groups.reverse()
        return groups

    def record(self, slot: int, model: str, hashes: Sequence[int]) -> None:
        """Remember that `slot` was sent these blocks, dropping its least recently recorded ones if need be."""
        recorded = self._recorded.get(slot)
        if recorded is None:
            recorded = self._recorded[slot] = OrderedDict()
        bit, masks, move = 1 << slot, self._masks, recorded.move_to_end
        for digest in reversed(hashes):
            if digest in recorded:
                move(digest)
                continue
            recorded[digest] = model
            masks[digest] = masks.get(digest, 0) | bit
            if len(recorded) > self._capacity:
                self._evict(slot, recorded)

    def hold(self, slot: int, hashes: Sequence[int]) -> Hold:
        """Make blocks visible for `slot` until the hold is released; holds add up."""
        counts = self._held.get(slot)
        if counts is None:
            counts = self._held[slot] = {}
        bit, masks, get, count = 1 << slot, self._masks, self._masks.get, counts.get
        for digest in hashes:
            counts[digest] = count(digest, 0) + 1
            mask = get(digest, 0)
            if not mask & bit:
                masks[digest] = mask | bit
        return Hold(slot, hashes, counts)

    def release(self, hold: Hold) -> None:
        """Take a hold back, once. Nothing happens when its slot was forgotten in the meantime."""
        slot, hashes, counts = hold
        if self._held.get(slot) is not counts:
            return
        recorded = self._recorded.get(slot, ())
        for digest in hashes:
            count = counts.pop(digest)
            if count > 1:
                counts[digest] = count - 1
            elif digest not in recorded:
                self._hide(slot, digest)

    def forget(self, slot: int) -> None:
        """Drop everything of a slot: its endpoint is gone or its engine restarted. Held blocks go, too."""
        for digest in {**self._recorded.pop(slot, {}), **self._held.pop(slot, {})}:
            self._hide(slot, digest)

    def resize(self, capacity: int) -> None:
        """Change the capacity; longer lists shrink at once, which counts as eviction."""
        self._capacity = capacity
        for slot, recorded in self._recorded.items():
            while len(recorded) > capacity:
                self._evict(slot, recorded)

    def _evict(self, slot: int, recorded: OrderedDict[int, str]) -> None:
        digest, model = recorded.popitem(last=False)
        if digest not in self._held.get(slot, ()):
            self._hide(slot, digest)
        self._on_evict(model)

    def _hide(self, slot: int, digest: int) -> None:
        rest = self._masks[digest] & ~(1 << slot)
        if rest:
            self._masks[digest] = rest
        else:
            del self._masks[digest]
