"""Who owns a block, as Kthena's Redis layout says it, and what that makes of a prompt.

`matrix:kv:block:{model}@{hash}` is a hash of `{pod}.{namespace}` to the time the block was stored, in Unix seconds as
text; `time|medium` is a later form that also names the storage tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from picker.core.kv_index.hash_index import leading

BLOCK_PREFIX = "matrix:kv:block:"
LONGEST_VALUE = 64
"""Bytes; a time and a medium are shorter."""


class Candidate(Struct, frozen=True):
    """An endpoint that may own blocks. `started_at` is when its engine's container started, in Unix seconds."""

    slot: int
    started_at: float | None = None


class OwnedPrefix(Struct, frozen=True):
    """How many leading blocks candidates own.

    `groups` are `(blocks, mask of slots)`, most first, and `weights` what those blocks are worth by slot, in blocks,
    for slots that have some of them on another medium than the engine's own.
    """

    groups: list[tuple[int, int]]
    weights: Mapping[int, float]


def block_key(model: str, block: int) -> str:
    """Return the Redis key of a block."""
    return f"{BLOCK_PREFIX}{model}@{block}"


def parse_value(value: bytes) -> tuple[int | None, str | None]:
    """Return the time (None where it is no number) and the medium (None where there is none) of an ownership."""
    text = value.decode("utf-8", "replace")
    time, _, medium = text.partition("|")
    return (int(time) if time.isascii() and time.isdecimal() else None), medium.strip().upper() or None


def owned_prefix(
    blocks: Sequence[Mapping[bytes, bytes]],
    candidates: Mapping[bytes, Candidate],
    tier_weights: Mapping[str, float],
    counts: Counter[str],
) -> OwnedPrefix:
    """Find the candidates that own the blocks from the first on.

    An ownership of a candidate that was written at or before its container's start is that of a predecessor and does
    not count; one whose time cannot be read does. `counts` gets ownerships by reason: `stale`, `malformed` (not text of
    that length; does not count), `unknown_owner`.
    """
    masks: list[int] = []
    lower: list[tuple[int, int, float]] = []
    for number, owners in enumerate(blocks):
        mask = 0
        for owner, value in owners.items():
            candidate = candidates.get(owner)
            if candidate is None:
                counts["unknown_owner"] += 1
                continue
            if len(value) > LONGEST_VALUE:
                counts["malformed"] += 1
                continue
            written, medium = parse_value(value)
            started = candidate.started_at
            if written is not None and started is not None and written <= started:
                counts["stale"] += 1
                continue
            weight = 1.0 if medium is None else tier_weights.get(medium, 0.0)
            if not weight:
                continue
            mask |= 1 << candidate.slot
            if weight != 1.0:
                lower.append((number, candidate.slot, weight))
        masks.append(mask)
    everyone = 0
    for candidate in candidates.values():
        everyone |= 1 << candidate.slot
    groups = leading(everyone, masks)
    lengths = {slot: length for length, mask in groups for slot in _bits(mask)} if lower else {}
    weights: dict[int, float] = {}
    for number, slot, weight in lower:
        if number < lengths.get(slot, 0):
            weights[slot] = weights.get(slot, float(lengths[slot])) + weight - 1.0
    return OwnedPrefix(groups, weights)


def _bits(mask: int) -> list[int]:
    return [slot for slot in range(mask.bit_length()) if mask >> slot & 1]
