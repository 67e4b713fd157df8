"""Which endpoint slot holds how much of which session: a tree of chains with claims on them.

A *claim* says that a slot holds a chain up to its tip. It is *held* while its request is on its way and *kept* once that
succeeded; a lookup sees both. A kept claim that a later one of the same slot goes beyond is dropped, so a conversation
that grows has one claim, and one node. A node is a piece of a chain that no claim and no fork divides; it is split where
one comes and joined where the last one goes.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator
from enum import StrEnum
from math import inf

from picker.core.sessions.chain import Chain
from picker.core.sessions.tree import Cover, Node


class Evicted(StrEnum):
    """Why a kept claim went although its endpoint is there; the label of a counter."""

    CAPACITY = "capacity"
    """The engine's cache has no room for it beside what came later."""
    POSITIONS = "positions"
    """The index is full."""
    TIME = "time"
    """It was not used for so long."""
    USAGE = "usage"
    """The engine had to compute what was used later than it."""


class Claim:
    """That a slot holds a chain. Belongs to the index that made it.

    `known` are the bytes of the chain's beginning that the slot was known to hold before, by claims that were kept, and
    `known_used` is when the last of them was.
    """

    __slots__ = ("known", "known_used", "slot", "tip", "used")

    def __init__(self, slot: _Slot, tip: Node) -> None:
        self.slot = slot
        self.tip = tip
        self.used = -inf
        self.known = 0
        self.known_used = -inf


class _Slot:
    """The claims of one slot, and the bytes they cover."""

    __slots__ = ("bit", "capacity", "held", "kept", "number", "size")

    def __init__(self, number: int) -> None:
        self.number = number
        self.bit = 1 << number
        self.size = 0
        self.capacity: float | None = None
        self.held: set[Claim] = set()
        self.kept: OrderedDict[Node, Claim] = OrderedDict()
        """By tip, from the least to the most recent."""


