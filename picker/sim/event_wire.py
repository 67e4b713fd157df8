"""KV events as engines encode them: vLLM 0.30 .. 0.32 (maps) and 0.20 .. 0.21 (arrays), for one full-attention group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from picker.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

EventFormat = Literal["map", "array"]
FORMATS: tuple[EventFormat, ...] = ("map", "array")

_FULL_ATTENTION = "full_attention"
_Hashes = tuple[int, ...]
_ExtraKeys = tuple[tuple[str, ...] | None, ...]


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Event]
    data_parallel_rank: int


class _StoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: _ExtraKeys
    group_idx: int = 0
    kv_cache_spec_kind: str = _FULL_ATTENTION


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: _Hashes
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: _ExtraKeys
    group_idx: int = 0


class _RemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str
    group_idx: int = 0


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: _Hashes
    medium: str
    group_idx: int = 0


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


_Event = _StoredMap | _StoredArray | _RemovedMap | _RemovedArray | _ClearedMap | _ClearedArray
_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(
    events: Sequence[KvEvent], timestamp: float, rank: int, *, lora_ids: Mapping[str, int], form: EventFormat
) -> bytes:
    """Encode what one step published. `lora_ids` are the numbers by which an engine knows its adapters."""
    stored, removed, cleared = (
        (_StoredMap, _RemovedMap, _ClearedMap) if form == "map" else (_StoredArray, _RemovedArray, _ClearedArray)
    )
    encoded: list[_Event] = []
    for event in events:
        match event:
            case BlockStored():
                encoded.append(
                    stored(
                        event.block_hashes,
                        event.parent_block_hash,
                        event.token_ids,
                        event.block_size,
                        None if event.lora_name is None else lora_ids[event.lora_name],
                        event.medium,
                        event.lora_name,
                        event.extra_keys,
                    )
                )
            case BlockRemoved():
                encoded.append(removed(event.block_hashes, event.medium))
            case AllBlocksCleared():
                encoded.append(cleared())
    return _ENCODER.encode(_Batch(timestamp, encoded, rank))
