"""The shapes of event batches on the wire, and a decoder for each.

Arrays name their fields by place. Both engines put the same fields at the same places and add new ones behind: vLLM
0.10.2 medium, 0.14 lora_name, 0.17 extra_keys, 0.20 group_idx, 0.22 the cache's kind and window; SGLang 0.5.9 medium.
What came later came in maps (vLLM 0.24, SGLang 0.5.20), so whatever an array holds beyond those is not looked at.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Raw, Struct, field
from msgspec.msgpack import Decoder

from picker.core.kv_events.events import AllBlocksCleared, ExtraKeys, KvEvent, LookaheadTokenIds, Name, Small, TokenId

MAX_EVENTS = 1 << 18
"""Most events in one batch. SGLang up to 0.5.17 sends one per page, and a page may be a single token."""

MAX_RANK = (1 << 16) - 1

WireHash = int | bytes
Pair = tuple[TokenId, TokenId]
Token = TypeVar("Token")
Keys = TypeVar("Keys")
Event = TypeVar("Event")
Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]
RawEvents = Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]


class RawBatch(Struct, array_like=True):
    ts: float
    events: RawEvents
    rank: Rank | None = None


class RawBatchMap(Struct):
    events: RawEvents
    ts: float = 0.0
    data_parallel_rank: Rank | None = None
    attn_dp_rank: Rank | None = None

    @property
    def rank(self) -> int | None:
        return self.attn_dp_rank if self.data_parallel_rank is None else self.data_parallel_rank


class Stored(Struct, Generic[Token, Keys], array_like=True, gc=False, tag="BlockStored", tag_field="type"):
    """A store as an array. Fields that are missing are empty."""

    block_hashes: tuple[WireHash, ...] = ()
    parent_block_hash: WireHash | None = None
    token_ids: tuple[Token, ...] = ()
    block_size: int = 0
    lora_id: int | None = None
    medium: Name | None = None
    lora_name: Name | None = None
    extra_keys: Keys = field(default=None)  # type: ignore[assignment]  # None where there is none
    group_idx: Small | None = None
    kv_cache_spec_kind: Name | None = None
    kv_cache_spec_sliding_window: Small | None = None


class StoredMap(Stored[Token, Keys], Generic[Token, Keys], array_like=False, gc=False):
    locality: Name | None = None
    ownership: Name | None = None
    session_id: str | None = None
    lookahead_token_ids: LookaheadTokenIds | None = None
    cache_salt: str | None = None


class Removed(Struct, array_like=True, gc=False, tag="BlockRemoved", tag_field="type"):
    block_hashes: tuple[WireHash, ...] = ()
    medium: Name | None = None
    group_idx: Small | None = None


class RemovedMap(Removed, array_like=False, gc=False):
    locality: Name | None = None
    ownership: Name | None = None


class Cleared(Struct, array_like=True, tag="AllBlocksCleared", tag_field="type"):
    pass


class Batch(Struct, Generic[Event], array_like=True, gc=False):
    ts: float
    events: Annotated[tuple[Event, ...], Meta(max_length=MAX_EVENTS)]
    rank: Rank | None = None


class Type(Struct, array_like=True):
    type: str


class TypeMap(Struct):
    type: str


ArrayEvent = Stored[TokenId, ExtraKeys | None] | Removed | Cleared
MapEvent = StoredMap[TokenId, ExtraKeys | None] | RemovedMap | AllBlocksCleared

BATCH = Decoder(Batch[KvEvent])
WIRE_BATCHES = (Decoder(Batch[ArrayEvent]), Decoder(Batch[MapEvent]))
RAW_BATCH = Decoder(RawBatch)
RAW_BATCH_MAP = Decoder(RawBatchMap)
EVENT = Decoder(ArrayEvent)
EVENT_MAP = Decoder(MapEvent)
TYPE = Decoder(Type)
TYPE_MAP = Decoder(TypeMap)
UNUSUAL: tuple[Decoder[Any], ...] = (Decoder(Stored[TokenId, Raw]), Decoder(Stored[Pair, Raw]))
UNUSUAL_MAP: tuple[Decoder[Any], ...] = (Decoder(StoredMap[TokenId, Raw]), Decoder(StoredMap[Pair, Raw]))
ANY_EXTRA_KEYS = Decoder(tuple[tuple[Any, ...] | None, ...] | None)
