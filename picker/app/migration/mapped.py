"""What became of the parts of another router's configuration."""

from __future__ import annotations

from msgspec import Struct


class Mapped(Struct, frozen=True):
    """One part of a foreign configuration and what stands for it here."""

    theirs: str
    ours: str
    """A setting or a plugin; empty where nothing of the picker's configuration stands for it."""
    remark: str = ""
    """What is different, or why nothing is needed."""
