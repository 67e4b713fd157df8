"""The headers of one message, read as far as somebody asks for them.

A request has a dozen headers and more, of which a decision wants three or four; what costs is to make Python objects of
all of them. So a header is looked for in the bytes of the message. That is exact: where a name stands more than once,
for example in the value of another header, all headers are read by protobuf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, KeysView, Mapping
from functools import lru_cache

from google.protobuf.message import DecodeError

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb


@lru_cache(maxsize=1024)
def _pattern(name: str) -> bytes:
    """The key of a header as it stands on the wire: field 1 of a HeaderValue."""
    key = name.encode()
    return b"\x0a%c%b" % (len(key), key)


@lru_cache(maxsize=16)
def _any_of(names: frozenset[str]) -> re.Pattern[bytes]:
    return re.compile(b"\x0a(?:%b)" % b"|".join(re.escape(_pattern(name)[1:]) for name in names))


class HeaderFields(Mapping[str, bytes]):
    """A HeaderMap in protobuf encoding as a mapping from names to values. Bytes that are no HeaderMap have no headers."""

    __slots__ = ("_data", "_fields")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields: dict[str, bytes] | None = None

    def __getitem__(self, name: str) -> bytes:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def get(self, name: str, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
        """The value of a header. Names are lower case and at most 127 bytes."""
        if self._fields is None:
            data, pattern = self._data, _pattern(name)
            at = data.find(pattern)
            if at < 0:
                return default
            at += len(pattern)
            # Envoy sends values as field 3, `raw_value`; those from 128 bytes on have a longer length.
            if data.startswith(b"\x1a", at) and at + 1 < len(data) and data.find(pattern, at) < 0:
                end = at + 2 + data[at + 1]
                if data[at + 1] < 128 and end <= len(data):
                    return data[at + 2 : end]
        return self.all.get(name, default)

    def keys(self) -> KeysView[str]:
        return _Names(self)

    @property
    def all(self) -> dict[str, bytes]:
        """All headers."""
        fields = self._fields
        if fields is None:
            try:
                entries = pb.HeaderMap.FromString(self._data).headers
                fields = {entry.key: entry.raw_value or entry.value.encode() for entry in entries}
            except DecodeError:
                fields = {}
            self._fields = fields
        return fields

    def may_have_any(self, names: frozenset[str]) -> bool:
        """False only if there is none of these headers."""
        return _any_of(names).search(self._data) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)


class _Names(KeysView[str]):
    _mapping: HeaderFields

    def isdisjoint(self, other: Iterable[str]) -> bool:
        names = frozenset(other)
        return not self._mapping.may_have_any(names) or self._mapping.all.keys().isdisjoint(names)
