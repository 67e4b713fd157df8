"""How much a block index remembers beyond the blocks that engines hold."""

from __future__ import annotations

from msgspec import Struct


class Limits(Struct, frozen=True):
    """How much is remembered of one engine beyond the blocks it holds."""

    tombstones: int = 1 << 16
    """Removed blocks whose meaning is kept."""
    orphans: int = 1 << 14
    """Blocks that are kept although their parent is unknown."""
    pools: int = 64
    """Cache groups times media."""
