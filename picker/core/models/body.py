"""Change the model in a body and nothing else, byte for byte."""

from __future__ import annotations

import re

import msgspec
import numpy as np
from msgspec import Raw, Struct

_KEY = b'"model"'
_SPACE = b" \t\r\n"
_MOST_SPACE = 8
"""Spaces on either side of the colon; engines write none or one."""


class _Body(Struct, gc=False):
    model: Raw = Raw()


_decode = msgspec.json.Decoder(_Body).decode


def model_of(body: bytes) -> str | None:
    """The top-level `model` of a body; None when it has none that is text."""
    try:
        value = _decode(body).model
        return msgspec.json.decode(value, type=str) if memoryview(value) else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def replace_model(body: bytes, model: str) -> bytes | None:
    """The body with another value of its top-level `model`; None for a body that is no JSON object, or has none.

    Of several the last is replaced, which is the one that engines read.
    """
    try:
        value = memoryview(_decode(body).model)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not value:
        return None
    # A Raw is a view of the body that was decoded; where it lies is where the value begins.
    start = _address(value) - _address(memoryview(body))
    return b"".join((body[:start], msgspec.json.encode(model), body[start + len(value) :]))


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class ModelRestorer:
    """Puts the name that the client asked for into a response that comes in pieces.

    Works on JSON and on server-sent events without decoding them: a key `"model"` with the target as its value is replaced,
    wherever it stands. Within a JSON string the quotes would be escaped, so that text an engine generated is never
    touched. The end of a piece is held back only while it could be the beginning of such a pair.
    """

    def __init__(self, target: str, name: str) -> None:
        self._target = msgspec.json.encode(target)
        self._name = msgspec.json.encode(name)
        space = b"[ \t\r\n]{0,%d}" % _MOST_SPACE
        self._pair = re.compile(rb"(?<!\\)(" + _KEY + space + b":" + space + b")" + re.escape(self._target))
        self._longest = len(_KEY) + 2 * _MOST_SPACE + 1 + len(self._target)
        self._before = b""
        """The last byte that went out, since a backslash there escapes a quote."""
        self._held = b""
        self.replaced = 0

    def feed(self, data: bytes, *, end: bool) -> bytes:
        """The part of the response that can go out now. `end` says that no more will come."""
        start = len(self._before)
        text = self._before + self._held + data
        out: list[bytes] = []
        for found in self._pair.finditer(text, start):
            out += (text[start : found.start()], found[1], self._name)
            start = found.end()
            self.replaced += 1
        until = len(text) if end else self._certain(text, start)
        out.append(text[start:until])
        self._held = text[until:]
        self._before = text[until - 1 : until] if until else b""
        return b"".join(out)

    def _certain(self, text: bytes, start: int) -> int:
        """Up to where no pair begins that the next piece could complete."""
        at = max(start, len(text) - self._longest)
        while (at := text.find(b'"', at)) >= 0:
            if self._could_begin(text[at:]):
                return at
            at += 1
        return len(text)

    def _could_begin(self, tail: bytes) -> bool:
        if len(tail) <= len(_KEY):
            return _KEY.startswith(tail)
        if not tail.startswith(_KEY):
            return False
        rest = tail[len(_KEY) :].lstrip(_SPACE)
        return not rest or (rest[:1] == b":" and self._target.startswith(rest[1:].lstrip(_SPACE)))
