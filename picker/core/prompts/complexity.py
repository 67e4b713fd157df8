"""Whether a body is JSON of so many small parts that building it would hold up all other requests.

A part costs some hundred bytes and nanoseconds, however short it is written: a body of millions of empty lists stops
the event loop for seconds, where one of long texts and the same size takes milliseconds.
"""

from __future__ import annotations

MAX_PARTS = 100_000
"""Strings, lists and objects that are built of one body, those inside each other and keys included."""

MAX_COMMAS = 1_000_000
"""Bounds numbers, which are cheap: token ids of the longest contexts there are."""


def too_complex(body: bytes) -> bool:
    """Return whether JSON has more than `MAX_PARTS` parts or `MAX_COMMAS` commas; what texts contain does not count.

    Of bytes that are no JSON, a decoder builds no more than is counted here before it finds out.
    """
    if len(body) <= MAX_PARTS:
        return False
    brackets_and_quotes = len(body) - len(body.translate(None, b'{["'))
    if brackets_and_quotes <= MAX_PARTS and body.count(b",") <= MAX_COMMAS:
        return False
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = body.count(b'"') // 2
    if strings > MAX_PARTS:
        return True
    bare = b"".join(body.split(b'"')[::2])
    brackets = len(bare) - len(bare.translate(None, b"{["))
    return strings + brackets > MAX_PARTS or bare.count(b",") > MAX_COMMAS
