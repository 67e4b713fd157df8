"""A paged prefix cache: a fixed pool of KV blocks, shared by prefix, evicted in least recently used order.

The rules are vLLM's, because the point is to hit exactly when a real engine hits:

* block 0 is the null block and never used, so `num_gpu_blocks - 1` are usable;
* a block's key covers its tokens and everything before them (LoRA adapter and cache salt included);
* at least one token of a prompt is always computed, so n tokens hit at most `(n - 1) // block_size` blocks;
* a block that nobody references keeps its key until it is handed out again, least recently freed first; the blocks of
  one request are freed last first, so that its tail goes before its head;
* blocks that never got a key (not full yet) are handed out before all others, since vLLM 0.24;
* equal blocks are not merged: a second computation of the same tokens is a second physical copy under the same key.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import xxhash

from picker.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

UINT32 = "I"
"""Array type of token ids: unsigned, 32 bits."""


@dataclass(frozen=True, slots=True)
class KeyedTokens:
    """Tokens and the keys of all their full blocks. Build it with `key_tokens`."""

    tokens: array[int]
    block_size: int
    keys: tuple[int, ...]
    lora_name: str | None
    cache_salt: str | None

    def extra_keys(self, block: int) -> tuple[str, ...] | None:
        """Return what block number `block` carries besides tokens, the way engines publish it."""
        lora = () if self.lora_name is None else (self.lora_name,)
        salt = () if self.cache_salt is None or block else (self.cache_salt,)
        return lora + salt or None


def key_tokens(
    tokens: Iterable[int], block_size: int, *, lora_name: str | None = None, cache_salt: str | None = None
) -> KeyedTokens:
    """Compute the chained 64-bit key of every full block of `tokens`.

    A block's key is the hash of its tokens seeded with the key before it; the first is seeded with the namespace.
    Raises OverflowError for a token id outside 0 .. 2**32-1.
    """
    tokens = array(UINT32, tokens)
    key = 0
    if lora_name is not None or cache_salt is not None:
        key = xxhash.xxh3_64_intdigest(repr((lora_name, cache_salt)).encode())
    view = memoryview(tokens).cast("B")
    width = block_size * tokens.itemsize
    digest = xxhash.xxh3_64_intdigest
    keys = []
    for start in range(0, len(view) - width + 1, width):
        key = digest(view[start : start + width], key)
        keys.append(key)
    return KeyedTokens(tokens, block_size, tuple(keys), lora_name, cache_salt)


class BlockCache:
    """The pool. Blocks are numbers; a request owns a list of them, its block table.

    `events` is called at once with every change of what can be hit, in the order in which it happens.
    """

    def __init__(self, num_gpu_blocks: int, block_size: int, events: Callable[[KvEvent], None] | None = None) -> None:
        if num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks is {num_gpu_blocks}: one is the null block, so give at least 2")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: give at least 1 token")
        self.block_size = block_size
        self.usable = num_gpu_blocks - 1
        self.evictions = 0
        self._events = events
        self._references = [0] * num_gpu_blocks
        self._key_of: list[int | None] = [None] * num_gpu_blocks
        self._copies: dict[int, tuple[int, ...]] = {}  # key -> its blocks, oldest copy first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_gpu_blocks))  # next to be reused first

    @property
    def free(self) -> int:
        """Blocks that nobody references; their content can still be hit."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks referenced by at least one request."""
        return self.usable - len(self._free)

    def copies(self) -> dict[int, int]:
        """Return how many physical copies each cached key has."""
        return {key: len(blocks) for key, blocks in self._copies.items()}

    def match(self, keys: Sequence[int], tokens: int) -> list[int]:
        """Return the blocks of the longest cached prefix of a prompt of `tokens` tokens with these block keys."""
        copies = self._copies
        hit = []
        for key in islice(keys, (tokens - 1) // self.block_size):
            blocks = copies.get(key)
            if blocks is None:
                break
            hit.append(blocks[0])
        return hit

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """Count those of `blocks` that are free now: to reference them also takes room."""
        references = self._references
        return sum(not references[block] for block in blocks)

    def reference(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, taking them off the free list."""
        references = self._references
        free = self._free
        for block in blocks:
            if not references[block]:
                del free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, least recently freed first, evicting what they held.

        Raises ValueError when fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._evict(block)
            self._references[block] = 1
        return taken

    def store(self, table: Sequence[int], content: KeyedTokens, first: int, last: int) -> None:
        """Make blocks `first` .. `last - 1` of a request readable: their content is being computed."""
        copies = self._copies
        for block, key in zip(table[first:last], content.keys[first:last], strict=True):
            self._key_of[block] = key
            copies[key] = (*copies.get(key, ()), block)
        if self._events is not None:
            size = self.block_size
            self._events(
                BlockStored(
                    block_hashes=content.keys[first:last],
                    parent_block_hash=content.keys[first - 1] if first else None,
                    token_ids=tuple(content.tokens[first * size : last * size]),
                    block_size=size,
                    lora_name=content.lora_name,
                    extra_keys=tuple(content.extra_keys(block) for block in range(first, last)),
                )
            )

    def release(self, table: Sequence[int]) -> None:
        """Drop a request's reference to its blocks: the last is reused first, and keyless ones before any other."""
        free = self._free
        keyless = []
        for block in reversed(table):
            self._references[block] -= 1
            if not self._references[block]:
                free[block] = None
                if self._key_of[block] is None:
                    keyless.append(block)
        for block in reversed(keyless):
            free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget everything that is cached. Does nothing and returns False while any block is referenced."""
        if self.used:
            return False
        for blocks in self._copies.values():
            for block in blocks:
                self._key_of[block] = None
        self._copies.clear()
        if self._events is not None:
            self._events(AllBlocksCleared())
        return True

    def _evict(self, block: int) -> None:
        key = self._key_of[block]
        if key is None:
            return
        self._key_of[block] = None
        self.evictions += 1
        rest = tuple(copy for copy in self._copies[key] if copy != block)
        if rest:
            self._copies[key] = rest
        else:
            del self._copies[key]
        if self._events is not None:
            self._events(BlockRemoved((key,)))
