"""Keys of token blocks: chained hashes of our own, the same for every engine, release, seed and hash algorithm.

Two blocks have the same key exactly when model, adapter, block size, everything before them, their tokens, and what
else tells them apart (multimodal items, cache salt) are the same. Keys have 60 bits: such integers take 16 bytes less
in CPython than longer ones, and among 10 million blocks two collide with a probability of 0.00005.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any

from xxhash import xxh3_64_intdigest

KEY_MASK = (1 << 60) - 1
TOKEN_BYTES = 4

Media = tuple[str, int, int]
"""A multimodal item of a prompt: identifier, first token, number of tokens."""


@lru_cache(maxsize=1024)
def _splitter(width: int, blocks: int) -> Struct:
    return Struct(f"{width}s" * blocks)


@lru_cache(maxsize=1024)
def root_key(model: str, adapter: str | None, block_size: int) -> int:
    """Return what the first block of a prompt is chained to."""
    return xxh3_64_intdigest(repr((model, adapter, block_size)).encode()) & KEY_MASK


def pack(tokens: Sequence[int]) -> memoryview:
    """Return token ids as bytes, 4 for each; an `array("I")` is not copied.

    Raises OverflowError for ids outside 0 .. 2**32-1 and TypeError for what is no integer.
    """
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    return memoryview(packed).cast("B")


def block_keys(
    parent: int, data: memoryview, block_size: int, blocks: int, suffixes: Mapping[int, bytes] | None = None
) -> list[int]:
    """Compute the keys of the first `blocks` blocks of packed tokens that follow the block with key `parent`.

    `suffixes` are hashed together with the tokens of the blocks with these numbers.
    """
    parts: Iterable[bytes] = _splitter(block_size * TOKEN_BYTES, blocks).unpack_from(data)
    if suffixes:
        parts = [part + suffixes.get(number, b"") for number, part in enumerate(parts)]
    return [parent := xxh3_64_intdigest(part, parent) & KEY_MASK for part in parts]


def event_identifiers(
    extra_keys: Sequence[Any] | None, adapter: str | None, first_block: bool, cache_salt: str | None
) -> dict[int, list[Any]]:
    """Return, by block of a store, what tells it apart besides tokens and adapter.

    `extra_keys` has, per block, None or a list of the adapter's name, multimodal items as `identifier` or
    `[identifier, offset]`, and, in the first block of a prompt, the cache salt. Offsets follow from the tokens and
    mean different things in different releases, so only identifiers count.
    """
    found: dict[int, list[Any]] = {}
    if extra_keys is not None and any(extra_keys):
        for number, items in enumerate(extra_keys):
            if items and (identifiers := _identifiers(items, adapter)):
                found[number] = identifiers
    if cache_salt and first_block and 0 not in found:
        found[0] = [cache_salt]
    return found


def event_suffixes(
    extra_keys: Sequence[Any] | None, adapter: str | None, first_block: bool, cache_salt: str | None
) -> dict[int, bytes]:
    """Return the same as bytes to hash; the adapter is part of the root."""
    found = event_identifiers(extra_keys, adapter, first_block, cache_salt)
    return {number: _suffix(identifiers) for number, identifiers in found.items()}


def prompt_suffixes(media: Sequence[Media], cache_salt: str | None, block_size: int) -> dict[int, bytes]:
    """Return the same bytes by block of a prompt, from its multimodal items in order and its cache salt."""
    identifiers: dict[int, list[Any]] = {}
    for identifier, offset, length in media:
        for number in range(offset // block_size, -(-(offset + length) // block_size)):
            identifiers.setdefault(number, []).append(identifier)
    if cache_salt:
        identifiers.setdefault(0, []).append(cache_salt)
    return {number: _suffix(found) for number, found in identifiers.items()}


def _identifiers(items: Any, adapter: str | None) -> list[Any]:
    if not isinstance(items, list | tuple):
        items = (items,)
    found = [item[0] if isinstance(item, list | tuple) and item else item for item in items]
    if adapter is not None and adapter in found:
        found.remove(adapter)
    return found


def _suffix(identifiers: list[Any]) -> bytes:
    return repr(identifiers).encode("utf-8", "surrogatepass") if identifiers else b""
