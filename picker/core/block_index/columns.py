"""Columns of integers that grow without being copied. Compiled, reading and writing them makes no Python object.

They are made of chunks, of which a list has all; what is at a place is looked up with `get` or `get_wide`.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from librt.vecs import vec
from mypy_extensions import i32, i64

CHUNK: Final[i64] = 512
"""Integers in a chunk."""
_BITS: Final[i64] = 9
_WITHIN: Final[i64] = 511

# In quotes: evaluated in compiled code, these types are Python's own integers.
Column: TypeAlias = "list[vec[i32]]"
"""Integers of 31 bits."""
WideColumn: TypeAlias = "list[vec[i64]]"
"""Signed integers of 64 bits."""


def extend(column: Column) -> None:
    """Add a chunk of zeros."""
    column.append(vec[i32]([0] * CHUNK))


def extend_wide(column: WideColumn) -> None:
    """Add a chunk of zeros."""
    column.append(vec[i64]([0] * CHUNK))


def get(column: Column, at: i64) -> i64:
    return i64(column[at >> _BITS][at & _WITHIN])


def put(column: Column, at: i64, value: i64) -> None:
    column[at >> _BITS][at & _WITHIN] = i32(value)


def get_wide(column: WideColumn, at: i64) -> i64:
    return column[at >> _BITS][at & _WITHIN]


def put_wide(column: WideColumn, at: i64, value: i64) -> None:
    column[at >> _BITS][at & _WITHIN] = value
