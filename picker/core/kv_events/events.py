"""KV-cache events as values, the same for every engine and release.

Hashes are unsigned 64-bit integers: signed ones modulo 2^64, byte strings by their last eight bytes, big endian.
They are opaque names that an engine gives to its blocks.

The values carry the names, the order and the bounds of the newest wire format, so that `decode` can fill them straight
from a frame. What they may hold is bounded here: nothing an engine sends gets past these types.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_BLOCKS = 1 << 18
"""Most blocks in one event: a prompt of that many tokens, one token to a block."""

MAX_BLOCK_SIZE = 1 << 20
"""Most tokens in one block. Hybrid models inflate their blocks, to hundreds or thousands of tokens."""

BlockHash = Annotated[int, Meta(ge=0)]
BlockHashes = Annotated[tuple[BlockHash, ...], Meta(max_length=MAX_BLOCKS)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
BlockSize = Annotated[int, Meta(ge=0, le=MAX_BLOCK_SIZE)]
Small = Annotated[int, Meta(ge=0, lt=1 << 32)]
Name = Annotated[str, Meta(max_length=1024)]
ExtraKey = str | int | None
ExtraKeys = tuple[tuple[ExtraKey | tuple[ExtraKey, ...], ...] | None, ...]
LookaheadTokenIds = tuple[tuple[TokenId, ...] | None, ...]


class BlockStored(Struct, frozen=True, gc=False, tag_field="type", rename={"parent": "parent_block_hash"}):
    """Blocks were stored, one after the other in one prompt; `parent` is the block before them, None at its start.

    `token_ids` are those of these blocks; in groups that skip blocks (sliding windows) there may be more of them, and
    in an offloading connector's placeholder there are none and `block_size` is 0. `extra_keys` is, for each block,
    what its hash covers beside tokens: LoRA name, (identifier, offset) of multimodal items, in block 0 the salt, and
    the digest of prompt embeddings (bytes on the wire, hexadecimal here).
    `lookahead_token_ids` is, for each block, the tokens after it that its hash covers too.
    Fields that a release does not have are None.
    """

    block_hashes: BlockHashes
    parent: BlockHash | None
    token_ids: tuple[TokenId, ...]
    block_size: BlockSize
    lora_id: int | None = None
    medium: Name | None = None
    lora_name: Name | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: Small | None = None
    kv_cache_spec_kind: Name | None = None
    kv_cache_spec_sliding_window: Small | None = None
    locality: Name | None = None
    ownership: Name | None = None
    session_id: str | None = None
    lookahead_token_ids: LookaheadTokenIds | None = None
    cache_salt: str | None = None


class BlockRemoved(Struct, frozen=True, gc=False, tag_field="type"):
    """One physical copy of each of these blocks is gone."""

    block_hashes: BlockHashes
    medium: Name | None = None
    group_idx: Small | None = None
    locality: Name | None = None
    ownership: Name | None = None


class AllBlocksCleared(Struct, frozen=True, gc=False, tag_field="type"):
    """The engine's whole cache is empty now."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, gc=False):
    """What one engine step published. `dropped` counts events that could not be used, by reason.

    `timestamp` is the engine's clock, seconds since the epoch; 0.0 where it sent none that is a finite number.
    """

    timestamp: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None
    dropped: dict[str, int] = {}
