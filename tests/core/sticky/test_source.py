"""Where the key of a session stands, by the rules of Kthena's documentation; tokens made by the standard library."""

from __future__ import annotations

import base64
import json
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.sticky import Source, SourceType
from picker.core.sticky.source import MAX_TOKEN_BYTES, session_key

HEADER = Source(SourceType.HEADER, "X-Session-ID")
QUERY = Source(SourceType.QUERY, "session_id")
COOKIE = Source(SourceType.COOKIE, "session_sid")
CLAIM = Source(SourceType.JWT_CLAIM, "sid")


def bearer(claims, scheme="Bearer"):
    parts = [json.dumps(part).encode() if not isinstance(part, bytes) else part for part in ({"alg": "none"}, claims)]
    encoded = [base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (*parts, b"signature")]
    return {"authorization": f"{scheme} {'.'.join(encoded)}".encode()}


@pytest.mark.parametrize(
    ("source", "headers", "key"),
    [
        (HEADER, {"x-session-id": b" conv-1 "}, b"conv-1"),
        (HEADER, {"x-session-id": b"  "}, b""),
        (HEADER, {}, b""),
        (QUERY, {":path": b"/v1/completions?a=1&session_id=a%2Fb+c&session_id=d"}, b"a/b c"),
        (QUERY, {":path": b"/v1/completions?session_id=&session%5Fid=d#x"}, b"d"),
        (QUERY, {":path": b"/v1/completions?Session_Id=d"}, b""),
        (QUERY, {":path": b"/session_id=1"}, b""),
        (QUERY, {":path": b"/?session_id=%zz%f"}, b"%zz%f"),
        (COOKIE, {"cookie": b'a=b; session_sid="x=y"; session_sid=z'}, b"x=y"),
        (COOKIE, {"cookie": b"session_sid=; Session_Sid=2; session_sid=3"}, b"3"),
        (COOKIE, {"cookie": b";;=;session_sid"}, b""),
        (CLAIM, bearer({"sid": "s-1"}), b"s-1"),
        (CLAIM, bearer({"sid": "\u00fc\u00bf>?"}, "bearer"), "\u00fc\u00bf>?".encode()),
        (CLAIM, bearer({"sid": 42}), b"42"),
        (CLAIM, bearer({"sid": True}), b""),
        (CLAIM, bearer({"sid": ["a"]}), b""),
        (CLAIM, bearer({"sub": "s-1"}), b""),
        (CLAIM, bearer([1]), b""),
        (CLAIM, bearer(b'{"sid": "s-1"'), b""),
        (CLAIM, bearer(b'{"sid":' * 20_000), b""),
        (CLAIM, bearer({"sid": "s" * MAX_TOKEN_BYTES}), b""),
        (CLAIM, bearer({"sid": "s-1"}, "Basic"), b""),
        (CLAIM, {"authorization": b"Bearer a.b"}, b""),
        (CLAIM, {"authorization": b"Bearer a.\xff.c"}, b""),
    ],
)
def test_sources(source, headers, key):
    assert session_key([source], headers) == key


def test_the_first_that_has_something_wins():
    headers = {":path": b"/?session_id=query", "x-session-id": b"header", "cookie": b"session_sid=cookie"}
    assert session_key([HEADER, QUERY, COOKIE], headers) == b"header"
    assert session_key([CLAIM, COOKIE, HEADER], headers) == b"cookie"
    assert session_key([HEADER, QUERY], {**headers, "x-session-id": b""}) == b"query"
    assert session_key([], headers) == b""


@given(st.text(min_size=1), st.text(min_size=1))
def test_queries_are_read_as_they_are_written(name, value):
    try:
        path = "/v1?" + urlencode({"other": "x", name: value})
    except UnicodeEncodeError:
        return
    found = session_key([Source(SourceType.QUERY, name)], {":path": path.encode()})
    assert found == (b"x" if name == "other" and value == "x" else value.encode())


@given(st.binary(), st.sampled_from([QUERY, COOKIE, CLAIM, HEADER]), st.binary())
def test_no_bytes_raise(junk, source, more):
    for value in (junk, b"Bearer " + junk, b"Bearer a." + base64.urlsafe_b64encode(junk) + b"." + more, b"/?" + junk):
        headers = dict.fromkeys((":path", "cookie", "authorization", "x-session-id"), value)
        assert isinstance(session_key([source], headers), bytes)
