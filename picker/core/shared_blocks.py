"""How far two pieces of data are equal, in whole blocks."""

from __future__ import annotations


def shared_blocks(one: bytes, other: bytes, size: int, most: int) -> int:
    """Count the leading blocks of `size` bytes that are equal, at most `most`, which both have."""
    same = 0
    while same < most:
        middle = (same + most + 1) // 2
        if one[same * size : middle * size] == other[same * size : middle * size]:
            same = middle
        else:
            most = middle - 1
    return same
