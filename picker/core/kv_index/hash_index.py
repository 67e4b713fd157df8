"""Who holds which block by a hash that stands alone, such as Kthena's: `(model, hash) -> bitmask of endpoint slots`.

Each slot has its blocks in the order of their store times, so that the oldest go first when it has too many and when
they are too old. Forgetting hides a slot at once; what it had is swept out later, in slices.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

MOST_MODELS = 1024
_HASH_BITS = 64


class HashIndex:
    """Blocks by slot. `most_blocks` is how many each slot may have over all models.

    `counts` has blocks by reason: `evicted`, `expired`, `cleared`, `before_start` (of the engine), `too_many_models`
    (not taken).
    """

    def __init__(self, most_blocks: int = 1 << 20) -> None:
        self.counts: Counter[str] = Counter()
        self._most = most_blocks
        self._models: dict[str, int] = {}
        self._masks: dict[int, int] = {}
        self._slots: dict[int, OrderedDict[int, float]] = {}
        self._hidden = 0
        self._sweeps: deque[tuple[int, Iterator[None]]] = deque()

    @property
    def blocks(self) -> int:
        """Blocks over all slots; one that two slots hold counts twice."""
        return sum(map(len, self._slots.values()))

    def blocks_of(self, slot: int) -> int:
        """Blocks of one slot."""
        return len(self._slots.get(slot, ()))

    def match(self, model: str, hashes: Sequence[int], candidates: int) -> list[tuple[int, int]]:
        """Group the candidates by how many leading blocks they have, most first.

        Returns `(blocks, mask of slots)` with at least one block; candidates in no pair have none.
        """
        number = self._models.get(model)
        if number is None:
            return []
        base, get = number << _HASH_BITS, self._masks.get
        return leading(candidates & ~self._hidden, (get(base | block, 0) for block in hashes))

    def store(self, slot: int, model: str, hashes: Iterable[int], stored_at: Iterable[float]) -> None:
        """Let a slot hold blocks, each with its store time; within one call and from call to call the oldest first.

        A slot that is being forgotten is forgotten first, however long that takes: see `is_hidden`.
        """
        self._finish(slot)
        number = self._models.get(model)
        if number is None:
            if len(self._models) >= MOST_MODELS:
                self.counts["too_many_models"] += sum(1 for _ in hashes)
                return
            number = self._models[model] = len(self._models)
        times = self._slots.setdefault(slot, OrderedDict())
        base, bit, masks = number << _HASH_BITS, 1 << slot, self._masks
        for block, time in zip(hashes, stored_at, strict=True):
            key = base | block
            if key in times:
                times.move_to_end(key)
            else:
                masks[key] = masks.get(key, 0) | bit
            times[key] = time
        while len(times) > self._most:
            self._hide(times.popitem(last=False)[0], bit)
            self.counts["evicted"] += 1

    def remove(self, slot: int, model: str, hashes: Iterable[int]) -> None:
        """Let a slot hold these blocks no more; those that it does not hold are no error."""
        self._finish(slot)
        times, number = self._slots.get(slot), self._models.get(model)
        if times is None or number is None:
            return
        base, bit = number << _HASH_BITS, 1 << slot
        for block in hashes:
            if times.pop(base | block, None) is not None:
                self._hide(base | block, bit)

    def clear(self, slot: int, model: str) -> None:
        """Let a slot hold no block of a model any more. The whole slot is hidden until that is swept."""
        number = self._models.get(model)
        times = self._slots.get(slot)
        if number is not None and times:
            self._finish(slot)
            cleared = self._dropping(times, lambda key, _: key >> _HASH_BITS == number, 1 << slot, "cleared")
            self._begin_sweep(slot, cleared)

    def forget(self, slot: int) -> None:
        """Let a slot hold nothing any more."""
        times = self._slots.pop(slot, None)
        if times:
            self._begin_sweep(slot, self._emptying(times, 1 << slot))

    def forget_older(self, slot: int, started_at: float) -> None:
        """Let a slot hold nothing any more that it stored at or before a time, in whatever order that came.

        The whole slot is hidden until that is swept.
        """
        times = self._slots.get(slot)
        if times:
            self._finish(slot)
            outdated = self._dropping(times, lambda _, time: time <= started_at, 1 << slot, "before_start")
            self._begin_sweep(slot, outdated)

    def expire(self, before: float, most: int) -> int:
        """Drop up to `most` blocks that were stored before a time; returns how many. Call again until 0."""
        dropped = 0
        for slot in [slot for slot in self._slots if not self.is_hidden(slot)]:
            times = self._slots[slot]
            while times and dropped < most and next(iter(times.values())) < before:
                self._hide(times.popitem(last=False)[0], 1 << slot)
                dropped += 1
        self.counts["expired"] += dropped
        return dropped

    def is_hidden(self, slot: int) -> bool:
        """Whether a slot is still being swept."""
        return bool(self._hidden >> slot & 1)

    def sweep(self, most: int) -> bool:
        """Sweep up to `most` blocks; returns whether any are left. 2000 take about a millisecond."""
        while self._sweeps and most > 0:
            slot, steps = self._sweeps[0]
            done = sum(1 for _ in islice(steps, most))
            if done < most:
                self._sweeps.popleft()
                self._show(slot)
            most -= done
        return bool(self._sweeps)

    def _begin_sweep(self, slot: int, steps: Iterator[None]) -> None:
        self._hidden |= 1 << slot
        self._sweeps.append((slot, steps))

    def _finish(self, slot: int) -> None:
        if not self.is_hidden(slot):
            return
        for other, steps in self._sweeps:
            if other == slot:
                for _ in steps:
                    pass
        self._sweeps = deque(entry for entry in self._sweeps if entry[0] != slot)
        self._show(slot)

    def _show(self, slot: int) -> None:
        if all(other != slot for other, _ in self._sweeps):
            self._hidden &= ~(1 << slot)

    def _emptying(self, times: OrderedDict[int, float], bit: int) -> Iterator[None]:
        while times:
            self._hide(times.popitem()[0], bit)
            yield

    def _dropping(
        self, times: OrderedDict[int, float], goes: Callable[[int, float], bool], bit: int, reason: str
    ) -> Iterator[None]:
        for _ in range(len(times)):  # once around: what stays keeps its order
            if not times:
                return
            key, time = times.popitem(last=False)
            if goes(key, time):
                self._hide(key, bit)
                self.counts[reason] += 1
            else:
                times[key] = time
            yield

    def _hide(self, key: int, bit: int) -> None:
        rest = self._masks[key] & ~bit
        if rest:
            self._masks[key] = rest
        else:
            del self._masks[key]


def leading(candidates: int, holders: Iterable[int]) -> list[tuple[int, int]]:
    """Group candidates by how many of the leading blocks they hold, given each block's holders, all bitmasks.

    Returns `(blocks, mask)` with at least one block, most first.
    """
    groups: list[tuple[int, int]] = []
    alive = candidates
    depth = 0
    for mask in holders:
        still = alive & mask
        if still != alive:
            if depth and alive ^ still:
                groups.append((depth, alive ^ still))
            alive = still
            if not still:
                break
        depth += 1
    if alive and depth:
        groups.append((depth, alive))
    groups.reverse()
    return groups
