"""How long a sequence tracker waits, and how much it holds."""

from __future__ import annotations

from msgspec import Struct


class SequenceLimits(Struct, frozen=True):
    """Times in seconds, sizes in bytes."""

    replay_idle: float = 2.0
    """Longest silence within a replay."""
    replay_total: float = 30.0
    """Longest time that frames are held back."""
    reorder: float = 0.1
    """How long a missing frame is awaited where there is no replay."""
    retry: float = 5.0
    """From a failed replay to the next; it doubles with every failure, up to `retry_most`."""
    retry_most: float = 60.0
    quiet: float = 10.0
    """Silence after which the publisher is asked whether anything was missed."""
    max_held: int = 16 << 20
    max_frame: int = 16 << 20
