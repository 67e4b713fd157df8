"""Event batches of every engine release, and of nobody."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from picker.core.kv_events import decode as decode_module
from picker.core.kv_events.decode import MAX_FRAME_BYTES, UndecodableBatchError, decode
from picker.core.kv_events.events import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from picker.core.kv_events.wire import MAX_EVENTS

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((GOLDEN / "expected.json").read_text())
FRAMES = {path.name: path.read_bytes() for path in sorted(GOLDEN.glob("*.msgpack"))}
OPS = {BlockStored: "stored", BlockRemoved: "removed", AllBlocksCleared: "cleared"}
ABSENT = {
    "block_hashes": [],
    "parent": None,
    "token_ids": [],
    "block_size": None,
    "lora_id": None,
    "lora_name": None,
    "medium": None,
    "extra_keys": None,
    "group_idx": None,
    "kv_cache_spec_kind": None,
    "kv_cache_spec_sliding_window": None,
    "locality": None,
    "ownership": None,
    "session_id": None,
    "lookahead_token_ids": None,
    "cache_salt": None,
}


def as_lists(value: Any) -> Any:
    return [as_lists(item) for item in value] if isinstance(value, tuple | list) else value


def as_rows(batch: EventBatch) -> list[dict[str, Any]]:
    shared = {"ts": batch.timestamp, "dp_rank": batch.data_parallel_rank}
    return [
        {
            **ABSENT,
            **{name: as_lists(value) for name, value in msgspec.structs.asdict(event).items()},
            "op": OPS[type(event)],
            **shared,
        }
        for event in batch.events
    ]


def frame(*events: Any, ts: float = 1.5, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": list(range(8)),
    "block_size": 4,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [1]}
STORED_VALUE = BlockStored((1, 2), None, tuple(range(8)), 4)


# -- Recorded frames --


def test_every_golden_frame_has_its_answer():
    assert FRAMES.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", FRAMES)
def test_golden(name: str):
    batch = decode(FRAMES[name])
    assert as_rows(batch) == EXPECTED[name]
    assert batch.dropped == ({"unknown_event": 1} if name == "synthetic-unknown-event.msgpack" else {})


@pytest.mark.parametrize("name", FRAMES)
def test_a_memoryview_is_as_good_as_bytes(name: str):
    assert decode(memoryview(FRAMES[name])) == decode(FRAMES[name])


# -- Releases without a recorded frame: encoded here from the table of fields by release --

OLD = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"]
VLLM_STORED = {
    "0.9": OLD,
    "0.10.2": [*OLD, "medium"],
    "0.14": [*OLD, "medium", "lora_name"],
    "0.17": [*OLD, "medium", "lora_name", "extra_keys"],
    "0.20": [*OLD, "medium", "lora_name", "extra_keys", "group_idx"],
    "0.22": [
        *OLD,
        *("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ],
}
VLLM_STORED["0.26"] = [*VLLM_STORED["0.22"], "locality"]
VLLM_STORED["0.29"] = [*VLLM_STORED["0.26"], "ownership"]
VLLM_STORED["0.30"] = [*VLLM_STORED["0.29"], "session_id"]
VLLM_STORED["0.33"] = [*VLLM_STORED["0.30"], "lookahead_token_ids"]
SGLANG_STORED = {"0.4.7": OLD, "0.5.9": [*OLD, "medium"], "0.5.20": [*OLD, "medium", "cache_salt", "session_id"]}
SGLANG_STORED["0.5.22"] = [*SGLANG_STORED["0.5.20"], "lora_name"]
REMOVED_FIELDS = {
    "old": ["block_hashes"],
    "medium": ["block_hashes", "medium"],
    "group": ["block_hashes", "medium", "group_idx"],
    "locality": ["block_hashes", "medium", "group_idx", "locality"],
    "ownership": ["block_hashes", "medium", "group_idx", "locality", "ownership"],
}


def since(releases: str, stored: list[str], removed: str, *, rank: bool = True, maps: bool = False) -> list[Any]:
    return [pytest.param(stored, REMOVED_FIELDS[removed], rank, maps, id=release) for release in releases.split()]


RELEASES = [
    *since("vllm-0.9.0", VLLM_STORED["0.9"], "old", rank=False),
    *since("vllm-0.9.1 vllm-0.9.2 vllm-0.10.0 vllm-0.10.1", VLLM_STORED["0.9"], "old"),
    *since("vllm-0.10.2 vllm-0.11.0 vllm-0.11.2 vllm-0.12.0 vllm-0.13.0", VLLM_STORED["0.10.2"], "medium"),
    *since("vllm-0.14.0 vllm-0.15.0 vllm-0.16.0", VLLM_STORED["0.14"], "medium"),
    *since("vllm-0.17.0 vllm-0.18.0 vllm-0.19.0", VLLM_STORED["0.17"], "medium"),
    *since("vllm-0.20.0 vllm-0.21.0", VLLM_STORED["0.20"], "group"),
    *since("vllm-0.22.0 vllm-0.23.0", VLLM_STORED["0.22"], "group"),
    *since("vllm-0.24.0 vllm-0.25.0", VLLM_STORED["0.22"], "group", maps=True),
    *since("vllm-0.26.0 vllm-0.27.0 vllm-0.28.0", VLLM_STORED["0.26"], "locality", maps=True),
    *since("vllm-0.29.0", VLLM_STORED["0.29"], "ownership", maps=True),
    *since("vllm-0.30.0 vllm-0.31.0 vllm-0.32.0", VLLM_STORED["0.30"], "ownership", maps=True),
    *since("vllm-0.33.0", VLLM_STORED["0.33"], "ownership", maps=True),
    *since("sglang-0.4.7 sglang-0.4.10 sglang-0.5.2", SGLANG_STORED["0.4.7"], "old", rank=False),
    *since("sglang-0.5.6 sglang-0.5.8", SGLANG_STORED["0.4.7"], "old"),
    *since("sglang-0.5.9 sglang-0.5.11 sglang-0.5.15", SGLANG_STORED["0.5.9"], "medium", rank=False),
    *since("sglang-0.5.17 sglang-0.5.19", SGLANG_STORED["0.5.9"], "medium"),
    *since("sglang-0.5.20 sglang-0.5.21", SGLANG_STORED["0.5.20"], "medium", maps=True),
    *since("sglang-0.5.22 sglang-0.5.23", SGLANG_STORED["0.5.22"], "medium", maps=True),
]
EVERY_FIELD = {
    "block_hashes": [2**64 - 1, 5],
    "parent_block_hash": 2**63,
    "token_ids": [0, 2**32 - 1, 7, 8],
    "block_size": 2,
    "lora_id": 3,
    "lora_name": "adapter",
    "medium": "CPU",
    "extra_keys": [["adapter", ["image", 5], "salt"], None],
    "group_idx": 4,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "LOCAL",
    "ownership": "OWNED",
    "session_id": "session",
    "lookahead_token_ids": [[7], [9]],
    "cache_salt": "salt",
}


def encode_event(kind: str, fields: list[str], maps: bool) -> Any:
    if maps:
        return {"type": kind, **{name: EVERY_FIELD[name] for name in fields}}
    return [kind, *(EVERY_FIELD[name] for name in fields)]


def expected_row(op: str, fields: list[str], rank: int | None) -> dict[str, Any]:
    row = {**ABSENT, **{name: EVERY_FIELD[name] for name in fields}, "op": op, "ts": 2.25, "dp_rank": rank}
    if "parent_block_hash" in row:
        row["parent"] = row.pop("parent_block_hash")
    return row


@pytest.mark.parametrize(("stored", "removed", "rank", "maps"), RELEASES)
def test_every_field_of_every_release(stored: list[str], removed: list[str], rank: bool, maps: bool):
    events = [
        encode_event("BlockStored", stored, maps),
        encode_event("BlockRemoved", removed, maps),
        encode_event("AllBlocksCleared", [], maps),
    ]
    batch = decode(msgspec.msgpack.encode([2.25, events, 6] if rank else [2.25, events]))
    seen_rank = 6 if rank else None
    assert as_rows(batch) == [
        expected_row("stored", stored, seen_rank),
        expected_row("removed", removed, seen_rank),
        expected_row("cleared", [], seen_rank),
    ]
    assert not batch.dropped


@pytest.mark.parametrize("rank_name", ["data_parallel_rank", "attn_dp_rank"])
@pytest.mark.parametrize("event", [STORED, ["BlockStored", [1, 2], None, list(range(8)), 4]])
def test_a_batch_as_a_map(rank_name: str, event: Any):
    batch = decode(msgspec.msgpack.encode({"events": [event], "new": [{}], rank_name: 2, "ts": 2}))
    assert batch == EventBatch(2.0, (STORED_VALUE,), 2)


# -- Hashes, tokens, missing fields --


@pytest.mark.parametrize("as_map", [True, False])
def test_hashes_become_unsigned(as_map: bool):
    hashes = [-1, -(2**63), 0, 2**64 - 1, b"", b"\x01", b"\xff" * 8, b"\x09" + b"\x00" * 7 + b"\x05", b"\x07" * 32]
    event = {"type": "BlockRemoved", "block_hashes": hashes} if as_map else ["BlockRemoved", hashes]
    sevens = 0x0707070707070707
    assert decode(frame(event)).events == (BlockRemoved((2**64 - 1, 2**63, 0, 2**64 - 1, 0, 1, 2**64 - 1, 5, sevens)),)


def test_the_parent_is_a_hash_too():
    for parent, value in [(-2, 2**64 - 2), (b"\x01\x00", 256), (2**64 - 1, 2**64 - 1)]:
        (event,) = decode(frame({**STORED, "parent_block_hash": parent})).events
        assert event == msgspec.structs.replace(STORED_VALUE, parent=value)


def test_missing_fields_are_empty():
    batch = decode(frame({"type": "BlockStored"}, ["BlockStored", [3]], {"type": "BlockRemoved"}, ["BlockRemoved"]))
    nothing = BlockStored((), None, (), 0)
    assert batch.events == (nothing, BlockStored((3,), None, (), 0), BlockRemoved(()), BlockRemoved(()))


def test_pairs_of_tokens_are_tokens_with_what_follows():
    pairs = [[10, 11], [11, 12], [12, 13], [13, 99]]
    (event,) = decode(frame({**STORED, "block_size": 2, "token_ids": pairs})).events
    assert event == BlockStored((1, 2), None, (10, 11, 12, 13), 2, lookahead_token_ids=((12,), (99,)))


def test_extra_keys_that_are_bytes_are_spelt_in_hexadecimal():
    (event,) = decode(frame({**STORED, "extra_keys": [["adapter", ["image", 3], b"\x00\xff"], None]})).events
    assert event == msgspec.structs.replace(STORED_VALUE, extra_keys=(("adapter", ("image", 3), "00ff"), None))


# -- One bad event --

BAD_EVENTS: list[tuple[Any, str]] = [
    ({"type": "BlockPinned", "block_hashes": [1]}, "unknown_event"),
    (["BlockPinned", [1]], "unknown_event"),
    ({"block_hashes": [1]}, "bad_field"),
    ([], "bad_field"),
    ({}, "bad_field"),
    ([7, [1]], "bad_field"),
    (None, "bad_field"),
    ("BlockStored", "bad_field"),
    (7, "bad_field"),
    ({**STORED, "block_hashes": 7}, "bad_field"),
    ({**STORED, "block_hashes": [1.5]}, "bad_field"),
    ({**STORED, "block_hashes": ["1"]}, "bad_field"),
    ({**STORED, "block_hashes": [None]}, "bad_field"),
    ({**STORED, "block_hashes": [True]}, "bad_field"),
    ({**STORED, "parent_block_hash": []}, "bad_field"),
    ({**STORED, "token_ids": [-1]}, "bad_field"),
    ({**STORED, "token_ids": [2**32]}, "bad_field"),
    ({**STORED, "token_ids": [[1, 2], 3]}, "bad_field"),
    ({**STORED, "token_ids": [[1, 2, 3]]}, "bad_field"),
    ({**STORED, "token_ids": [[1, -2]]}, "bad_field"),
    ({**STORED, "token_ids": "abc"}, "bad_field"),
    ({**STORED, "block_size": -1}, "bad_field"),
    ({**STORED, "block_size": None}, "bad_field"),
    ({**STORED, "block_size": MAX_BLOCK_SIZE + 1}, "too_large"),
    ({**STORED, "block_size": 2**63}, "too_large"),
    ({**STORED, "block_hashes": [0] * (MAX_BLOCKS + 1)}, "too_large"),
    ({**REMOVED, "block_hashes": [0] * (MAX_BLOCKS + 1)}, "too_large"),
    ({**STORED, "extra_keys": [[b"\x00" * (1 << 20)]]}, "too_large"),
    ({**STORED, "extra_keys": [[{}]]}, "bad_field"),
    ({**STORED, "extra_keys": [["a", [["b"]]]]}, "bad_field"),
    ({**STORED, "extra_keys": 1}, "bad_field"),
    ({**STORED, "lora_name": "x" * 2000}, "bad_field"),
    ({**STORED, "medium": 3}, "bad_field"),
    ({**STORED, "group_idx": -1}, "bad_field"),
    ({**REMOVED, "group_idx": "0"}, "bad_field"),
    (["BlockRemoved", [1], 5], "bad_field"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_EVENTS, ids=range(len(BAD_EVENTS)))
@pytest.mark.parametrize("as_map", [True, False])
def test_one_bad_event_is_one_drop(bad: Any, reason: str, as_map: bool):
    good = STORED if as_map else ["BlockStored", *list(STORED.values())[1:]]
    batch = decode(frame(good, bad, good))
    assert batch == EventBatch(1.5, (STORED_VALUE, STORED_VALUE), 0, {reason: 1})


def test_text_that_is_not_utf8_is_one_bad_field():
    broken = frame(STORED, {**STORED, "medium": "????"}, REMOVED).replace(b"????", b"\xff\xfe\xff\xfe")
    assert decode(broken) == EventBatch(1.5, (STORED_VALUE, BlockRemoved((1,))), 0, {"bad_field": 1})


# -- Frames that are no batch --


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "batch",
        b"",
        [],
        {},
        [1.0],
        ["1.0", []],
        [None, []],
        [1.0, None],
        [1.0, {}],
        [1.0, "events"],
        [1.0, [], "rank"],
        [1.0, [], -1],
        [1.0, [], 1 << 16],
        [1.0, [], True],
        {"ts": 1.0},
        {"ts": "1", "events": []},
        {"events": 3},
        [[1.0, [], 0]],
    ],
)
def test_what_is_no_batch_is_said_to_be_none(value: Any):
    with pytest.raises(UndecodableBatchError):
        decode(msgspec.msgpack.encode(value))


HEAD = b"\x93\xcb" + struct.pack(">d", 1.0)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        HEAD + b"\xdd\xff\xff\xff\xff",
        HEAD + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\x7f\xff\xff\xff",
        b"\x91" * 100_000,
        HEAD + b"\x91" * 100_000,
        HEAD + b"\x91\x82\xa4type\xb0AllBlocksCleared\xa1x" + b"\x91" * 100_000 + b"\x00\x00",
        HEAD + b"\xdd" + struct.pack(">I", MAX_EVENTS + 1) + b"\x00" * (MAX_EVENTS + 1) + b"\x00",
        frame(STORED) + b"\x00",
        bytes(MAX_FRAME_BYTES + 1),
    ],
    ids=range(12),
)
def test_frames_made_to_hurt(payload: bytes):
    with pytest.raises(UndecodableBatchError):
        decode(payload)


@pytest.mark.parametrize("ts", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("event", [STORED, ["BlockStored", [1, 2], None, list(range(8)), 4], ["AllBlocksCleared"], {}])
def test_a_time_that_is_no_number_is_zero(ts: float, event: Any):
    assert decode(frame(event, ts=ts)).timestamp == 0.0


# -- Anything at all --

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
hashes = st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=33), max_size=4)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=8)
plausible_fields = st.fixed_dictionaries(
    {"block_hashes": hashes},
    optional={
        "parent_block_hash": st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=33),
        "token_ids": tokens | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
        "block_size": st.integers(-1, 20),
        "lora_id": st.none() | st.integers(0, 9),
        "medium": st.none() | st.sampled_from(["GPU", "CPU"]),
        "lora_name": st.none() | st.text(max_size=4),
        "extra_keys": values | st.lists(st.none() | st.lists(st.text(max_size=3) | st.binary(max_size=3)), max_size=3),
        "group_idx": st.none() | st.integers(-1, 3),
        "session_id": values,
        "lookahead_token_ids": values,
        "new_field": values,
    },
)
types = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockPinned"])
map_events = st.builds(lambda kind, fields: {"type": kind, **fields}, types, plausible_fields)
array_events = st.builds(lambda kind, fields: [kind, *fields.values()], types, plausible_fields)
batches = st.builds(
    lambda ts, events, rest: [ts, events, *rest],
    st.floats() | st.integers(0, 2**40),
    st.lists(map_events, max_size=4)
    | st.lists(array_events, max_size=4)
    | st.lists(map_events | array_events | values, max_size=4),
    st.lists(st.none() | st.integers(0, 9) | values, max_size=2),
)


def outcome(decoder: Any, payload: bytes) -> Any:
    """Return the batch, or that there is none; any other exception is a failure."""
    try:
        return decoder(payload)
    except UndecodableBatchError:
        return None


def hold_to_bounds(batch: EventBatch) -> None:
    assert math.isfinite(batch.timestamp)
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            continue
        assert all(0 <= value < 2**64 for value in event.block_hashes)
        hash(event)  # values all the way down: nothing mutable is left inside
        if isinstance(event, BlockStored):
            assert event.parent is None or 0 <= event.parent < 2**64
            assert all(0 <= token < 2**32 for token in event.token_ids)
            assert 0 <= event.block_size <= MAX_BLOCK_SIZE


def check_frame(payload: bytes) -> None:
    """Whatever the frame, the quick ways and the careful one say the same, and what they say is in bounds."""
    quick, careful = outcome(decode, payload), outcome(decode_module._decode_each, payload)
    assert quick == careful
    if quick is not None:
        hold_to_bounds(quick)


@given(st.binary(max_size=200))
@example(HEAD + b"\x91\x91\xabBlockStored")
def test_arbitrary_bytes(payload: bytes):
    check_frame(payload)


@given(values)
def test_arbitrary_messages(value: Any):
    check_frame(msgspec.msgpack.encode(value))


@given(batches)
def test_plausible_batches(batch: Any):
    check_frame(msgspec.msgpack.encode(batch))


@given(st.sampled_from(sorted(FRAMES)), st.data())
def test_damaged_golden_frames(name: str, data: st.DataObject):
    payload = bytearray(FRAMES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1)) if payload else 0
        match data.draw(st.sampled_from(["set", "cut", "insert", "delete"])):
            case "set" if payload:
                payload[at] = data.draw(st.integers(0, 255))
            case "cut":
                del payload[at:]
            case "insert":
                payload[at:at] = data.draw(st.binary(max_size=6))
            case _:
                del payload[at : at + data.draw(st.integers(1, 9))]
    check_frame(bytes(payload))


@given(st.lists(st.sampled_from(range(len(BAD_EVENTS) + 2)), max_size=6), st.booleans())
def test_what_is_good_is_kept_in_order(picks: list[int], as_map: bool):
    """Any mixture of good and bad events: the good ones in their order, the bad ones counted."""
    small = [(event, reason) for event, reason in BAD_EVENTS if reason != "too_large"]
    good = [(STORED, STORED_VALUE), (REMOVED, BlockRemoved((1,)))]
    if not as_map:
        good = [(list(event.values()), value) for event, value in good]
    events, kept, dropped = [], [], 0
    for pick in picks:
        if pick < len(good):
            events.append(good[pick][0])
            kept.append(good[pick][1])
        else:
            events.append(small[pick % len(small)][0])
            dropped += 1
    batch = decode(frame(*events))
    assert batch.events == tuple(kept)
    assert sum(batch.dropped.values()) == dropped
