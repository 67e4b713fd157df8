"""SGLang's page hashes, since 0.5.6 (before, they are Python's own hashes of a page's tokens and not chained)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from picker.core.block_hashes.context import HashContext, pack_blocks


def sha256_chain(tokens: Sequence[int], block_size: int, context: HashContext) -> list[int]:
    """Hash each page: the first 64 bits of SHA-256 over the digest before it and its tokens, 32 bits, little endian.

    Events carry the same as signed integers. Empty for prompts with an adapter or a cache salt: since 0.5.23 theirs
    are hashed within a namespace that is not published, and before they were not told apart.
    """
    if context.lora_name or context.cache_salt:
        return []
    digest = b""
    keys = []
    for page in pack_blocks(tokens, block_size, "little"):
        digest = sha256(digest + page).digest()
        keys.append(int.from_bytes(digest[:8], "big"))
    return keys
