"""The gRPC wire format over HTTP/2: message frames, timeouts, status text, metadata.

Source of facts: the gRPC over HTTP/2 protocol description (PROTOCOL-HTTP2.md of the grpc project).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from struct import Struct
from types import MappingProxyType
from urllib.parse import quote_from_bytes

from picker.io.rpc import Status

PREFIX = Struct(">BI")
"""Before every message: one byte that is 1 if the message is compressed, then its length."""

PREFIX_SIZE = PREFIX.size

_TIMEOUT_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_UNESCAPED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class Unframer:
    """Cuts a stream's bytes into messages, wherever the frames of HTTP/2 happened to split them.

    After a violation `violation` holds (reason, status, text) and nothing further is cut; the messages before it
    are still returned.
    """

    __slots__ = ("_buffer", "_limit", "_need", "violation")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._need = PREFIX_SIZE
        self.violation: tuple[str, Status, str] | None = None

    @property
    def size(self) -> int:
        """Bytes held of a message that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes."""
        buffer = self._buffer
        buffer += data
        messages: list[bytes] = []
        if len(buffer) < self._need:
            return messages
        offset = 0
        with memoryview(buffer) as view:
            while True:
                self._need = PREFIX_SIZE
                if len(view) - offset < PREFIX_SIZE:
                    break
                compressed, length = PREFIX.unpack_from(view, offset)
                if compressed or length > self._limit:
                    self.violation = _violation(compressed, length, self._limit)
                    offset = len(view)
                    break
                self._need += length
                end = offset + self._need
                if end > len(view):
                    break
                messages.append(bytes(view[offset + PREFIX_SIZE : end]))
                offset = end
        del buffer[:offset]
        return messages


def _violation(compressed: int, length: int, limit: int) -> tuple[str, Status, str]:
    if compressed == 1:
        return (
            "compressed",
            Status.UNIMPLEMENTED,
            "the message is compressed; this server accepts only identity encoding",
        )
    if compressed:
        return "bad_frame", Status.INTERNAL, f"the message frame has flags {compressed:#x}; only 0 and 1 are defined"
    text = f"a message of {length} bytes exceeds the limit of {limit} bytes; to allow it raise listen.maxMessageBytes"
    return "message_too_large", Status.RESOURCE_EXHAUSTED, text


def parse_timeout(value: bytes) -> float:
    """Return a `grpc-timeout` header value in seconds; ValueError if it is not 1-8 digits and a unit of HMSmun."""
    digits, unit = value[:-1], _TIMEOUT_UNITS.get(value[-1:])
    if unit is None or not 1 <= len(digits) <= 8 or not digits.isdigit():
        raise ValueError(f"grpc-timeout {value!r} is not 1 to 8 digits and one of H, M, S, m, u, n")
    return int(digits) * unit


def encode_status(status: Status, message: str) -> list[tuple[bytes, bytes]]:
    """Return the trailers that end an RPC; the text is cut at 1,000 characters and percent-encoded UTF-8."""
    trailers = [(b"grpc-status", b"%d" % status)]
    if message:
        encoded = quote_from_bytes(message[:1000].encode("utf-8", "replace"), safe=_UNESCAPED)
        trailers.append((b"grpc-message", encoded.encode("ascii")))
    return trailers


@lru_cache(maxsize=64)
def read_metadata(headers: tuple[tuple[bytes, bytes], ...]) -> Mapping[str, str]:
    """Return request headers as text, without pseudo-headers and binary entries; repeated ones joined by commas.

    Envoy opens every stream with the same headers, so most are read once.
    """
    metadata: dict[str, str] = {}
    for raw_name, raw_value in headers:
        if raw_name.startswith(b":") or raw_name.endswith(b"-bin"):
            continue
        name, value = raw_name.decode("latin-1"), raw_value.decode("utf-8", "replace")
        known = metadata.get(name)
        metadata[name] = value if known is None else f"{known},{value}"
    return MappingProxyType(metadata)
