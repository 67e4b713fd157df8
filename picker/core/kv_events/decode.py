"""Decodes the event batches of vLLM 0.9 .. 0.33 and SGLang 0.4.7 .. 0.5.23, as they come off the wire.

A batch is a MessagePack array `[ts, events, rank]` (rank absent in the oldest releases, anything may follow in newer
ones) or a map of the same. An event is an array that begins with its type, or a map with a key `type`.

Batches of maps with unsigned hashes, which is what current vLLM sends, become values in one go. Batches that are all
arrays, or all maps, are decoded in one go and their hashes made unsigned. The rest, whatever is amiss with it, is
decoded event by event: the bad are counted, the good are kept. All ways agree on every frame that they take.
"""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import Any

from msgspec import MsgspecError, Raw, convert
from msgspec.structs import astuple, replace

from picker.core.kv_events.events import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExtraKeys,
    KvEvent,
)
from picker.core.kv_events.wire import (
    ANY_EXTRA_KEYS,
    BATCH,
    EVENT,
    EVENT_MAP,
    RAW_BATCH,
    RAW_BATCH_MAP,
    TYPE,
    TYPE_MAP,
    UNUSUAL,
    UNUSUAL_MAP,
    WIRE_BATCHES,
    ArrayEvent,
    MapEvent,
    Removed,
    Stored,
    WireHash,
)

MAX_FRAME_BYTES = 16 << 20
"""Longest frame looked at: some five million tokens stored in one step."""

MAX_UNUSUAL_EXTRA_KEYS_BYTES = 1 << 20
"""Most bytes of extra keys that hold more than names and numbers: such are decoded without knowing their types."""

_UINT64 = (1 << 64) - 1
_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})

# Besides its own errors msgspec lets these out: bytes that are not UTF-8, nesting deeper than the interpreter's stack.
_BAD_INPUT = (MsgspecError, UnicodeError, RecursionError)


class UndecodableBatchError(ValueError):
    """The frame as a whole is not an event batch; nothing of it can be used."""


class _UnusableError(Exception):
    """An event cannot be used; the only argument is the reason."""


