"""Key chains of prompts, kept so that a conversation that grew by one turn costs only that turn.

A chain is found by a fingerprint of the prompt up to its last whole page; the rest is
compared with the tokens themselves. Fingerprints have 128 bits and cover every token, so that a chain is only ever
reused for the same prefix, and the keys are those that would have been computed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from xxhash import xxh3_128_intdigest

from picker.core.block_index.keys import TOKEN_BYTES, block_keys
from picker.core.shared_blocks import shared_blocks

_SEED_MASK = (1 << 64) - 1

Matches = list[tuple[int, int]]
"""`(blocks, lanes)`: how many leading blocks these lanes have; fewest first, no lane in two of them."""


class Chain:
    """The keys of all whole blocks of one prompt, and what earlier lookups found.

    `matches` has, by layout, the tick of the index's clock at the lookup, and its result.
    """

    __slots__ = ("_tail", "keys", "matches")

    def __init__(self, keys: array[int], tail: bytes) -> None:
        self.keys = keys
        self.matches: dict[object, tuple[int, Matches]] = {}
        self._tail = tail

    def shared(self, start: int, tail: memoryview, width: int) -> int:
        """Count the leading blocks common with a prompt that is equal up to block `start` and goes on with `tail`."""
        mine = self._tail
        other = bytes(tail[: len(mine)])
        most = len(other) // width
        return start + (most if other == mine else shared_blocks(mine, other, width, most))


class KeyChains:
    """The most recently used chains; `capacity` is the number of keys they may have together, 8 bytes each.

    Prompts shorter than a page, `page_tokens` rounded up to whole blocks, are not kept: they are computed in no time.
    """

    __slots__ = ("_capacity", "_chains", "_page_tokens", "keys")

    def __init__(self, capacity: int = 1 << 21, page_tokens: int = 4096) -> None:
        self._capacity = capacity
        self._page_tokens = page_tokens
        self._chains: OrderedDict[int, Chain] = OrderedDict()
        self.keys = 0
        """Keys in all chains."""

    def chain(self, root: int, data: memoryview, block_size: int, suffixes: dict[int, bytes]) -> Chain:
        """Return the chain of the whole blocks of packed tokens; it must not be changed.

        `root` and `suffixes` are those of `block_keys`.
        """
        width = block_size * TOKEN_BYTES
        blocks = len(data) // width
        page_blocks = -(-self._page_tokens // block_size)
        pages = blocks // page_blocks
        if not pages:
            return Chain(array("Q", block_keys(root, data, block_size, blocks, suffixes)), b"")
        page = page_blocks * width
        fingerprint = xxh3_128_intdigest(repr(sorted(suffixes.items())).encode(), root) if suffixes else root
        fingerprints = [
            fingerprint := xxh3_128_intdigest(data[start : start + page], fingerprint & _SEED_MASK)
            for start in range(0, pages * page, page)
        ]
        chains = self._chains
        known: Chain | None = None
        shared = 0
        for number in range(pages, 0, -1):
            known = chains.get(fingerprints[number - 1])
            if known is not None:
                chains.move_to_end(fingerprints[number - 1])
                shared = known.shared(number * page_blocks, data[number * page :], width)
                break
        if known is not None and shared == blocks == len(known.keys):
            return known
        keys = array("Q") if known is None else known.keys[:shared]
        parent = keys[-1] if shared else root
        rest = {number - shared: suffix for number, suffix in suffixes.items() if number >= shared}
        keys.extend(block_keys(parent, data[shared * width :], block_size, blocks - shared, rest))
        chain = Chain(keys, bytes(data[pages * page : blocks * width]))
        if known is not None:
            chain.matches = {
                layout: (tick, [(min(depth, shared), lanes) for depth, lanes in matches])
                for layout, (tick, matches) in known.matches.items()
            }
        self._keep(fingerprint, chain)
        return chain

    def _keep(self, fingerprint: int, chain: Chain) -> None:
        replaced = self._chains.pop(fingerprint, None)
        if replaced is not None:
            self.keys -= len(replaced.keys)
        self._chains[fingerprint] = chain
        self.keys += len(chain.keys)
        while self.keys > self._capacity:
            _, dropped = self._chains.popitem(last=False)
            self.keys -= len(dropped.keys)
