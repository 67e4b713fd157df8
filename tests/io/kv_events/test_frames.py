"""Messages as released engines send them, and as nobody does."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.io.kv_events.frames import Frame, MalformedFrameError, parse_live, parse_replay, replay_request

SEQUENCE = b"\0\0\0\0\0\0\1\2"


def test_a_live_message_has_topic_sequence_and_payload() -> None:
    assert parse_live([b"kv", SEQUENCE, b"p"]) == Frame(b"kv", 258, b"p")
    assert parse_live([b"", SEQUENCE, b"p"]) == Frame(b"", 258, b"p")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"", SEQUENCE, b"p"], Frame(None, 258, b"p")),  # vLLM up to 0.25
        ([b"", b"kv", SEQUENCE, b"p"], Frame(b"kv", 258, b"p")),  # vLLM from 0.26
        ([b"", b"", SEQUENCE, b"p"], Frame(b"", 258, b"p")),
        ([b"", b"\xff" * 8, b""], None),
        ([b"", b"", b"\xff" * 8, b""], None),
    ],
)
def test_replays_come_with_and_without_topic(parts: list[bytes], expected: Frame | None) -> None:
    assert parse_replay(parts) == expected


def test_a_replay_is_asked_with_an_empty_delimiter() -> None:
    assert replay_request(258) == [b"", SEQUENCE]


@given(st.lists(st.one_of(st.binary(max_size=9), st.just(b""), st.just(SEQUENCE)), max_size=6))
def test_anything_else_is_malformed_and_nothing_worse(parts: list[bytes]) -> None:
    for parse in (parse_live, parse_replay):
        with suppress(MalformedFrameError):
            frame = parse(parts)
            if frame is not None:
                assert frame.sequence is None or 0 <= frame.sequence < 1 << 63
                assert frame.payload == parts[-1]