def decode(payload: bytes | memoryview) -> EventBatch:
    """Decode one frame's payload; events that cannot be used are left out and counted in `dropped` by reason.

    Reasons: `unknown_event` (a type that no release had), `bad_field` (a field of another type, a negative or
    oversized token id), `too_large` (more than MAX_BLOCKS blocks, or MAX_BLOCK_SIZE tokens to a block). Missing fields
    are empty. Tokens that come as pairs (SGLang's EAGLE: each token with the one after it) become their first halves,
    and the second half of a block's last pair its lookahead token.
    Raises UndecodableBatchError, and nothing else, when the frame is no batch: not MessagePack, truncated, without
    a list of events, with a rank that is none, or beyond MAX_FRAME_BYTES or MAX_EVENTS.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise UndecodableBatchError(f"{len(payload)} bytes long; a batch has at most {MAX_FRAME_BYTES}")
    try:
        batch = BATCH.decode(payload)
    except _BAD_INPUT:
        return _decode_wire(payload)
    return EventBatch(_finite(batch.ts), batch.events, batch.rank)


def _decode_wire(payload: bytes | memoryview) -> EventBatch:
    for decoder in WIRE_BATCHES:
        try:
            batch = decoder.decode(payload)
            return EventBatch(_finite(batch.ts), tuple([_value(event) for event in batch.events]), batch.rank)
        except (*_BAD_INPUT, _UnusableError):
            continue
    return _decode_each(payload)


def _decode_each(payload: bytes | memoryview) -> EventBatch:
    try:
        batch = (RAW_BATCH_MAP if payload and _is_map(payload[0]) else RAW_BATCH).decode(payload)
    except _BAD_INPUT as error:
        raise UndecodableBatchError(f"not an event batch: {error}") from error
    events: list[KvEvent] = []
    dropped: Counter[str] = Counter()
    for raw in batch.events:
        try:
            events.append(_decode_event(raw))
        except _UnusableError as unusable:
            dropped[unusable.args[0]] += 1
    return EventBatch(_finite(batch.ts), tuple(events), batch.rank, dict(dropped))


def _decode_event(raw: Raw) -> KvEvent:
    is_map = _is_map(memoryview(raw)[0])
    try:
        event = (EVENT_MAP if is_map else EVENT).decode(raw)
    except _BAD_INPUT:
        pass
    else:
        return _value(event)
    try:
        kind = (TYPE_MAP if is_map else TYPE).decode(raw).type
    except _BAD_INPUT:
        raise _UnusableError("bad_field") from None
    if kind not in _KNOWN_TYPES:
        raise _UnusableError("unknown_event")
    for decoder in UNUSUAL_MAP if is_map else UNUSUAL:
        try:
            return _unusual_store(decoder.decode(raw))
        except _BAD_INPUT:
            continue
    raise _UnusableError("bad_field")


def _unusual_store(wire: Stored[Any, Raw | None]) -> BlockStored:
    """Build the value of a store with pairs of tokens, or with extra keys that are bytes."""
    keys = _spelt_out(wire.extra_keys)
    tokens = wire.token_ids
    if not isinstance(tokens[0] if tokens else 0, tuple):
        return _stored(wire, tokens, keys)
    size = wire.block_size
    event = _stored(wire, tuple([first for first, _ in tokens]), keys)
    lookahead = tuple([(second,) for _, second in tokens[size - 1 :: size]]) if size else ()
    return replace(event, lookahead_token_ids=lookahead)


def _spelt_out(raw: Raw | None) -> ExtraKeys | None:
    """Spell out in hexadecimal the extra keys that are bytes."""
    if raw is None:
        return None
    if memoryview(raw).nbytes > MAX_UNUSUAL_EXTRA_KEYS_BYTES:
        raise _UnusableError("too_large")
    blocks = ANY_EXTRA_KEYS.decode(raw)
    if blocks is None:
        return None
    spelt = [keys and [key.hex() if isinstance(key, bytes) else key for key in keys] for keys in blocks]
    return convert(spelt, ExtraKeys)


def _value(wire: ArrayEvent | MapEvent) -> KvEvent:
    if isinstance(wire, Stored):
        return _stored(wire, wire.token_ids, wire.extra_keys)
    if isinstance(wire, Removed):
        return BlockRemoved(_hashes(wire.block_hashes), *astuple(wire)[1:])
    return AllBlocksCleared()


def _stored(wire: Stored[Any, Any], token_ids: tuple[int, ...], extra_keys: ExtraKeys | None) -> BlockStored:
    hashes, parent, _, block_size, lora_id, medium, lora_name, _, *later_fields = astuple(wire)
    if block_size > MAX_BLOCK_SIZE:
        raise _UnusableError("too_large")
    if block_size < 0:
        raise _UnusableError("bad_field")
    return BlockStored(
        _hashes(hashes),
        None if parent is None else _hash(parent),
        token_ids,
        block_size,
        lora_id,
        medium,
        lora_name,
        extra_keys,
        *later_fields,
    )


def _hashes(wire: tuple[WireHash, ...]) -> tuple[int, ...]:
    if len(wire) > MAX_BLOCKS:
        raise _UnusableError("too_large")
    return tuple([h & _UINT64 if isinstance(h, int) else int.from_bytes(h[-8:], "big") for h in wire])


def _hash(value: WireHash) -> int:
    return value & _UINT64 if isinstance(value, int) else int.from_bytes(value[-8:], "big")


def _is_map(first: int) -> bool:
    """Tell from its first byte whether a MessagePack value is a map: fixmap, map 16 or map 32."""
    return first & 0xF0 == 0x80 or first in {0xDE, 0xDF}


def _finite(seconds: float) -> float:
    return seconds if isfinite(seconds) else 0.0
