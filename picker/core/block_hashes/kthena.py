"""Kthena's standardized hash: every block on its own, by its tokens alone.

Keys of `matrix:kv:block:{model}@{key}` in Redis. They are not chained: equal tokens have equal keys wherever they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from picker.core.block_hashes.context import HashContext, pack_blocks

_INT63 = (1 << 63) - 1


def standardized(tokens: Sequence[int], block_size: int, _: HashContext) -> list[int]:
    """Hash each block: the first 63 of 64 bits of SHA-256 over its tokens, 32 bits each, big endian."""
    return [
        int.from_bytes(sha256(block).digest()[:8], "big") & _INT63 for block in pack_blocks(tokens, block_size, "big")
    ]
