"""JSON documents in a byte stream: one body, or the data of server-sent events. Bounded, whatever the pieces.

Source: WHATWG HTML, "Server-sent events", parsing an event stream. Unlike there, an event counts that the end of the
stream cuts off from its empty line: engines that stop short still said what they said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_DOCUMENT_BYTES: Final = 1 << 20
"""A longer document is not kept whole."""

TAIL_BYTES: Final = 64 * 1024
"""What is kept of the end of such a document: usage stands there."""

_BOM = b"\xef\xbb\xbf"
_START_BYTES = 16


class Document(NamedTuple):
    """One document; only its end if it was `cut`."""

    data: bytes
    cut: bool = False


class Kept:
    """Bytes that come in pieces: all of them, or the end of too many. `start` is how those began that were cut."""

    __slots__ = ("_cut", "_data", "start")

    def __init__(self) -> None:
        self._data = bytearray()
        self._cut = False
        self.start = b""

    def __bool__(self) -> bool:
        return bool(self._data)

    def add(self, data: bytes, *, cut: bool = False) -> None:
        """Add a piece, of which the beginning may be `cut`."""
        self._data += data
        if cut or len(self._data) > MAX_DOCUMENT_BYTES:
            if not self._cut:
                self.start = bytes(self._data[:_START_BYTES])
                self._cut = True
            del self._data[:-TAIL_BYTES]

    def take(self) -> Document:
        """Return what was kept, and start anew."""
        document = Document(bytes(self._data[-TAIL_BYTES:] if self._cut else self._data), self._cut)
        self._data.clear()
        self._cut = False
        return document


class WholeBody:
    """A body that is one document."""

    __slots__ = ("_kept",)

    between = False

    def __init__(self) -> None:
        self._kept = Kept()

    def feed(self, data: bytes) -> Sequence[Document]:
        """Keep it."""
        self._kept.add(data)
        return ()

    def end(self) -> Sequence[Document]:
        """Return the body."""
        return (self._kept.take(),)


class EventStream:
    """The data of server-sent events. `between` is true where none has begun."""

    __slots__ = ("_done", "_event", "_event_begun", "_first", "_line", "_skip_line_feed", "between")

    def __init__(self) -> None:
        self.between = True
        self._first = True
        self._line = Kept()
        self._event = Kept()
        self._event_begun = False
        self._skip_line_feed = False
        self._done: list[Document] = []

    def feed(self, data: bytes) -> Sequence[Document]:
        """Return the data of the events that end in these bytes."""
        if self._skip_line_feed and data:
            data = data.removeprefix(b"\n")
            self._skip_line_feed = False
        for line in data.splitlines(keepends=True):
            content = line.rstrip(b"\r\n")
            if len(content) == len(line):
                self._line.add(line)
            elif self._line or len(content) > MAX_DOCUMENT_BYTES:
                self._line.add(content)
                self._end_kept_line()
            else:
                self._end_line(content, Document(content))
        if data.endswith(b"\r"):
            self._skip_line_feed = True
        self.between = not (self._line or self._event_begun or self._skip_line_feed)
        return self._take_done()

    def end(self) -> Sequence[Document]:
        """Return the data of the event that the end of the stream cut off from its empty line."""
        if self._line:
            self._end_kept_line()
        self._end_line(b"", Document(b""))
        return self._take_done()

    def _take_done(self) -> list[Document]:
        done = self._done
        if done:
            self._done = []
        return done

    def _end_kept_line(self) -> None:
        line = self._line.take()
        self._end_line(self._line.start if line.cut else line.data, line)

    def _end_line(self, start: bytes, line: Document) -> None:
        """Take a line in, which starts with `start`, or is that, and of which at least the end is in `line`."""
        value = line.data
        if self._first:
            self._first = False
            if start.startswith(_BOM):
                start = start[len(_BOM) :]
                value = value if line.cut else start
        if not start:
            if self._event_begun:
                self._event_begun = False
                self._done.append(self._event.take())
            return
        if not line.cut:
            name, _, value = value.partition(b":")
            value = value.removeprefix(b" ")
        else:
            name = start.partition(b":")[0]
        if name == b"data":
            self._event.add(b"\n" + value if self._event_begun else value, cut=line.cut)
            self._event_begun = True
