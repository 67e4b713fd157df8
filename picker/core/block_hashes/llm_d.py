"""llm-d's own keys: chained, by model or adapter, in two forms.

The chain starts from the hash of the operator's seed and the model's name. A block's key covers the key before it, its
tokens, the identifiers of multimodal items in it and, in block 0, the cache salt.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from xxhash import xxh64_intdigest

from picker.core.block_hashes.cbor import encode
from picker.core.block_hashes.context import HashContext, pack_blocks

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_UINT64 = (1 << 64) - 1


class Chain(NamedTuple):
    """Keys that each follow from the one before.

    `root` is what the first block follows, given seed and model. `following` is the key of a block after a key: its
    tokens are 32-bit integers, little endian, and it may have extra texts.
    """

    root: Callable[[str, str], int]
    following: Callable[[int, bytes | memoryview, Sequence[str]], int]

    def hash_blocks(self, tokens: Sequence[int], block_size: int, context: HashContext) -> list[int]:
        """See `BlockHasher`."""
        key = self.root(context.seed, context.lora_name or context.model)
        blocks = enumerate(pack_blocks(tokens, block_size, "little"))
        return [key := self.following(key, block, _extra(context, number)) for number, block in blocks]


def _cbor_fnv_root(seed: str, model: str) -> int:
    return fnv1a_64(encode((fnv1a_64(seed.encode()), None, model)))


def _cbor_fnv_following(key: int, block: bytes | memoryview, extra: Sequence[str]) -> int:
    """Hash with FNV-1a the canonical CBOR of [previous, tokens, extra]."""
    tokens = array("I", bytes(block))
    if sys.byteorder == "big":
        tokens.byteswap()
    return fnv1a_64(encode((key, tuple(tokens), [{"Hash": text} for text in extra] or None)))


def _xxh64_root(seed: str, model: str) -> int:
    return xxh64_intdigest(_word(xxh64_intdigest(seed.encode())) + _with_length(model))


def _xxh64_following(key: int, block: bytes | memoryview, extra: Sequence[str]) -> int:
    """Hash with XXH64 the previous key, the tokens, and each extra with its length, little endian."""
    return xxh64_intdigest(b"".join(chain((_word(key), block), map(_with_length, extra))))


CBOR_FNV = Chain(_cbor_fnv_root, _cbor_fnv_following)
XXH64 = Chain(_xxh64_root, _xxh64_following)


def fnv1a_64(data: bytes) -> int:
    """Hash bytes with 64-bit FNV-1a."""
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & _UINT64
    return value


def _extra(context: HashContext, number: int) -> list[str]:
    items = [identifier for identifier, _ in context.multimodal.get(number, ())]
    return [*items, context.cache_salt] if context.cache_salt and number == 0 else items


def _word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _with_length(text: str) -> bytes:
    data = text.encode()
    return _word(len(data)) + data
