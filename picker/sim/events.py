"""KV-cache events as values: what an engine tells the world about its blocks.

One `BlockStored` covers adjacent blocks of one prompt; one `BlockRemoved` covers one physical copy. Field names and
meanings are vLLM's (`vllm.distributed.kv_events`); how they are encoded and carried is the publisher's business.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU = "GPU"
"""The only medium of this engine: nothing is offloaded."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Adjacent blocks became readable in the cache.

    `block_hashes` are unsigned 64-bit, `token_ids` has `block_size` entries for each of them, `parent_block_hash` is the
    block before the first one (None at the start of a prompt), and `extra_keys` holds per block the LoRA name and, in
    block 0 only, the cache salt, or None when there are neither.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_name: str | None
    extra_keys: tuple[tuple[str, ...] | None, ...]
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One physical copy of each block was given up; other copies of the same hash may remain."""

    block_hashes: tuple[int, ...]
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was emptied."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
