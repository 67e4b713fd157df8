"""Who owns a block, as Kthena's Redis layout says it, and what that makes of a prompt.

`matrix:kv:block:{model}@{hash}` is a hash of `{pod}.{namespace}` to the time the block was stored, in Unix seconds as
text; `time|medium` is a later form that also names the storage tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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


class _Verdict(NamedTuple):
    """What one ownership is: its slot as a bit and its weight, or why it does not count."""

    bit: int
    weight: float
    reason: str


def owned_prefix(
    blocks: Sequence[Iterable[tuple[bytes, bytes]]],
    candidates: Mapping[bytes, Candidate],
    tier_weights: Mapping[str, float],
    counts: Counter[str],
) -> OwnedPrefix:
    """Find the candidates that own the blocks from the first on; each block has its owners with their values.

    An ownership of a candidate that was written at or before its container's start is that of a predecessor and does
    not count; one whose time cannot be read does. `counts` gets ownerships that do not count by reason: `stale`,
    `malformed` (too long for what it is), `unknown_owner`, `unweighted` (on a medium that counts for nothing).
    """
    verdicts: dict[tuple[bytes, bytes], _Verdict] = {}  # blocks that were stored together look the same
    masks: list[int] = []
    lower: list[tuple[int, int, float]] = []
    for number, owners in enumerate(blocks):
        mask = 0
        for ownership in owners:
            verdict = verdicts.get(ownership)
            if verdict is None:
                verdict = verdicts[ownership] = _judge(*ownership, candidates, tier_weights)
            bit, weight, reason = verdict
            mask |= bit
            if reason:
                counts[reason] += 1
            elif weight != 1.0:
                lower.append((number, bit, weight))
        masks.append(mask)
    everyone = 0
    for candidate in candidates.values():
        everyone |= 1 << candidate.slot
    groups = leading(everyone, masks)
    weights: dict[int, float] = {}
    for number, bit, weight in lower:
        length = next((length for length, mask in groups if mask & bit), 0)
        if number < length:
            slot = bit.bit_length() - 1
            weights[slot] = weights.get(slot, float(length)) + weight - 1.0
    return OwnedPrefix(groups, weights)


def _judge(
    owner: bytes, value: bytes, candidates: Mapping[bytes, Candidate], tier_weights: Mapping[str, float]
) -> _Verdict:
    candidate = candidates.get(owner)
    if candidate is None:
        return _Verdict(0, 0.0, "unknown_owner")
    if len(value) > LONGEST_VALUE:
        return _Verdict(0, 0.0, "malformed")
    written, medium = parse_value(value)
    started = candidate.started_at
    if written is not None and started is not None and written <= started:
        return _Verdict(0, 0.0, "stale")
    weight = 1.0 if medium is None else tier_weights.get(medium, 0.0)
    return _Verdict(1 << candidate.slot, weight, "") if weight > 0 else _Verdict(0, 0.0, "unweighted")
