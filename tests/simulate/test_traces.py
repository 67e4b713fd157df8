"""Traces: Mooncake's format, chat requests, and lines that are neither."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.simulate import traces
from picker.simulate.workload import Call, packed

MOONCAKE = b"""\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]}
"""
"""Two lines in the form of the published traces: their first twelve blocks of 512 tokens are the same."""


def lines(*values: Any) -> list[bytes]:
    return [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]


def calls(*values: Any, **options: Any) -> list[Call]:
    return [session.calls[0] for session in traces.read("t", lines(*values), **options).workload.sessions]


def common(one: Call, other: Call) -> int:
    """Tokens of the longest common prefix, found byte by byte."""
    first, second = packed(one.prompt), packed(other.prompt)
    same = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return same // 4


def test_mooncake() -> None:
    trace = traces.read("conversation", MOONCAKE.splitlines())
    first, second = trace.workload.sessions
    assert (first.start, second.start) == (0.0, pytest.approx(3.053))
    assert [call.prompt_tokens for call in (first.calls[0], second.calls[0])] == [6955, 6472]
    assert [len(session.calls[0].answer) for session in (first, second)] == [52, 26]
    assert common(first.calls[0], second.calls[0]) == 12 * 512
    assert trace.skipped == {}
    assert trace.workload.end >= second.start
    assert trace.workload.warm == 0


def test_tokens_that_no_number_covers_are_unique() -> None:
    line = {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [7]}
    one, other = calls(line, line)
    assert one.prompt_tokens == other.prompt_tokens == 1000
    assert common(one, other) == 512


def test_numbers_beyond_the_length_do_not_count() -> None:
    (call,) = calls({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2, 3, -4, 10**30]})
    assert call.prompt_tokens == 600


def test_lines_come_in_any_order_and_at_another_speed() -> None:
    def line(time: float, answer: int) -> dict[str, Any]:
        return {"timestamp": time, "input_length": 1, "output_length": answer, "hash_ids": []}

    trace = traces.read("t", lines(line(5000, 1), line(1000, 2), line(3000, 3)), speed=4.0)
    assert [(session.start, len(session.calls[0].answer)) for session in trace.workload.sessions] == [
        (0.0, 2),
        (0.5, 3),
        (1.0, 1),
    ]


def test_no_more_requests_than_asked_for() -> None:
    line = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}
    assert len(calls(*[line] * 10, requests=3)) == 3


def test_chat_requests_share_what_their_texts_share() -> None:
    def chat(question: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": "be brief " * 100}, {"role": "user", "content": question}]
        return {"timestamp": 0, "model": "m", "messages": messages, **more}

    one, other = calls(chat("why?", output_length=7), chat("how?", max_tokens=9))
    assert (len(one.answer), len(other.answer)) == (7, 9)
    assert one.model == "m"
    assert 225 <= common(one, other) <= one.prompt_tokens


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 6}, 6),
        ({}, 256),
        ({"max_tokens": "x"}, 256),
        ({"max_tokens": -1}, 256),
    ],
)
def test_bodies_of_their_own(more: dict[str, Any], answer: int) -> None:
    bodies = ({"messages": [{"role": "user", "content": "hello"}], **more}, {"prompt": "hello", **more})
    for call in calls(*({"timestamp": 1, "body": body} for body in bodies)):
        assert len(call.answer) == answer
        assert b"hello" in packed(call.prompt)


def test_a_path_says_what_a_body_is() -> None:
    body = {"instructions": "be brief", "input": "hello"}
    (call,) = calls({"timestamp": 1, "path": "/v1/responses", "body": body})
    assert b"be brief" in packed(call.prompt)


GOOD = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}


@pytest.mark.parametrize(
    ("line", "reason", "said"),
    [
        (b"{", "no_json", "line 2"),
        (b"\xff\xfe", "no_json", "line 2"),
        (b'{"a": ' + b"[" * 100_000, "no_json", "line 2"),
        (b"[]", "wrong_field", "object"),
        (b"1", "wrong_field", "object"),
        ({**GOOD, "input_length": 0}, "wrong_field", "input_length"),
        ({**GOOD, "input_length": 10**12}, "wrong_field", "input_length"),
        ({**GOOD, "output_length": -3}, "wrong_field", "output_length"),
        ({**GOOD, "output_length": "3"}, "wrong_field", "output_length"),
        ({**GOOD, "timestamp": None}, "wrong_field", "timestamp"),
        ({**GOOD, "timestamp": 1e300}, "wrong_field", "timestamp"),
        ({**GOOD, "hash_ids": ["a"]}, "wrong_field", "hash_ids"),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}', "no_json", "line 2"),
        ({"input_length": 1, "output_length": 1, "hash_ids": []}, "wrong_field", "timestamp"),
        ({"timestamp": 0}, "prompt_wrong_type", "no prompt"),
        ({"timestamp": 0, "messages": []}, "prompt_empty_prompt", "no prompt"),
        ({"timestamp": 0, "body": "x"}, "wrong_field", "object"),
        ({"timestamp": 0, "path": "/v1/embeddings", "body": {"input": "x"}}, "prompt_unknown_path", "no prompt"),
    ],
)
def test_a_line_that_cannot_be_used_is_left_out_and_counted(line: Any, reason: str, said: str) -> None:
    trace = traces.read("t", lines(GOOD, line, b"  ", GOOD))
    assert len(trace.workload.sessions) == 2
    assert trace.skipped == {reason: 1}
    assert trace.first.startswith("line 2: ")
    assert said in trace.first
    with pytest.raises(traces.TraceError, match="line 1"):
        traces.read("t", lines(line))


def test_a_trace_without_lines_is_none() -> None:
    with pytest.raises(traces.TraceError, match="no lines"):
        traces.read("t", [b"\n"])


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
fields = st.sampled_from(
    ["timestamp", "input_length", "output_length", "hash_ids", "body", "messages", "prompt", "path"]
)


@given(st.lists(st.binary(max_size=30) | st.dictionaries(fields, values).map(lambda line: json.dumps(line).encode())))
def test_whatever_the_lines_are(hostile: list[bytes]) -> None:
    trace = traces.read("t", [*hostile, json.dumps(GOOD).encode()])
    blank = sum(not line.strip() for line in hostile)
    assert len(trace.workload.sessions) + sum(trace.skipped.values()) + blank == len(hostile) + 1
    assert all(session.start >= 0 and session.calls[0].prompt_tokens >= 1 for session in trace.workload.sessions)
