"""What sidecars and routers say to each other, ours and other spellings of it."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.kv_events.events import BlockRemoved, BlockStored, EventBatch
from picker.core.kv_index.ownership import Cleared, Ownership, Removed, Stored
from picker.core.kv_index.stream_protocol import (
    LINE_BLOCKS,
    BlocksStored,
    EngineBatch,
    EngineBegins,
    Extended,
    LineError,
    RegistrationError,
    Unknown,
    change_lines,
    extension_line,
    parse_line,
    parse_registration,
    registration,
    snapshot_lines,
)

ONE_TWO_THREE_FOUR = 4233425515844289900


def lines(generator) -> list[dict]:
    raw = list(generator)
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in raw)
    return [json.loads(line) for line in raw]


def test_a_snapshot_says_all_with_store_times():
    ownership = Ownership("m")
    ownership.apply(0, [BlockStored((1,), None, (1, 2, 3, 4), 4)], 1_700_000_000.7)
    assert lines(snapshot_lines("pod.ns", ownership)) == [
        {
            "pod_identifier": "pod.ns",
            "model_name": "m",
            "events": [
                {"type": "snapshot", "block_hashes": [ONE_TWO_THREE_FOUR], "timestamps": [1_700_000_000]},
            ],
        }
    ]


def test_a_model_without_blocks_has_an_empty_snapshot():
    (line,) = lines(snapshot_lines("pod.ns", Ownership("m")))
    assert line["events"] == [{"type": "snapshot", "block_hashes": [], "timestamps": []}]


def test_a_long_snapshot_goes_on_as_stores():
    ownership = Ownership("m")
    count = LINE_BLOCKS + 5
    ownership.apply(0, [BlockStored(tuple(range(count)), None, tuple(range(count)), 1)], 5)
    first, second = lines(snapshot_lines("pod.ns", ownership))
    assert (first["events"][0]["type"], second["events"][0]["type"]) == ("snapshot", "stored")
    assert len(second["events"][0]["block_hashes"]) == len(second["events"][0]["timestamps"]) == 5


def test_changes():
    changes = [Removed("m", (1, 2)), Cleared("n", (3,)), Stored("m", (4,), 77)]
    assert [line["events"] for line in lines(change_lines("pod.ns", changes))] == [
        [{"type": "removed", "block_hashes": [1, 2]}],
        [{"type": "cleared"}],
        [{"type": "stored", "block_hashes": [4], "timestamp": 77}],
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            '{"model_name":"m","events":[{"type":"snapshot","block_hashes":[1,2],"timestamps":[5,6]}]}',
            [BlocksStored("m", (1, 2), (5, 6), replace=True)],
        ),
        (
            '{"model":"m","type":"stored","block_hashes":[18446744073709551615],"timestamp":5.5}',
            [BlocksStored("m", (18446744073709551615,), (5.5,))],
        ),
        ('{"model_name":"m","events":[{"type":"stored","block_hashes":[1]}]}', [BlocksStored("m", (1,), (0,))]),
        ('{"model_name":"m","type":"removed","block_hashes":[3]}', [Removed("m", (3,))]),
        ('{"pod_identifier":"x","model_name":"m","events":[{"type":"cleared","why":1}]}', [Cleared("m", ())]),
        ('{"model_name":"m","events":[{"type":"heartbeat"}]}', []),
        ('{"type":"ping"}', []),
        ('{"type":"heartbeat","timestamp":1}', []),
        ("{}", []),
        ('{"type":"evicted","block_hashes":"all"}', "malformed"),
        ('{"type":"evicted"}', [Unknown()]),
        ('{"model_name":"m","events":[{"type":"later","block_hashes":"all"},{"type":"cleared"}]}', [Unknown(), Cleared("m", ())]),
        ('{"model_name":"m","events":[{"type":"stored","block_hashes":[1,2],"timestamps":[5]}]}', "timestamps"),
        ('{"model_name":"m","events":[{"type":"stored","block_hashes":[-1]}]}', "malformed"),
        ('{"model_name":"m","events":[{"type":"stored","block_hashes":[18446744073709551616]}]}', "malformed"),
        ('{"model_name":"m","events":[{"type":"stored","block_hashes":["1"]}]}', "malformed"),
        ('{"model_name":"m","events":[{}]}', "malformed"),
        ("[]", "malformed"),
        ("{", "malformed"),
        ("[" * 100_000, "malformed"),
        ('{"a":' + "[" * 100_000, "malformed"),
        ('{"model_name":"\xff"}'.encode("latin-1"), "malformed"),
    ],
)  # fmt: skip
def test_lines_of_others(line, expected):
    raw = line if isinstance(line, bytes) else line.encode()
    if isinstance(expected, str):
        with pytest.raises(LineError, match=expected):
            parse_line(raw)
    else:
        assert parse_line(raw) == expected


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_line_is_messages_or_an_error(line):
    with suppress(LineError):
        parse_line(line)


def test_the_engines_own_events_survive():
    events = (
        BlockStored(
            (2**64 - 1, 5), 7, (1, 2, 3, 4), 2, lora_name="a", extra_keys=(("a", ("mm", 3)), None), medium="CPU"
        ),
        BlockRemoved((9,), group_idx=1),
    )
    assert parse_line(extension_line(version=1)) == [Extended()]
    assert parse_line(extension_line(rank=3, begin=0)) == [EngineBegins(3, 0)]
    assert parse_line(extension_line(rank=3, ts=5.5, events=events)) == [EngineBatch(3, EventBatch(5.5, events, 3))]


def test_registrations():
    assert json.loads(registration("ns/pod", extended=False)) == {"router_id": "ns/pod"}
    extended = parse_registration(registration("ns/pod", extended=True))
    assert (extended.router_id, extended.accept) == ("ns/pod", ["picker/1"])
    older = parse_registration(
        b'{"router_id":"r","endpoint":"http://10.0.0.1:9080","generation":"00","ttl_seconds":90}'
    )
    assert older.router_id == "r"
    for body in (b'{"router_id":""}', b'{"router_id":"  "}'):
        with pytest.raises(RegistrationError, match="router_id must not be empty"):
            parse_registration(body)
    for body in (b"", b"{", b"[]", b'{"router_id":5}', b"{}", b'{"router_id":"a\\nb"}', b"[" * 99999):
        with pytest.raises(RegistrationError):
            parse_registration(body)
