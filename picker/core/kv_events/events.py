"""KV-cache events as values, the same for every engine and release.

Hashes are unsigned 64-bit integers: signed ones modulo 2^64, byte strings by their last eight bytes, big endian.
They are opaque names that an engine gives to its blocks.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class BlockStored(Struct, frozen=True, gc=False):
    """Blocks were stored, one after the other in one prompt; `parent` is the block before them, None at its start.

    `token_ids` are those of these blocks; in groups that skip blocks (sliding windows) there may be more of them.
    Fields that a release does not have are None.
    """

    block_hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[Any, ...] | None = None


class BlockRemoved(Struct, frozen=True, gc=False):
    """One physical copy of each of these blocks is gone."""

    block_hashes: tuple[int, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Struct, frozen=True, gc=False):
    """The engine's whole cache is empty now."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, gc=False):
    """What one engine step published. `dropped` counts events that could not be used, by reason."""

    timestamp: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None
    dropped: dict[str, int] = {}
