"""vLLM's own block hashes, where the seed they start from is known.

A block's hash is SHA-256 over (hash of the block before, tokens, extra keys), pickled or in canonical CBOR
(`--prefix-caching-hash-algo sha256` or `sha256_cbor`). The block before the first is the hash of a seed:
PYTHONHASHSEED or, since 0.29, "vllm-none-hash"; earlier releases drew it at random. The keys returned are what events
carry: the low 64 bits.

Extra keys are the LoRA adapter, the multimodal items and, in block 0, the cache salt, each tagged with what it is since
0.31 and bare before. With bare keys LoRA is named since 0.12; tagged ones hold the adapter's path too.
"""

from __future__ import annotations

import pickle  # only ever to write: the engine hashes what pickle makes of its blocks
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from picker.core.block_hashes.cbor import encode
from picker.core.block_hashes.context import HashContext, token_blocks

_DEFAULT_SEED = "vllm-none-hash"


def sha256_pickle(tokens: Sequence[int], block_size: int, context: HashContext) -> list[int]:
    """Hash with `sha256` as vLLM 0.31 and later do; empty for an adapter whose path is not known."""
    return [] if _lacks_path(context) else _chain(tokens, block_size, context, _pickled, _tagged_keys)


def sha256_cbor(tokens: Sequence[int], block_size: int, context: HashContext) -> list[int]:
    """Hash with `sha256_cbor` as vLLM 0.31 and later do; empty for an adapter whose path is not known."""
    return [] if _lacks_path(context) else _chain(tokens, block_size, context, _encoded, _tagged_keys)


def sha256_pickle_untagged(tokens: Sequence[int], block_size: int, context: HashContext) -> list[int]:
    """Hash with `sha256` as vLLM up to 0.30 does."""
    return _chain(tokens, block_size, context, _pickled, _bare_keys)


def sha256_cbor_untagged(tokens: Sequence[int], block_size: int, context: HashContext) -> list[int]:
    """Hash with `sha256_cbor` as vLLM up to 0.30 does."""
    return _chain(tokens, block_size, context, _encoded, _bare_keys)


def _chain(
    tokens: Sequence[int],
    block_size: int,
    context: HashContext,
    digest: Callable[[Any], bytes],
    extra_keys: Callable[[HashContext, int], tuple[Any, ...]],
) -> list[int]:
    parent = digest(context.seed or _DEFAULT_SEED)
    keys = []
    for number, block in enumerate(token_blocks(tokens, block_size)):
        parent = digest((parent, block, extra_keys(context, number) or None))
        keys.append(int.from_bytes(parent[-8:], "big"))
    return keys


def _lacks_path(context: HashContext) -> bool:
    return bool(context.lora_name) and context.lora_path is None


def _tagged_keys(context: HashContext, number: int) -> tuple[Any, ...]:
    lora = (("lora", context.lora_name, context.lora_path),) if context.lora_name else ()
    items = tuple([("mm", *item) for item in context.multimodal.get(number, ())])
    salt = (("cache_salt", context.cache_salt),) if context.cache_salt and number == 0 else ()
    return (*lora, *items, *salt)


def _bare_keys(context: HashContext, number: int) -> tuple[Any, ...]:
    lora = (context.lora_name,) if context.lora_name else ()
    salt = (context.cache_salt,) if context.cache_salt and number == 0 else ()
    return (*lora, *context.multimodal.get(number, ()), *salt)


def _pickled(value: Any) -> bytes:
    return sha256(pickle.dumps(value, protocol=5)).digest()


def _encoded(value: Any) -> bytes:
    return sha256(encode(value)).digest()
