"""Which endpoint slots were sent which blocks: a radix tree over chains of hashes.

Entries are *recorded* (a request succeeded) or *held* (a request is on its way). A lookup sees both, so that a
burst with one new prefix sticks together; a held entry vanishes with its request, so that afterwards the index is
exactly what recorded requests made of it.

A hash stands for its block and all before it. So blocks that came together are kept together, in one *run*, which is
found by its first hash and split where prompts part or a list ends; what a prompt costs depends on how many runs it
has, not on how many blocks.

Of one prompt, the first blocks always count as fresher than those that follow: a full list drops chains from their
ends, and a chain never has a hole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


class _Run:
    """Consecutive blocks of a chain, the slots that have them, and the holds on them."""

    __slots__ = ("hashes", "holds", "mask")

    def __init__(self, hashes: Sequence[int]) -> None:
        self.hashes = hashes
        self.mask = 0
        self.holds: set[Hold] = set()

    def common(self, hashes: Sequence[int], start: int) -> int:
        """How many of these blocks stand in `hashes` from `start` on. The first does."""
        own = self.hashes
        size = min(len(own), len(hashes) - start)
        if own[size - 1] == hashes[start + size - 1]:
            return size
        return bisect_left(range(size), True, key=lambda at: own[at] != hashes[start + at])


class _Place:
    """A recorded run in a slot's list of recency, between its neighbours."""

    __slots__ = ("model", "newer", "older", "run")

    run: _Run
    model: str
    older: _Place
    newer: _Place


class _Slot:
    """What one slot has: recorded runs, from the least to the most recent, and how often each run is held."""

    __slots__ = ("bit", "capacity", "ends", "held", "held_size", "places", "size")

    def __init__(self, slot: int) -> None:
        self.bit = 1 << slot
        self.capacity: int | None = None
        self.held_size = 0
        """Blocks that are held and not recorded."""
        self.places: dict[_Run, _Place] = {}
        self.held: dict[_Run, int] = {}
        self.size = 0
        self.ends = _Place()
        self.ends.older = self.ends.newer = self.ends

    def refresh(self, run: _Run, model: str) -> None:
        """Make a run the most recent."""
        place = self.places.get(run)
        if place is None:
            run.mask |= self.bit
            self.size += len(run.hashes)
            if run in self.held:
                self.held_size -= len(run.hashes)
        else:
            _unlink(place)
        self._place(run, model, self.ends)

    def split(self, run: _Run, rest: _Run) -> None:
        """The end of a run has become a run of its own."""
        place = self.places.get(run)
        if place is not None:
            self._place(rest, place.model, place)
        if run in self.held:
            self.held[rest] = self.held[run]

    def drop(self, run: _Run) -> str:
        """Drop a recorded run; returns its model."""
        place = self.places.pop(run)
        _unlink(place)
        self.size -= len(run.hashes)
        if run in self.held:
            self.held_size += len(run.hashes)
        return place.model

    def _place(self, run: _Run, model: str, newer: _Place) -> None:
        place = self.places[run] = _Place()
        place.run, place.model, place.newer, place.older = run, model, newer, newer.older
        newer.older.newer = newer.older = place


def _unlink(place: _Place) -> None:
    place.older.newer, place.newer.older = place.newer, place.older


class Hold:
    """Blocks that one request on its way makes visible for one slot; give it back to `PrefixIndex.release`."""

    __slots__ = ("owner", "runs")

    def __init__(self, owner: _Slot, runs: list[_Run]) -> None:
        self.owner = owner
        self.runs = runs


