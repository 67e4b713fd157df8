"""How engines lay out their caches, and the longest usable prefix for all engines of one layout at once.

A layout is what the pools of an engine look like: block sizes, window groups, lower tiers. Lookups work on bitmasks
of lanes, so engines with the same layout cost hardly more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import lcm
from operator import and_

from msgspec import Struct

from picker.core.block_index.chains import Matches

GPU = "GPU"

_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})

LanesOf = Callable[[int, int], int]
"""`(key, 0)` -> lanes that hold the block: the `get` of a dict."""


class PoolShape(Struct, frozen=True, order=True):
    """One pool. `tail` is how many blocks before the end of a hit must be there; None means all from block 0."""

    group: int
    medium: str
    block_size: int
    tail: int | None = None


class Layout(Struct, frozen=True):
    """The groups on the GPU, and the pools in lower tiers from the fastest to the slowest."""

    groups: tuple[PoolShape, ...]
    tiers: tuple[PoolShape, ...]

    @property
    def single(self) -> PoolShape | None:
        """The only group, if there is just one and it needs the whole prefix."""
        return self.groups[0] if len(self.groups) == 1 and self.groups[0].tail is None else None


def tail_blocks(kind: str | None, window: int | None, block_size: int) -> int | None:
    """Return `PoolShape.tail` of a cache group.

    A window of w tokens needs the w - 1 tokens before the next one. Mamba keeps its state at the end of a hit, in one
    block. What other kinds need is not in the events; all need at least that block, and with it are as good as known.
    """
    if window is not None and window > 0:
        return -(-(window - 1) // block_size)
    return None if kind in _WHOLE_PREFIX else 1


def layout_of(shapes: Iterable[PoolShape], tier_weights: Mapping[str, float]) -> Layout:
    """Return the layout that these pools make; media without a weight do not count.

    Lower tiers count where the GPU has one group that needs the whole prefix, or nothing: how engines combine tiers
    with windows is not in the events, and too few is better than too many.
    """
    shapes = sorted(shapes)
    groups = tuple(shape for shape in shapes if shape.medium == GPU)
    lower = [shape for shape in shapes if shape.medium != GPU and shape.tail is None and tier_weights.get(shape.medium)]
    if len(groups) > 1 or (groups and groups[0].tail is not None) or len({shape.group for shape in lower}) > 1:
        lower = []
    return Layout(groups, tuple(sorted(lower, key=lambda shape: (-tier_weights[shape.medium], shape.medium))))


def advance(keys: Sequence[int], limit: int, starts: Matches, lanes_of: LanesOf) -> Matches:
    """Find how many of the first `limit` blocks each lane has, when it surely has those that `starts` says.

    Both are `(blocks, lanes)`, fewest first, no lane in two of them.
    """
    found: Matches = []
    alive = depth = 0
    nexts = [min(blocks, limit) for blocks, _ in starts[1:]]
    for (blocks, lanes), until in zip(starts, [*nexts, limit], strict=True):
        if not alive:
            depth = min(blocks, limit)
        alive |= lanes
        for key in keys[depth:until]:
            still = alive & lanes_of(key, 0)
            if still != alive:
                found.append((depth, alive ^ still))
                alive = still
                if not still:
                    break
            depth += 1
    if alive:
        found.append((depth, alive))
    return found


def hybrid(
    tokens: int, lanes: int, groups: Sequence[tuple[PoolShape, Sequence[int], LanesOf]]
) -> list[tuple[int, int]]:
    """Find the longest hit, in tokens, of at most `tokens`, that all groups of an engine allow.

    Returns `(tokens, lanes)`; lanes in no pair have none. A hit ends where blocks of all groups end.
    """
    step = lcm(*(shape.block_size for shape, _, _ in groups))
    longest = tokens // step
    reach: list[tuple[int, list[int]]] = []
    for shape, keys, lanes_of in sorted(groups, key=lambda group: group[0].tail is not None):
        stride = step // shape.block_size
        held = (lanes & lanes_of(key, 0) for key in keys[: longest * stride])
        if shape.tail is None:
            masks: list[int] = []
            alive = lanes
            for mask in held:
                alive &= mask
                if not alive:
                    break
                masks.append(alive)
            longest = len(masks) // stride
        else:
            masks = windows(list(held), shape.tail, lanes)
        reach.append((stride, masks))
    found: list[tuple[int, int]] = []
    for length in range(longest, 0, -1):
        hit = lanes
        for stride, masks in reach:
            hit &= masks[length * stride - 1]
        if hit:
            found.append((length * step, hit))
            lanes ^= hit
            if not lanes:
                break
    return found


def windows(masks: list[int], length: int, everyone: int) -> list[int]:
    """Return, for each position, the conjunction of the last `length` masks, or of all if there are fewer."""
    if not length:
        return [everyone] * len(masks)
    chunks = [masks[start : start + length] for start in range(0, len(masks), length)]
    before = [mask for chunk in chunks for mask in accumulate(chunk, and_)]
    after = [mask for chunk in chunks for mask in [*accumulate(reversed(chunk), and_)][::-1]]
    head = before[:length]
    return head + [after[end - length + 1] & before[end] for end in range(length, len(masks))]
