"""Messages about headers and bodies read from their bytes, and pieces of body written as bytes: no protobuf objects.

Only for the encoding that Envoy uses, in which what happened comes first and each field once. `read` returns None for
anything else, which is then for protobuf to judge. Field numbers and types are those of proto/.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from picker.core.exchange.effects import Side, StreamedBody
from picker.core.exchange.events import Event, RequestBody, RequestHeaders, ResponseBody, ResponseHeaders
from picker.io.extproc.context import MOST_REMEMBERED, Observed, context_of, remembered_context
from picker.io.extproc.header_fields import HeaderFields

_REQUEST_HEADERS: Final = 0x12
_RESPONSE_HEADERS: Final = 0x1A
_REQUEST_BODY: Final = 0x22
_RESPONSE_BODY: Final = 0x2A
_CONTENT: Final = 0x0A
"""Field 1: the HeaderMap of headers, the bytes of a body."""
_BODY_ENDS: Final = b"\x10\x01"
_HEADERS_END: Final = b"\x18\x01"
_REPLY_BODY: Final = {Side.REQUEST: 0x1A, Side.RESPONSE: 0x22}
_ONE_BYTE: Final = 0x7F
"""The largest number that takes one byte."""
_MORE: Final = 0x80
_LENGTH_BITS: Final = 35
_STATUS_DIGITS: Final = 3
_AROUND_BODY: Final = (0x1A, 0x1A, 0x0A)
"""Tags from the inside: `streamed_response` of a BodyMutation of a CommonResponse of a BodyResponse."""


def read(data: bytes) -> Event | Observed | None:
    """Read one ProcessingRequest; None when it is not as simple as most."""
    try:
        tag, size, start = data[0], data[1], 2
        if size > _ONE_BYTE:
            high, start = data[2], 3
            if high > _ONE_BYTE:
                size, start = _long(data, 1)
            else:
                size += (high << 7) - _MORE
        end = start + size
        tail = data[end:]
        context = remembered_context(tail) if len(tail) <= MOST_REMEMBERED else context_of(tail)
        if context is None or end > len(data):
            return None
        at = until = start
        if size and data[start] == _CONTENT:
            size, at = data[start + 1], start + 2
            if size > _ONE_BYTE:
                high, at = data[start + 2], start + 3
                if high > _ONE_BYTE:
                    size, at = _long(data, start + 1)
                else:
                    size += (high << 7) - _MORE
            until = at + size
    except IndexError:
        return None
    content, ends = data[at:until], until != end
    if until > end or (ends and data[until:end] != (_BODY_ENDS if tag >= _REQUEST_BODY else _HEADERS_END)):
        return None
    event: Event
    if tag == _RESPONSE_BODY:
        event = ResponseBody(content, ends, context.protocol)
    elif tag == _REQUEST_BODY:
        event = RequestBody(content, ends, context.subset, context.protocol)
    elif tag == _REQUEST_HEADERS:
        event = RequestHeaders(HeaderFields(content), ends, context.subset, context.protocol)
    elif tag == _RESPONSE_HEADERS:
        fields = HeaderFields(content)
        event = ResponseHeaders(status_of(fields), ends, context.served, context.protocol, fields)
    else:
        return None
    return Observed(event) if context.observed else event


def status_of(headers: Mapping[str, bytes]) -> int | None:
    """The status of a response; None when it is none."""
    value = headers.get(":status", b"")
    return int(value) if len(value) == _STATUS_DIGITS and value.isdigit() else None


def streamed_body(reply: StreamedBody) -> bytes:
    """Write a ProcessingResponse with a piece of body."""
    data, ends = reply.data, reply.end_of_stream
    head = _head(reply.side, len(data), ends)
    return b"%b%b%b" % (head, data, _BODY_ENDS) if ends else head + data


@lru_cache(maxsize=4096)
def _head(side: Side, size: int, ends: bool) -> bytes:
    """All that stands before a piece of so many bytes."""
    head = b"\x0a" + _varint(size) if size else b""
    after = size + (len(_BODY_ENDS) if ends else 0)
    for tag in (*_AROUND_BODY, _REPLY_BODY[side]):
        head = b"%c%b%b" % (tag, _varint(len(head) + after), head)
    return head


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > _ONE_BYTE:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _long(data: bytes, at: int) -> tuple[int, int]:
    """Read a number and return it with where it ends. IndexError when it does not end or is no length."""
    value = shift = 0
    while shift < _LENGTH_BITS:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte <= _ONE_BYTE:
            return value, at
        shift += 7
    raise IndexError
