"""What a block's key may depend on beside its tokens, and how tokens are cut into blocks."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Literal

from msgspec import Struct


class HashContext(Struct, frozen=True):
    """Where a prompt belongs. Each protocol takes from it what its keys cover and leaves the rest.

    `seed` is the operator's: vLLM's PYTHONHASHSEED, llm-d's hashSeed; empty where none is set. `lora_path` is where
    the engine loaded the adapter from. `multimodal` gives, by block number, identifier and offset of the items that
    overlap the block; an offset counts from the block's first token and is negative for an item that began earlier.
    """

    model: str = ""
    lora_name: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    multimodal: Mapping[int, tuple[tuple[str, int], ...]] = {}
    seed: str = ""


BlockHasher = Callable[[Sequence[int], int, HashContext], list[int]]
"""Returns the 64-bit unsigned keys of a prompt's full blocks, in order, given its token ids, block size and context.

Empty where the keys depend on what cannot be known from outside.
Raises ValueError for a block size below 1, OverflowError for a token id outside 0 .. 2^32-1.
"""


def pack_blocks(tokens: Sequence[int], block_size: int, byteorder: Literal["big", "little"]) -> list[memoryview]:
    """Cut tokens into full blocks of 32-bit integers."""
    packed = array("I", tokens)
    if byteorder != sys.byteorder:
        packed.byteswap()
    view = memoryview(packed)
    return [view[start : start + block_size] for start in _starts(view, block_size)]


def token_blocks(tokens: Sequence[int], block_size: int) -> list[tuple[int, ...]]:
    """Cut tokens into full blocks."""
    checked = array("I", tokens)
    return [tuple(checked[start : start + block_size]) for start in _starts(checked, block_size)]


def _starts(tokens: Sized, block_size: int) -> range:
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1: take it from the engine's events")
    return range(0, len(tokens) - block_size + 1, block_size)
