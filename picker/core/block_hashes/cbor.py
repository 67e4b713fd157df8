"""Canonical CBOR (RFC 7049, section 3.9) of the few types that block hashes are made of.

Three kinds of keys are made of it and nothing else here is, so these lines stand in for a dependency.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Any

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP = range(6)


def encode(value: Any) -> bytes:
    """Encode None, integers of 64 bits, bytes, text, sequences and maps of these.

    Raises TypeError for any other type, OverflowError for a larger integer.
    """
    match value:
        case tuple() | list():
            items = [_integer(item) if type(item) is int else encode(item) for item in value]  # mostly token ids
            return _head(_ARRAY, len(items)) + b"".join(items)
        case int() if not isinstance(value, bool):
            return _integer(value)
        case None:
            return b"\xf6"
        case bytes():
            return _head(_BYTES, len(value)) + value
        case str():
            text = value.encode()
            return _head(_TEXT, len(text)) + text
        case dict():
            pairs = sorted([(encode(key), encode(item)) for key, item in value.items()], key=_length_first)
            return _head(_MAP, len(pairs)) + b"".join(chain.from_iterable(pairs))
    raise TypeError(f"no block hash is made of {type(value).__name__}")


def _length_first(pair: tuple[bytes, bytes]) -> tuple[int, bytes]:
    return len(pair[0]), pair[0]


@lru_cache(maxsize=1 << 16)
def _integer(value: int) -> bytes:
    return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major << 5 | value,))
    for more, width in ((24, 1), (25, 2), (26, 4)):
        if value < 1 << 8 * width:
            return bytes((major << 5 | more,)) + value.to_bytes(width, "big")
    return bytes((major << 5 | 27,)) + value.to_bytes(8, "big")
