"""Chained hashes of a prompt's byte blocks.

Two prompts share the hash of block n exactly when they are identical up to the end of block n and name the same
model. Form: `xxh64(decimal(previous) + block)`, starting from `xxh64(model)`, as in Kthena's router.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct

from xxhash import xxh64_intdigest

from picker.core.shared_blocks import shared_blocks

_KEY_BYTES = 256
_MOST_KNOWN = 1024
_MOST_BYTES = 16 * 1024 * 1024
_LONGEST = 1024 * 1024


@lru_cache(maxsize=256)
def _splitter(block_size: int, blocks: int) -> Struct:
    return Struct(f"{block_size}s" * blocks)


class BlockHasher:
    """Hashes prompts, and remembers some: what a prompt shares with the last one that began alike is not hashed again.

    So a conversation that grows costs what is new of it. At most `_MOST_BYTES` of text are remembered.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, bytes], tuple[bytes, list[int]]] = {}
        self._bytes = 0

    @property
    def remembered(self) -> int:
        """Bytes of text that are kept."""
        return self._bytes

    def hashes(self, model: str, text: bytes, block_size: int, max_blocks: int) -> list[int]:
        """Hash the first `max_blocks` blocks of `text`, 64-bit, in order; the last block may be short."""
        whole = min(len(text) // block_size, max_blocks)
        key = (model, block_size, text[:_KEY_BYTES])
        known = self._known.pop(key, None)
        head: list[int] = []
        if known is not None:
            self._bytes -= len(known[0])
            head = known[1][: shared_blocks(text, known[0], block_size, min(whole, len(known[1])))]
        hashes = block_hashes(model, text, block_size, max_blocks, head)
        size = whole * block_size
        if size <= _LONGEST:
            self._known[key] = (text[:size], hashes)
            self._bytes += size
            while self._bytes > _MOST_BYTES or len(self._known) > _MOST_KNOWN:
                self._bytes -= len(self._known.pop(next(iter(self._known)))[0])
        return hashes


def block_hashes(model: str, text: bytes, block_size: int, max_blocks: int, head: Sequence[int] = ()) -> list[int]:
    """Hash the first `max_blocks` blocks of `text` as `BlockHasher` does; `head` are the hashes of the first that are known."""
    whole = min(len(text) // block_size, max_blocks)
    blocks = _splitter(block_size, whole).unpack_from(text)
    if whole < max_blocks and (rest := text[whole * block_size :]):
        blocks = (*blocks, rest)
    return [*head, *_chain(head[-1] if head else xxh64_intdigest(model.encode()), blocks[len(head) :])]


def _chain(previous: int, blocks: Iterable[bytes]) -> list[int]:
    return [previous := xxh64_intdigest(b"%d%b" % (previous, block)) for block in blocks]