class SessionIndex:
    """Chains by slot.

    `capacity` is how many bytes a slot may cover, unless it has a limit of its own; `max_positions` bounds all slots
    together, `seconds` how long a claim is kept without being used. Claims of requests on their way are never evicted.
    """

    def __init__(self, *, capacity: float, max_positions: int, seconds: float) -> None:
        self.capacity = capacity
        self.max_positions = max_positions
        self.seconds = seconds
        self.positions = 0
        """Positions of all chains that something is claimed of; those that several have in common count once."""
        self.evicted: Counter[Evicted] = Counter()
        self._root = Node(None, array("Q"), array("I"))
        self._slots: dict[int, _Slot] = {}
        self._recent: OrderedDict[Claim, None] = OrderedDict()
        self._now = -inf

    @property
    def kept(self) -> int:
        """Claims that are kept, over all slots."""
        return len(self._recent)

    @property
    def held(self) -> int:
        """Claims of requests on their way, over all slots."""
        return sum(len(slot.held) for slot in self._slots.values())

    def size(self, slot: int) -> int:
        """Bytes that the claims of a slot cover."""
        return self._slots[slot].size if slot in self._slots else 0

    def match(self, chain: Chain, candidates: int) -> list[tuple[int, int]]:
        """Group the candidates by the bytes of the chain's beginning that they hold, most first.

        Returns `(bytes, mask of slots)` pairs with at least one byte; candidates in no pair hold nothing.
        """
        groups: list[tuple[int, int]] = []
        alive, size = candidates, 0
        for node, common in self._root.walk(chain.hashes):
            still = alive & node.mask
            if still != alive:
                if size:
                    groups.append((size, alive ^ still))
                alive = still
                if not still:
                    break
            size += node.size if common == len(node.hashes) else sum(node.sizes[:common])
        if alive and size:
            groups.append((size, alive))
        groups.reverse()
        return groups

    def hold(self, slot: int, chain: Chain) -> Claim:
        """Claim a chain for a slot until the claim is kept or released."""
        owner = self._slots.get(slot)
        if owner is None:
            owner = self._slots[slot] = _Slot(slot)
        claim = Claim(owner, self._tip(chain))
        owner.held.add(claim)
        claim.tip.tips += 1
        for node in claim.tip.upwards():
            cover = self._cover(node, owner)
            cover.held += 1
            if cover.kept:
                claim.known += node.size
                if claim.known_used == -inf:
                    claim.known_used = cover.used
        return claim

    def holds(self, claim: Claim) -> bool:
        """Whether a claim is held still: its slot was not forgotten."""
        return claim in claim.slot.held

    def release(self, claim: Claim) -> None:
        """Take a held claim back. Nothing happens when its slot was forgotten in the meantime."""
        owner = claim.slot
        if claim in owner.held:
            owner.held.remove(claim)
            for node in claim.tip.upwards():
                node.covers[owner.number].held -= 1
            self._end(claim)

    def keep(self, claim: Claim, now: float) -> None:
        """Keep a held claim, dropping others if need be. Nothing happens when its slot was forgotten."""
        owner, tip = claim.slot, claim.tip
        if claim not in owner.held:
            return
        # Requests end in another order than they came in.
        self._now = now = max(now, self._now)
        owner.held.remove(claim)
        known = owner.kept.get(tip)
        above = tip.upwards()
        for node in above:
            cover = node.covers[owner.number]
            cover.held -= 1
            cover.kept += known is None
            cover.used = now
        if known is None:
            owner.kept[tip] = known = claim
        else:
            tip.tips -= 1
        known.used = now
        owner.kept.move_to_end(tip)
        self._recent[known] = None
        self._recent.move_to_end(known)
        for node in [node for node in above if node is not tip and node in owner.kept]:
            self._drop(owner.kept[node])
        self._shrink(owner)

    def limit(self, slot: int, capacity: float) -> None:
        """Give a slot a capacity of its own, in bytes, until it is forgotten. It shrinks with the next claim kept."""
        if slot in self._slots:
            self._slots[slot].capacity = capacity

    def lost(self, slot: int, used: float) -> None:
        """What a slot used at this time is not in its cache any more: nor is what it used before that only."""
        owner = self._slots.get(slot)
        while owner is not None and owner.kept:
            claim = next(iter(owner.kept.values()))
            if claim.used > used:
                break
            self._evict(claim, Evicted.USAGE)

    def expire(self, now: float) -> None:
        """Drop what was not used for `seconds`."""
        while self._recent:
            claim = next(iter(self._recent))
            if now - claim.used <= self.seconds:
                break
            self._evict(claim, Evicted.TIME)

    def forget(self, slot: int) -> None:
        """Drop everything of a slot, what is held too: its endpoint is gone or its engine restarted."""
        owner = self._slots.pop(slot, None)
        if owner is None:
            return
        for claim in list(owner.held):
            self.release(claim)
        for claim in list(owner.kept.values()):
            self._drop(claim)

    def export(self, slot: int) -> Iterator[Chain]:
        """The chains that a slot is known to hold, the least recent first. The index may change meanwhile."""
        owner = self._slots.get(slot)
        for tip, claim in list(owner.kept.items()) if owner is not None else ():
            if claim in self._recent:
                yield tip.chain()

    def resize(self, *, capacity: float, max_positions: int, seconds: float) -> None:
        """Change the bounds; what is too much goes at once, except for what is too old."""
        self.capacity, self.max_positions, self.seconds = capacity, max_positions, seconds
        for owner in self._slots.values():
            self._shrink(owner)

    def _tip(self, chain: Chain) -> Node:
        """The node that ends where the chain ends, made if need be."""
        tip, depth = self._root, 0
        for node, common in self._root.walk(chain.hashes):
            tip = node if common == len(node.hashes) else node.split(common)
            depth += common
        if depth < len(chain.hashes):
            tip = Node(tip, chain.hashes[depth:], chain.sizes[depth:])
            tip.place()
            self.positions += len(tip.hashes)
        return tip

    @staticmethod
    def _cover(node: Node, owner: _Slot) -> Cover:
        cover = node.covers.get(owner.number)
        if cover is None:
            cover = node.covers[owner.number] = Cover()
            node.mask |= owner.bit
            owner.size += node.size
        return cover

    def _drop(self, claim: Claim) -> None:
        """Take a kept claim back."""
        owner, tip = claim.slot, claim.tip
        del owner.kept[tip], self._recent[claim]
        for node in tip.upwards():
            node.covers[owner.number].kept -= 1
        self._end(claim)

    def _end(self, claim: Claim) -> None:
        """A claim is over: nodes that it alone needed go."""
        owner, tip = claim.slot, claim.tip
        tip.tips -= 1
        for node in tip.upwards():
            cover = node.covers[owner.number]
            if cover.held or cover.kept:
                continue
            del node.covers[owner.number]
            node.mask ^= owner.bit
            owner.size -= node.size
            if not node.mask:
                assert node.parent is not None  # noqa: S101  it is not the root
                del node.parent.children[node.hashes[0]]
                self.positions -= len(node.hashes)
                node.parent.join()
        if tip.mask:
            tip.join()

    def _evict(self, claim: Claim, why: Evicted) -> None:
        self.evicted[why] += 1
        self._drop(claim)

    def _shrink(self, owner: _Slot) -> None:
        capacity = self.capacity if owner.capacity is None else owner.capacity
        while owner.size > capacity and len(owner.kept) > 1:
            self._evict(next(iter(owner.kept.values())), Evicted.CAPACITY)
        while self.positions > self.max_positions and len(self._recent) > 1:
            self._evict(next(iter(self._recent)), Evicted.POSITIONS)
