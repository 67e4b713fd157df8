"""Usage out of responses: shapes of the APIs, any cut into pieces, content codings, hostile bytes."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from itertools import pairwise
from pathlib import Path

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from picker.core.usage import Drop, Usage, UsageReader
from picker.core.usage.documents import MAX_DOCUMENT_BYTES, EventStream
from picker.core.usage.reply import MAX_ID_CHARACTERS, MAX_REPLY_CHARACTERS
from picker.sim.answers import ChatAnswer, CompletionAnswer, MessagesAnswer, ResponsesAnswer
from picker.sim.answers import Usage as Spent
from picker.sim.openai import Call

RESPONSES = Path(__file__).parents[2] / "data" / "responses"
EXPECTED = json.loads((RESPONSES / "expected.json").read_text())
NAMES = sorted(EXPECTED)
EVENTS = b"text/event-stream"


def bare_deflate(data):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def two_members(data):
    return gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])


CODINGS = [
    (b"gzip", gzip.compress),
    (b"GZIP", two_members),
    (b"deflate", zlib.compress),
    (b"deflate", bare_deflate),
    (b"br", brotli.compress),
    (b"zstd", zstandard.compress),
]


def read(pieces, content_type=EVENTS, coding=b"", path="/v1/chat/completions", *, keep_reply=True):
    reader = UsageReader(content_type, coding, path, keep_reply=keep_reply)
    for piece in pieces:
        reader.feed(piece)
    return reader.result(), reader.drops


def read_file(name, pieces=None, coding=b"", *, keep_reply=True):
    told = EXPECTED[name]
    body = (RESPONSES / name).read_bytes()
    return read(pieces or [body], told["content_type"].encode(), coding, told["path"], keep_reply=keep_reply)


def expected(name, *, keep_reply=True):
    told = EXPECTED[name]
    counts = told["prompt_tokens"], told["cached_tokens"], told["completion_tokens"]
    reply = (told["reply"] or "").encode() if keep_reply else b""
    response_id = told.get("response_id", "") if keep_reply else ""
    return None if counts == (None,) * 3 and not reply else Usage(*counts, reply, told["model"], response_id)


def cut(data, places):
    bounds = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize("keep_reply", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_of_all_apis(name, keep_reply):
    assert read_file(name, keep_reply=keep_reply)[0] == expected(name, keep_reply=keep_reply)


@pytest.mark.parametrize("keep_reply", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_cut_in_two_anywhere_and_byte_by_byte(name, keep_reply):
    body = (RESPONSES / name).read_bytes()
    whole = read_file(name, keep_reply=keep_reply)
    for at in range(len(body)):
        assert read_file(name, [body[:at], body[at:]], keep_reply=keep_reply) == whole
    assert read_file(name, [bytes([byte]) for byte in body], keep_reply=keep_reply) == whole


@given(name=st.sampled_from(NAMES), coding=st.sampled_from(CODINGS), places=st.lists(st.integers(0, 5000)))
def test_content_codings_cut_anywhere(name, coding, places):
    packed = coding[1]((RESPONSES / name).read_bytes())
    assert read_file(name, cut(packed, places), coding[0]) == read_file(name)


PARTS = [b"data:", b"data", b" ", b"\n", b"\r", b"\xef\xbb\xbf", b":", b"[DONE]", b'{"usage":', b"{", b"}", b"7,", b'"']
PARTS += [b'"prompt_tokens":', b'"choices":[{"delta":{"content":"a"},"finish_reason":"x"}]', b'"x":"\\']


@given(
    body=st.one_of(st.binary(max_size=400), st.lists(st.sampled_from(PARTS)).map(b"".join)),
    places=st.lists(st.integers(0, 400)),
    content_type=st.sampled_from([EVENTS, b"application/json", b"", b"text/html"]),
    coding=st.sampled_from([b"", b"identity", b"gzip", b"deflate", b"br", b"zstd", b"gzip, br", b"\xff"]),
    path=st.sampled_from(["/v1/completions", "/v1/messages", "/v1/responses", "/generate", ""]),
    keep_reply=st.booleans(),
)
def test_no_bytes_raise_and_no_cut_matters(body, places, content_type, coding, path, keep_reply):
    whole = read([body], content_type, coding, path, keep_reply=keep_reply)
    assert read(cut(body, places), content_type, coding, path, keep_reply=keep_reply) == whole


def by_the_standard(text):
    """Data of events, read character by character as the HTML standard says it; the last needs no empty line."""
    events, data, line = [], None, ""
    for character in text.replace("\r\n", "\n").replace("\r", "\n") + "\n\n":
        if character != "\n":
            line += character
            continue
        name, _, value = line.partition(":")
        if not line and data is not None:
            events.append("\n".join(data))
            data = None
        elif name == "data":
            data = [*(data or []), value[1:] if value[:1] == " " else value]
        line = ""
    return events


@given(
    parts=st.lists(st.sampled_from(["data", "data:", "data: ", "id:", ":", "\n", "\r", "\r\n", "a", "é", " "])),
    places=st.lists(st.integers(0, 100)),
)
def test_events_are_cut_out_as_the_standard_says(parts, places):
    stream = EventStream()
    text = "".join(parts)
    documents = [document for piece in cut(text.encode(), places) for document in stream.feed(piece)]
    documents += stream.end()
    assert [document.data.decode() for document in documents] == by_the_standard(text)


@given(places=st.lists(st.integers(0, 10_000)), texts=st.lists(st.text(max_size=20), min_size=1, max_size=8))
@pytest.mark.parametrize(
    ("answers", "path"),
    [
        (CompletionAnswer, "/v1/completions"),
        (ChatAnswer, "/v1/chat/completions"),
        (ResponsesAnswer, "/v1/responses"),
        (MessagesAnswer, "/v1/messages"),
    ],
)
def test_what_the_simulated_engine_sends(answers, path, places, texts):
    call = Call("m", (), len(texts), stream=True, include_usage=True)
    spent = Spent(prompt=50, completion=len(texts), cached=32)
    text = "".join(texts)
    told = Usage(50, 32, len(texts), text.encode(), "m", "id" if path == "/v1/responses" else "")
    assert read([answers(call, "id", "m", 1).whole([text], spent)], b"application/json", b"", path) == (told, {})
    answer = answers(call, "id", "m", 1)
    stream = answer.opening([spent])
    for number, piece in enumerate(texts, 1):
        stream += answer.delta(0, piece, spent, last=number == len(texts))
    stream += answer.closing([text], spent)
    assert read(cut(stream, places), EVENTS, b"", path) == (told, {})


def test_a_body_that_is_too_long_still_tells_its_usage():
    usage = b'"usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}'
    inside = json.dumps('"usage":{"prompt_tokens":1}').encode()
    long = b'{"model":"m","choices":[{"message":{"content":"%s"}}],%s,"x":[%s,"\xff"]}'
    body = long % (b"a" * MAX_DOCUMENT_BYTES, usage, inside)
    told = (Usage(9, 5, 4), {Drop.DOCUMENT_TOO_LONG: 1, Drop.REPLY_TOO_LONG: 1})
    assert read([body], b"application/json") == told
    assert read(cut(body, range(0, len(body), 40_000)), b"application/json") == told
    for pieces in ([b"data: " + body + b"\r\n\r\n"], cut(b"data: " + body + b"\n\n", range(0, len(body), 30_000))):
        assert read(pieces) == told
    several_lines = (
        (b"data: " + b"1" * 500 + b"\n") * (MAX_DOCUMENT_BYTES // 500) + b"data: " + body[-10_000:] + b"\n\n"
    )
    assert read([several_lines]) == told


def test_a_reply_that_is_too_long_is_not_kept_but_its_usage_is():
    piece = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % (b"a" * 1000)
    end = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
    assert read([piece] * (MAX_REPLY_CHARACTERS // 1000 + 1) + [end]) == (
        Usage(prompt_tokens=1),
        {Drop.REPLY_TOO_LONG: 1},
    )


@pytest.mark.parametrize("coding", CODINGS)
def test_bombs_are_given_up_in_bounded_memory(coding):
    packed = coding[1](b"data:" + b"a" * (64 << 20))
    tracemalloc.start()
    try:
        usage, drops = read([packed], EVENTS, coding[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (usage, drops) == (None, {Drop.EXPANDS_TOO_MUCH: 1})
    assert peak < 16 << 20


@pytest.mark.parametrize("coding", CODINGS)
def test_what_came_before_a_coding_broke_is_told(coding):
    packed = coding[1](
        (RESPONSES / "no-usage.sse").read_bytes() + (RESPONSES / "vllm-chat-continuous.sse").read_bytes()
    )
    usage, drops = read([packed, b"!" * 50], EVENTS, coding[0])
    assert (usage.prompt_tokens, usage.completion_tokens) == (12, 2)
    assert drops in ({}, {Drop.CORRUPT_ENCODING: 1})


@pytest.mark.parametrize("line", [b"\n", b"\r", b"data:1\n", b"data:\r\n", b":\n\n"])
def test_lines_without_content_are_given_up(line):
    assert read([line * 40_000])[1] == {Drop.TOO_MANY_LINES: 1}
    assert read([line] * 40_000)[1] == {Drop.TOO_MANY_LINES: 1}


def test_codings_and_types_that_are_not_read_are_counted_once():
    assert read([b"x"] * 3, EVENTS, b"compress") == (None, {Drop.CONTENT_ENCODING: 1})
    assert read([b"x"] * 3, EVENTS, b"gzip, gzip") == (None, {Drop.CONTENT_ENCODING: 1})
    assert read([b"x"] * 3, b"text/plain") == (None, {Drop.CONTENT_TYPE: 1})
    assert read([b"x"] * 3, EVENTS, b"gzip") == (None, {Drop.CORRUPT_ENCODING: 1})


@pytest.mark.parametrize(
    ("usage", "told", "drops"),
    [
        (
            b'{"prompt_tokens":4,"prompt_tokens_details":{"cached_tokens":5}}',
            Usage(prompt_tokens=4),
            {Drop.WRONG_TYPE: 1},
        ),
        (b'{"prompt_tokens":-4}', None, {Drop.WRONG_TYPE: 1}),
        (b'{"prompt_tokens":1e300}', None, {Drop.WRONG_TYPE: 1}),
        (b'{"prompt_tokens":"4"}', None, {Drop.WRONG_TYPE: 1}),
        (b"[]", None, {Drop.WRONG_TYPE: 1}),
        (b"nul", None, {Drop.INVALID_JSON: 1}),
        (b"[" * 100_000, None, {Drop.WRONG_TYPE: 1}),
        (b'{"x":' * 100_000, None, {Drop.INVALID_JSON: 1}),
        (b"null", None, {}),
    ],
)
def test_nonsense_is_counted_and_does_no_harm(usage, told, drops):
    assert read([b'data: {"usage":%s}\n\n' % usage], keep_reply=False) == (told, drops)


def test_nothing_is_said_twice_and_nothing_after_the_result():
    reader = UsageReader(EVENTS, b"", "/v1/chat/completions", keep_reply=True)
    reader.feed((RESPONSES / "vllm-chat-reasoning.sse").read_bytes())
    assert reader.result() is reader.result()
    assert reader.drops == {Drop.REPLY_NOT_TEXT: 1}
    reader.feed(b'data: {"usage":{"prompt_tokens":1}}\n\n')
    assert reader.result().prompt_tokens == 12


def answered(status="completed", **fields):
    text = {"type": "output_text", "text": "Four."}
    return {"status": status, "output": [{"type": "message", "content": [text]}], **fields}


def read_response(response, path="/v1/responses"):
    body = json.dumps(response).encode()
    whole = read([body], b"application/json", b"", path)
    event = json.dumps({"type": "response.completed", "response": response}).encode()
    assert read([b"event: response.completed\ndata: " + event + b"\n\n"], EVENTS, b"", path) == whole
    return whole


@pytest.mark.parametrize("identity", [5, 1.5, True, ["a"], {"id": "a"}, "x" * (MAX_ID_CHARACTERS + 1), "x" * 200_000])
def test_what_is_no_id_of_a_response_is_counted_and_costs_nothing_else(identity):
    assert read_response(answered(id=identity)) == (Usage(reply=b"Four."), {Drop.RESPONSE_ID: 1})


def test_only_what_a_later_request_can_name_has_an_id():
    longest = "x" * MAX_ID_CHARACTERS
    assert read_response(answered(id=longest)) == (Usage(reply=b"Four.", response_id=longest), {})
    cut_short = Usage(reply=b"Four.", response_id="resp_1")
    assert read_response(answered("incomplete", id="resp_1")) == (cut_short, {})
    for status in ("failed", "cancelled", "in_progress", "queued"):
        assert read_response(answered(status, id="resp_1")) == (None, {})
    for identity in (None, ""):
        assert read_response(answered(id=identity)) == (Usage(reply=b"Four."), {})
    assert read_response({**answered(id="msg_1"), "content": []}, "/v1/messages")[0] is None
    begun = {"type": "response.created", "response": answered("in_progress", id="resp_1", output=[])}
    assert read([b"data: " + json.dumps(begun).encode() + b"\n\n"], EVENTS, b"", "/v1/responses")[0] is None


def test_a_response_that_is_more_than_a_text_has_its_id():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    usage, drops = read_response(answered(id="resp_1", output=[call], usage={"input_tokens": 9}))
    assert (usage, drops) == (Usage(9, response_id="resp_1"), {Drop.REPLY_NOT_TEXT: 1})
