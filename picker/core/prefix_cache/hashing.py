"""Chained hashes of a prompt's byte blocks.

Two prompts share the hash of block n exactly when they are identical up to the end of block n and name the same
model. Form: `xxh64(decimal(previous) + block)`, starting from `xxh64(model)`, as in Kthena's router.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from struct import Struct

from xxhash import xxh64_intdigest

_HEAD_BYTES = 2048
"""Most prompts begin like others before them; the hashes of so many bytes are remembered."""


@lru_cache(maxsize=256)
def _splitter(block_size: int, blocks: int) -> Struct:
    return Struct(f"{block_size}s" * blocks)


def block_hashes(model: str, text: bytes, block_size: int, max_blocks: int) -> list[int]:
    """Hash the first `max_blocks` blocks of `text`, 64-bit, in order; the last block may be short."""
    whole = min(len(text) // block_size, max_blocks)
    blocks = _splitter(block_size, whole).unpack_from(text)
    if whole < max_blocks and (rest := text[whole * block_size :]):
        blocks = (*blocks, rest)
    known = _HEAD_BYTES // block_size
    if not 0 < known <= whole:
        return _chain(xxh64_intdigest(model.encode()), blocks)
    head = _head(model, text[: known * block_size], known, block_size)
    return head + _chain(head[-1], blocks[known:])


def _chain(previous: int, blocks: Iterable[bytes]) -> list[int]:
    return [previous := xxh64_intdigest(b"%d%b" % (previous, block)) for block in blocks]


@lru_cache(maxsize=1024)
def _head(model: str, text: bytes, blocks: int, block_size: int) -> list[int]:
    return _chain(xxh64_intdigest(model.encode()), _splitter(block_size, blocks).unpack(text))
