"""llm-d's own keys: chained, by model or adapter, in two forms.

The chain starts from the hash of the operator's seed and the model's name. A block's key covers the key before it, its
tokens, the identifiers of multimodal items in it and, in block 0, the cache salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from xxhash import xxh64_intdigest

from picker.core.block_hashes.cbor import encode
from picker.core.block_hashes.context import HashContext, pack_blocks, token_blocks

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_UINT64 = (1 << 64) - 1


def cbor_fnv(tokens: Sequence[int], block_size: int, context: HashContext) -> list[int]:
    """Hash each block with FNV-1a over the canonical CBOR of [previous, tokens, extra]."""
    key = fnv1a_64(encode((fnv1a_64(context.seed.encode()), None, _model(context))))
    keys = []
    for number, block in enumerate(token_blocks(tokens, block_size)):
        extra = [{"Hash": text} for text in _extra(context, number)]
        keys.append(key := fnv1a_64(encode((key, block, extra or None))))
    return keys


def xxh64(tokens: Sequence[int], block_size: int, context: HashContext) -> list[int]:
    """Hash each block with XXH64 over the previous key, the tokens, and each extra with its length, little endian."""
    key = xxh64_intdigest(_word(xxh64_intdigest(context.seed.encode())) + _with_length(_model(context)))
    keys = []
    for number, block in enumerate(pack_blocks(tokens, block_size, "little")):
        extra = map(_with_length, _extra(context, number))
        keys.append(key := xxh64_intdigest(b"".join(chain((_word(key), block), extra))))
    return keys


def fnv1a_64(data: bytes) -> int:
    """Hash bytes with 64-bit FNV-1a."""
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & _UINT64
    return value


def _model(context: HashContext) -> str:
    return context.lora_name or context.model


def _extra(context: HashContext, number: int) -> list[str]:
    items = [identifier for identifier, _ in context.multimodal.get(number, ())]
    return [*items, context.cache_salt] if context.cache_salt and number == 0 else items


def _word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _with_length(text: str) -> bytes:
    data = text.encode()
    return _word(len(data)) + data
