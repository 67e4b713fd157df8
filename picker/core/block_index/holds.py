"""Blocks that requests on their way will make an engine hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Hold(NamedTuple):
    """Blocks that one request makes visible in some lanes of a slot; give it back to `BlockIndex.release`.

    `cached` are the tokens of its prompt that the slot surely had before, and `complete` whether it cannot have more.
    """

    slot: int
    cached: int
    complete: bool
    block_size: int
    """0 where nothing is held."""
    parts: Sequence[tuple[int, dict[int, int], Sequence[int]]]
    """`(lane, the lane's counts, keys)`"""

    @property
    def missing(self) -> Sequence[int]:
        """Keys of the blocks that the slot lacks, in the order of the prompt."""
        return max((keys for _, _, keys in self.parts), key=len, default=())


class Holds:
    """Held blocks. `plane` is `key -> lanes`; holds of one block add up."""

    def __init__(self) -> None:
        self.plane: dict[int, int] = {}
        self._counts: dict[int, dict[int, int]] = {}

    def add(self, lane: int, keys: Sequence[int]) -> tuple[int, dict[int, int], Sequence[int]]:
        """Hold blocks in a lane."""
        counts = self._counts.setdefault(lane, {})
        plane, bit = self.plane, 1 << lane
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
            plane[key] = plane.get(key, 0) | bit
        return lane, counts, keys

    def release(self, hold: Hold) -> None:
        """Take a hold back, once. Nothing happens in lanes that were dropped in the meantime."""
        for lane, counts, keys in hold.parts:
            if self._counts.get(lane) is not counts:
                continue
            for key in keys:
                count = counts.pop(key)
                if count > 1:
                    counts[key] = count - 1
                else:
                    self._hide(key, 1 << lane)

    def drop(self, lane: int) -> Iterator[None]:
        """Forget all holds of a lane; its bits go as the result is iterated over."""
        return self._sweep(self._counts.pop(lane, {}), 1 << lane)

    def _sweep(self, counts: dict[int, int], bit: int) -> Iterator[None]:
        for key in counts:
            self._hide(key, bit)
            yield

    def _hide(self, key: int, bit: int) -> None:
        rest = self.plane[key] & ~bit
        if rest:
            self.plane[key] = rest
        else:
            del self.plane[key]
