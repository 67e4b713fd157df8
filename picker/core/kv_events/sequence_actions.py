"""What a sequence tracker wants done, as values."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from picker.core.kv_events.events import EventBatch


class Deliver(Struct, frozen=True, gc=False):
    """Apply this batch. `sequence` is None for a publisher that does not number its frames."""

    sequence: int | None
    batch: EventBatch


class Restarted(Struct, frozen=True, gc=False):
    """The engine restarted: forget everything. Its new batches follow, from the first."""


class Begin(Struct, frozen=True, gc=False):
    """Forget everything; batches from number `since` on follow. 0: from the first, so nothing is missing."""

    since: int


class AskReplay(Struct, frozen=True, gc=False):
    """Ask for the batches from `start` on, and report them under `number`. It replaces any replay under way."""

    number: int
    start: int


class EndReplay(Struct, frozen=True, gc=False):
    """Nothing more of the replay under way is wanted."""


class Gap(Struct, frozen=True, gc=False):
    """Count a gap of `missing` frames, which may still be filled."""

    missing: int


class Resynchronised(Struct, frozen=True, gc=False):
    """Nothing is held back any more."""


class Dropped(StrEnum):
    """Why a frame was not delivered."""

    DUPLICATE = "duplicate"
    UNDECODABLE = "undecodable"
    OVERSIZED = "oversized"
    HELD_FULL = "held_full"
    """Too many bytes were held back; the replay brings it again."""
    PHANTOM = "phantom"
    """The publisher never sent it, or did so before it restarted."""


class Drop(Struct, frozen=True, gc=False):
    """Count a frame that was not delivered."""

    reason: Dropped


Action = Deliver | Restarted | Begin | AskReplay | EndReplay | Gap | Resynchronised | Drop
