"""Content codings of response bodies, undone piece by piece, so that memory stays bounded whatever they expand to.

Sources: RFC 9110 section 8.4.1 (gzip, deflate), RFC 7932 (br), RFC 8878 and 9659 (zstd and its window in HTTP).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Final, Protocol

import brotli  # type: ignore[import-untyped]
import zstandard

PIECE_BYTES: Final = 64 * 1024
"""Longest piece that is given out."""

ZSTD_WINDOW_BYTES: Final = 8 << 20
"""RFC 9659: who decodes HTTP content need not support more."""

_GZIP_MAGIC = 0x1F
_ZLIB_METHOD = 8

Sink = Callable[[bytes], None]


class CorruptError(Exception):
    """The bytes are not what the coding says."""


class Unpacker(Protocol):
    """Undoes one content coding."""

    def feed(self, data: bytes) -> None:
        """Give the sink what `data` adds, in pieces; what the sink raises passes through.

        Raises CorruptError. After an error it is of no use any more.
        """


class _Zlib:
    """gzip with any number of members, and deflate both as RFC 1950 wraps it and bare, as some servers send it."""

    def __init__(self, sink: Sink, *, gzip: bool) -> None:
        self._sink = sink
        self._gzip = gzip
        self._stream: zlib._Decompress | None = None
        self._over = False

    def feed(self, data: bytes) -> None:
        more = False
        while (data or more) and not self._over:
            if self._stream is None:
                if self._gzip and data[0] != _GZIP_MAGIC:
                    raise CorruptError("no gzip member starts like this")
                self._stream = zlib.decompressobj(self._window_bits(data[0]))
            try:
                piece = self._stream.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise CorruptError(str(error)) from error
            if piece:
                self._sink(piece)
            data, more = self._stream.unconsumed_tail, len(piece) == PIECE_BYTES
            if self._stream.eof:
                data, more = self._stream.unused_data, False
                self._stream, self._over = None, not self._gzip

    def _window_bits(self, first: int) -> int:
        if self._gzip:
            return 16 + zlib.MAX_WBITS
        return zlib.MAX_WBITS if first & 0x0F == _ZLIB_METHOD else -zlib.MAX_WBITS


class _Brotli:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._stream = brotli.Decompressor()

    def feed(self, data: bytes) -> None:
        while not self._stream.is_finished():
            try:
                piece = self._stream.process(data, output_buffer_limit=PIECE_BYTES)
            except brotli.error as error:
                raise CorruptError(str(error)) from error
            if piece:
                self._sink(piece)
            if self._stream.can_accept_more_data():
                return
            data = b""


class _Zstd:
    def __init__(self, sink: Sink) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
        self._stream = decompressor.stream_writer(SimpleNamespace(write=sink), write_size=PIECE_BYTES)  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        try:
            self._stream.write(data)
        except zstandard.ZstdError as error:
            raise CorruptError(str(error)) from error


_CODINGS: Final[dict[bytes, Callable[[Sink], Unpacker]]] = {
    b"gzip": lambda sink: _Zlib(sink, gzip=True),
    b"x-gzip": lambda sink: _Zlib(sink, gzip=True),
    b"deflate": lambda sink: _Zlib(sink, gzip=False),
    b"br": _Brotli,
    b"zstd": _Zstd,
}


def unpacker(content_encoding: bytes, sink: Sink) -> Unpacker | None:
    """Return what undoes this one coding, named in lower case; None when nothing here does."""
    make = _CODINGS.get(content_encoding)
    return None if make is None else make(sink)
