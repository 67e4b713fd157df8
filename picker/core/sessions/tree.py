"""The tree of chains that something is claimed of: each node is a piece that no claim and no fork divides."""

from __future__ import annotations

from array import array
from math import inf

from picker.core.sessions.chain import Chain


class Cover:
    """The claims of one slot on what a node stands for, and when the last one was kept."""

    __slots__ = ("held", "kept", "used")

    def __init__(self) -> None:
        self.held = 0
        self.kept = 0
        self.used = -inf

    def copy(self) -> Cover:
        twin = Cover()
        twin.held, twin.kept, twin.used = self.held, self.kept, self.used
        return twin


class Node:
    """Positions of a chain after those of its parent. Claims end at the end of a node, or of one below it."""

    __slots__ = ("children", "covers", "hashes", "mask", "parent", "size", "sizes", "tips")

    def __init__(self, parent: Node | None, hashes: array[int], sizes: array[int]) -> None:
        self.parent = parent
        self.hashes = hashes
        self.sizes = sizes
        self.size = sum(sizes)
        self.children: dict[int, Node] = {}
        self.covers: dict[int, Cover] = {}
        self.mask = 0
        self.tips = 0

    def common(self, hashes: array[int], start: int) -> int:
        """How many of its positions stand in `hashes` from `start` on."""
        own = self.hashes
        low, high = 0, min(len(own), len(hashes) - start)
        if (own if high == len(own) else own[:high]) == hashes[start : start + high]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if own[low:middle] == hashes[start + low : start + middle]:
                low = middle
            else:
                high = middle
        return low

    def walk(self, hashes: array[int]) -> list[tuple[Node, int]]:
        """The nodes below that a chain goes through, and how many of their positions it has: all, but for the last."""
        path: list[tuple[Node, int]] = []
        node, depth, end = self, 0, len(hashes)
        while depth < end:
            child = node.children.get(hashes[depth])
            if child is None:
                break
            common = child.common(hashes, depth)
            path.append((child, common))
            if common < len(child.hashes):
                break
            node, depth = child, depth + common
        return path

    def upwards(self) -> list[Node]:
        """The node and those above it, without the root."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def chain(self) -> Chain:
        """The chain that ends here."""
        nodes = self.upwards()[::-1]
        hashes, sizes = array("Q"), array("I")
        for node in nodes:
            hashes += node.hashes
            sizes += node.sizes
        return Chain(hashes, sizes, sum(node.size for node in nodes))

    def place(self) -> None:
        """Take the place below the parent."""
        if self.parent is not None:
            self.parent.children[self.hashes[0]] = self

    def split(self, at: int) -> Node:
        """Divide the node; returns the new upper part. The node itself remains the end of what ended there."""
        upper = Node(self.parent, self.hashes[:at], self.sizes[:at])
        upper.covers = {slot: cover.copy() for slot, cover in self.covers.items()}
        upper.mask = self.mask
        upper.place()
        self.parent = upper
        self.hashes, self.sizes = self.hashes[at:], self.sizes[at:]
        self.size -= upper.size
        self.place()
        return upper

    def join(self) -> None:
        """Undo a split that nothing needs any more: the node becomes a part of its only child."""
        if self.parent is None or self.tips or len(self.children) != 1:
            return
        (lower,) = self.children.values()
        lower.parent = self.parent
        lower.hashes, lower.sizes = self.hashes + lower.hashes, self.sizes + lower.sizes
        lower.size += self.size
        lower.place()