class PrefixIndex:
    """Blocks by slot. `capacity` is the number of recorded blocks each slot may keep, over all models.

    `on_evict(model, blocks)` is told the recorded blocks that a full list drops; removals are not evictions. Hashes
    have to be chained: two prompts that share one have all those before it in common, too.
    """

    __slots__ = ("_capacity", "_on_evict", "_runs", "_slots")

    def __init__(self, capacity: int, on_evict: Callable[[str, int], None]) -> None:
        self._capacity = capacity
        self._on_evict = on_evict
        self._runs: dict[int, _Run] = {}
        self._slots: dict[int, _Slot] = {}

    @property
    def entries(self) -> int:
        """Recorded blocks over all slots."""
        return sum(slot.size for slot in self._slots.values())

    @property
    def held(self) -> int:
        """Held blocks over all slots; one that several requests hold for a slot counts once."""
        return sum(len(run.hashes) for slot in self._slots.values() for run in slot.held)

    def match(self, hashes: Sequence[int], candidates: int) -> list[tuple[int, int]]:
        """Group the candidates by how many leading blocks they have, longest first.

        Returns `(blocks, mask of slots)` pairs with at least one block; candidates in no pair have none.
        """
        groups: list[tuple[int, int]] = []
        alive = candidates
        depth, end = 0, len(hashes)
        while depth < end and (run := self._runs.get(hashes[depth])) is not None:
            still = alive & run.mask
            if still != alive:
                if depth:
                    groups.append((depth, alive ^ still))
                alive = still
                if not still:
                    break
            common = run.common(hashes, depth)
            depth += common
            if common < len(run.hashes):
                break
        if alive and depth:
            groups.append((depth, alive))
        groups.reverse()
        return groups

    def record(self, slot: int, model: str, hashes: Sequence[int]) -> None:
        """Remember that `slot` was sent these blocks, dropping its least recently recorded ones if need be."""
        owner = self._owner(slot)
        for run in reversed(self._cover(hashes)):
            owner.refresh(run, model)
        self._shrink(owner)

    def hold(self, slot: int, hashes: Sequence[int]) -> Hold:
        """Make blocks visible for `slot` until the hold is released; holds add up."""
        owner = self._owner(slot)
        held = owner.held
        hold = Hold(owner, self._cover(hashes))
        for run in hold.runs:
            count = held[run] = held.get(run, 0) + 1
            if count == 1 and run not in owner.places:
                owner.held_size += len(run.hashes)
            run.mask |= owner.bit
            run.holds.add(hold)
        if owner.capacity is not None:
            self._make_room(owner, hold)
        return hold

    def keep(self, hold: Hold, model: str) -> None:
        """Record what a hold makes visible, for its slot, and release it. Nothing happens if that was forgotten."""
        owner = hold.owner
        if owner.held:
            for run in reversed(hold.runs):
                owner.refresh(run, model)
        self.release(hold)
        self._shrink(owner)

    def release(self, hold: Hold) -> None:
        """Take a hold back, once. Nothing happens when its slot was forgotten in the meantime."""
        owner = hold.owner
        held = owner.held
        for run in hold.runs:
            run.holds.discard(hold)
            count = held.pop(run, 0)
            if count > 1:
                held[run] = count - 1
            elif count and run not in owner.places:
                owner.held_size -= len(run.hashes)
                self._hide(run, owner)

    def forget(self, slot: int) -> None:
        """Drop everything of a slot: its endpoint is gone or its engine restarted. Held blocks go, too."""
        owner = self._slots.pop(slot, None)
        if owner is not None:
            for run in {**owner.places, **owner.held}:
                self._hide(run, owner)
            owner.held.clear()
            owner.held_size = 0

    def resize(self, capacity: int) -> None:
        """Change the capacity; longer lists shrink at once, which counts as eviction."""
        self._capacity = capacity
        for owner in self._slots.values():
            self._shrink(owner)

    def export(self, slot: int) -> list[tuple[str, Sequence[int]]]:
        """What is recorded for a slot, as models and runs of hashes, the least recent first.

        Recorded elsewhere in this order, it is what it is here: a run is found by its first hash, wherever it began.
        """
        owner = self._slots.get(slot)
        exported: list[tuple[str, Sequence[int]]] = []
        if owner is not None:
            place = owner.ends.newer
            while place is not owner.ends:
                exported.append((place.model, place.run.hashes))
                place = place.newer
        return exported

    def limit(self, slot: int, capacity: int) -> None:
        """Give one slot the capacity of its engine's cache, until it is forgotten.

        In that cache a request's blocks displace others when it begins, so that held blocks count here, too, and what a
        request uses is recent from then on. It shrinks with the next hold or record.
        """
        self._owner(slot).capacity = capacity

    def _owner(self, slot: int) -> _Slot:
        owner = self._slots.get(slot)
        if owner is None:
            owner = self._slots[slot] = _Slot(slot)
        return owner

    def _cover(self, hashes: Sequence[int]) -> list[_Run]:
        """The runs that these blocks are made of, split and added as need be."""
        runs = self._runs
        cover: list[_Run] = []
        depth, end = 0, len(hashes)
        while depth < end:
            run = runs.get(hashes[depth])
            if run is None:
                run = runs[hashes[depth]] = _Run(hashes[depth:])
            else:
                common = run.common(hashes, depth)
                if common < len(run.hashes):
                    self._split(run, common)
            cover.append(run)
            depth += len(run.hashes)
        return cover

    def _split(self, run: _Run, at: int) -> _Run:
        rest = _Run(run.hashes[at:])
        run.hashes = run.hashes[:at]
        self._runs[rest.hashes[0]] = rest
        rest.mask = run.mask
        rest.holds = run.holds.copy()
        for hold in rest.holds:
            hold.runs.insert(hold.runs.index(run) + 1, rest)
        mask = run.mask
        while mask:
            lowest = mask & -mask
            self._slots[lowest.bit_length() - 1].split(run, rest)
            mask ^= lowest
        return rest

    def _make_room(self, owner: _Slot, hold: Hold) -> None:
        for run in reversed(hold.runs):
            place = owner.places.get(run)
            if place is not None:
                owner.refresh(run, place.model)
        self._shrink(owner)

    def _shrink(self, owner: _Slot) -> None:
        capacity = self._capacity if owner.capacity is None else owner.capacity - owner.held_size
        while (excess := owner.size - capacity) > 0 and owner.places:
            run = owner.ends.newer.run
            if len(run.hashes) > excess:
                run = self._split(run, len(run.hashes) - excess)
            self._on_evict(owner.drop(run), len(run.hashes))
            if run not in owner.held:
                self._hide(run, owner)

    def _hide(self, run: _Run, owner: _Slot) -> None:
        run.mask &= ~owner.bit
        # Hashes that collide can have put another run in its place.
        if not run.mask and self._runs.get(run.hashes[0]) is run:
            del self._runs[run.hashes[0]]
