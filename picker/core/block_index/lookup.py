"""Longest cached prefixes of a prompt in all lanes at once, each layout by its own rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from picker.core.block_index.chains import Chain, Matches
from picker.core.block_index.layout import LanesOf, Layout, PoolShape, advance, hybrid
from picker.core.block_index.prompt import Prompt

Planes = dict[int, int]


class Found(NamedTuple):
    """Lanes with a cached prefix of `tokens` tokens; `value` is the same with lower tiers weighted."""

    tokens: int
    value: float
    lanes: int


class Lookup:
    """Looks prompts up in planes that others fill.

    A long prompt that is asked for again, or grew, is only looked up from where it was known before in the lanes that
    lost no block since: `lost` must be told of all others.
    """

    def __init__(
        self, planes: Mapping[tuple[int, str], Planes], held: Planes, tier_weights: Mapping[str, float]
    ) -> None:
        self._planes = planes
        self._held = held
        self._tier_weights = tier_weights
        self._members: dict[Layout, int] = {}
        self._clock = 0
        self._losses: dict[int, int] = {}  # lane -> clock at its last loss, in this order

    def move(self, bit: int, before: Layout, after: Layout | None) -> None:
        """Say that a lane has another layout, or is gone."""
        rest = self._members.get(before, 0) & ~bit
        if rest:
            self._members[before] = rest
        else:
            self._members.pop(before, None)
        if after is not None:
            self._members[after] = self._members.get(after, 0) | bit

    def lost(self, lane: int) -> None:
        """Say that a lane lost blocks, or begins anew."""
        self._clock += 1
        self._losses.pop(lane, None)
        self._losses[lane] = self._clock

    def find(self, prompt: Prompt, lanes: int, *, held: bool) -> list[Found]:
        """Return cached prefixes of the lanes; those in no `Found` have none. `held` blocks count or not."""
        found: list[Found] = []
        if not prompt.reads_cache:
            return found
        for layout, members in self._members.items():
            if members & lanes:
                found += self._in_layout(prompt, layout, members, lanes & members, held=held)
        return found

    def _in_layout(self, prompt: Prompt, layout: Layout, members: int, lanes: int, *, held: bool) -> list[Found]:
        single = layout.single
        if single is not None:
            size = single.block_size
            matches = self._prefixes(prompt, layout, single, members)
            if held and self._held:
                keys, limit = prompt.chain(size).keys, prompt.usable(size)
                matches = advance(keys, limit, matches, self._lanes_of(single, held=True))
            hits = [(blocks * size, mask & lanes) for blocks, mask in matches]
        elif layout.groups:
            groups = [
                (shape, prompt.chain(shape.block_size).keys, self._lanes_of(shape, held=False))
                for shape in layout.groups
            ]
            hits = hybrid(max(prompt.tokens - 1, 0), lanes, groups)
        else:
            hits = [(0, lanes)]
        found = [Found(tokens, tokens, mask) for tokens, mask in hits if mask]
        for tier in layout.tiers:
            found = [longer for hit in found for longer in self._in_tier(prompt, tier, hit)]
        return [hit for hit in found if hit.tokens]

    def _in_tier(self, prompt: Prompt, tier: PoolShape, hit: Found) -> list[Found]:
        """Go on in a lower tier where a hit ends."""
        size, weight = tier.block_size, self._tier_weights[tier.medium]
        start = [(hit.tokens // size, hit.lanes)]
        lengths = advance(prompt.chain(size).keys, prompt.usable(size), start, self._lanes_of(tier, held=False))
        return [
            Found(tokens, hit.value + weight * (tokens - hit.tokens), lanes)
            for tokens, lanes in ((max(blocks * size, hit.tokens), lanes) for blocks, lanes in lengths)
        ]

    def _prefixes(self, prompt: Prompt, layout: Layout, shape: PoolShape, members: int) -> Matches:
        chain = prompt.chain(shape.block_size)
        starts = self._known(chain, layout, members)
        found = advance(
            memoryview(chain.keys), prompt.usable(shape.block_size), starts, self._lanes_of(shape, held=False)
        )
        chain.matches[layout] = (self._clock, found)
        return found

    def _known(self, chain: Chain, layout: Layout, members: int) -> Matches:
        clock, matches = chain.matches.get(layout, (0, []))
        usable = members
        for lane, lost in reversed(self._losses.items()):
            if lost <= clock:
                break
            usable &= ~(1 << lane)
        starts = [(blocks, mask & usable) for blocks, mask in matches if blocks and mask & usable]
        known = sum(mask for _, mask in starts)
        return [(0, members & ~known), *starts]

    def _lanes_of(self, shape: PoolShape, *, held: bool) -> LanesOf:
        plane = self._planes[shape.group, shape.medium]
        if not held:
            return plane.get
        speculative = self._held
        return lambda key, none: plane.get(key, none) | speculative.get(key, none)
