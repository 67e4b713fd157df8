"""Types of the arrays that hold one entry for each endpoint, and the slots of a bitmask."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Slots = np.ndarray[Any, np.dtype[np.intp]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@lru_cache(maxsize=1024)
def slots_of(mask: int) -> Slots:
    """Return the slots of a bitmask, ascending."""
    packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little").nonzero()[0]
