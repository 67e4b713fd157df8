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


class _Cover:
    """The claims of one slot on what a node stands for, and when the last one was kept."""

    __slots__ = ("held", "kept", "used")

    def __init__(self) -> None:
        self.held = 0
        self.kept = 0
        self.used = -inf

    def copy(self) -> _Cover:
        twin = _Cover()
        twin.held, twin.kept, twin.used = self.held, self.kept, self.used
        return twin


class _Node:
    """Positions of a chain after those of its parent. Claims end at the end of a node, or of one below it."""

    __slots__ = ("children", "covers", "hashes", "mask", "parent", "size", "sizes", "tips")

    def __init__(self, parent: _Node | None, hashes: array[int], sizes: array[int]) -> None:
        self.parent = parent
        self.hashes = hashes
        self.sizes = sizes
        self.size = sum(sizes)
        self.children: dict[int, _Node] = {}
        self.covers: dict[int, _Cover] = {}
        self.mask = 0
        self.tips = 0

    def common(self, hashes: array[int], start: int) -> int:
        """How many of its positions stand in `hashes` from `start` on."""
        own = self.hashes
        low, high = 0, min(len(own), len(hashes) - start)
        if own[:high] == hashes[start : start + high]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if own[low:middle] == hashes[start + low : start + middle]:
                low = middle
            else:
                high = middle
        return low


class Claim:
    """That a slot holds a chain. Belongs to the index that made it.

    `known` are the bytes of the chain's beginning that the slot was known to hold before, by claims that were kept, and
    `known_used` is when the last of them was.
    """

    __slots__ = ("known", "known_used", "slot", "tip", "used")

    def __init__(self, slot: _Slot, tip: _Node) -> None:
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
        self.kept: OrderedDict[_Node, Claim] = OrderedDict()
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
        self._root = _Node(None, array("Q"), array("I"))
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
        for node, common in self._walk(chain.hashes):
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
        for node in _upwards(claim.tip):
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
            for node in _upwards(claim.tip):
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
        for node in _upwards(tip):
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
        for node in [node for node in _upwards(tip) if node is not tip and node in owner.kept]:
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

    def resize(self, *, capacity: float, max_positions: int, seconds: float) -> None:
        """Change the bounds; what is too much goes at once, except for what is too old."""
        self.capacity, self.max_positions, self.seconds = capacity, max_positions, seconds
        for owner in self._slots.values():
            self._shrink(owner)

    def _walk(self, hashes: array[int]) -> Iterator[tuple[_Node, int]]:
        """The nodes that a chain goes through, and how many of their positions it has: all but for the last node."""
        node, depth, end = self._root, 0, len(hashes)
        while depth < end and (child := node.children.get(hashes[depth])) is not None:
            common = child.common(hashes, depth)
            yield child, common
            if common < len(child.hashes):
                return
            node, depth = child, depth + common

    def _tip(self, chain: Chain) -> _Node:
        """The node that ends where the chain ends, made if need be."""
        tip, depth = self._root, 0
        for node, common in self._walk(chain.hashes):
            tip = node if common == len(node.hashes) else self._split(node, common)
            depth += common
        if depth < len(chain.hashes):
            tip = _Node(tip, chain.hashes[depth:], chain.sizes[depth:])
            self._place(tip)
            self.positions += len(tip.hashes)
        return tip

    def _split(self, node: _Node, at: int) -> _Node:
        """Divide a node; returns the new upper part. The node itself remains the end of what ended there."""
        upper = _Node(node.parent, node.hashes[:at], node.sizes[:at])
        upper.covers = {slot: cover.copy() for slot, cover in node.covers.items()}
        upper.mask = node.mask
        self._place(upper)
        node.parent = upper
        node.hashes, node.sizes = node.hashes[at:], node.sizes[at:]
        node.size -= upper.size
        self._place(node)
        return upper

    def _join(self, node: _Node) -> None:
        """Undo a split that nothing needs any more."""
        if node is self._root or node.tips or len(node.children) != 1:
            return
        (lower,) = node.children.values()
        lower.parent = node.parent
        lower.hashes, lower.sizes = node.hashes + lower.hashes, node.sizes + lower.sizes
        lower.size += node.size
        self._place(lower)

    @staticmethod
    def _place(node: _Node) -> None:
        assert node.parent is not None  # noqa: S101  only the root has none
        node.parent.children[node.hashes[0]] = node

    @staticmethod
    def _cover(node: _Node, owner: _Slot) -> _Cover:
        cover = node.covers.get(owner.number)
        if cover is None:
            cover = node.covers[owner.number] = _Cover()
            node.mask |= owner.bit
            owner.size += node.size
        return cover

    def _drop(self, claim: Claim) -> None:
        """Take a kept claim back."""
        owner, tip = claim.slot, claim.tip
        del owner.kept[tip], self._recent[claim]
        for node in _upwards(tip):
            node.covers[owner.number].kept -= 1
        self._end(claim)

    def _end(self, claim: Claim) -> None:
        """A claim is over: nodes that it alone needed go."""
        owner, tip = claim.slot, claim.tip
        tip.tips -= 1
        for node in list(_upwards(tip)):
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
                self._join(node.parent)
        if tip.mask:
            self._join(tip)

    def _evict(self, claim: Claim, why: Evicted) -> None:
        self.evicted[why] += 1
        self._drop(claim)

    def _shrink(self, owner: _Slot) -> None:
        capacity = self.capacity if owner.capacity is None else owner.capacity
        while owner.size > capacity and len(owner.kept) > 1:
            self._evict(next(iter(owner.kept.values())), Evicted.CAPACITY)
        while self.positions > self.max_positions and len(self._recent) > 1:
            self._evict(next(iter(self._recent)), Evicted.POSITIONS)


def _upwards(tip: _Node) -> Iterator[_Node]:
    """A node and those above it, without the root."""
    node = tip
    while node.parent is not None:
        yield node
        node = node.parent
