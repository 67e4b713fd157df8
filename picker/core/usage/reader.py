"""Usage out of the bytes of one response, while they pass: nothing is held back, nothing raises."""

from __future__ import annotations

from typing import Final

import msgspec

from picker.core.usage.counts import Tally
from picker.core.usage.documents import Document, EventStream, WholeBody
from picker.core.usage.reply import MAX_ID_CHARACTERS, Reply
from picker.core.usage.unpack import CorruptError, Unpacker, unpacker
from picker.core.usage.usage import Drop, Usage

MOST_EXPANSION: Final = 100
FREE_BYTES: Final = 1 << 20
"""A body may grow `MOST_EXPANSION` times when it is decompressed, and by this much."""

FREE_LINES: Final = 10_000
BYTES_PER_LINE: Final = 32
"""Events may have `FREE_LINES` lines, and one more for so many bytes: each costs time, however short it is."""

_USAGE: Final = b'"usage"'
_META_INFO: Final = b'"meta_info"'


class _TooMuchError(Exception):
    def __init__(self, why: Drop) -> None:
        super().__init__(why)
        self.why = why


class UsageReader:
    """Reads one response's usage, and its reply and its id with `keep_reply`.

    `content_type` and `content_encoding` are the response's headers, b"" when there are none; `path` is the request's,
    which tells the API. `drops` counts what could not be used, by reason. Memory stays below a few MiB.
    """

    __slots__ = (
        "_documents",
        "_lines",
        "_over",
        "_packed",
        "_reply",
        "_size",
        "_tally",
        "_unpacker",
        "_usage",
        "drops",
    )

    def __init__(self, content_type: bytes, content_encoding: bytes, path: str, *, keep_reply: bool = False) -> None:
        self.drops: dict[Drop, int] = {}
        self._tally = Tally()
        self._reply = Reply(path) if keep_reply else None
        self._usage: Usage | None = None
        self._over = False
        self._packed = self._size = self._lines = 0
        self._documents = _documents(content_type)
        self._unpacker: Unpacker | None = None
        if self._documents is None:
            self._drop(Drop.CONTENT_TYPE)
        coding = content_encoding.strip().lower()
        if coding not in (b"", b"identity"):
            self._unpacker = unpacker(coding, self._take)
            if self._unpacker is None:
                self._give_up(Drop.CONTENT_ENCODING)

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of the body."""
        if self._documents is None:
            return
        self._packed += len(data)
        try:
            if self._unpacker is None:
                self._take(data)
            else:
                self._unpacker.feed(data)
        except CorruptError:
            self._give_up(Drop.CORRUPT_ENCODING)
        except _TooMuchError as error:
            self._give_up(error.why)

    def result(self) -> Usage | None:
        """Return what the response said, now that it is over; None when it said nothing."""
        if not self._over:
            self._over = True
            if self._documents is not None:
                for document in self._documents.end():
                    self._read(document)
                self._documents = None
            self._unpacker = None  # it knows this reader, too
            self._usage = self._conclude()
        return self._usage

    def _take(self, data: bytes) -> None:
        documents = self._documents
        if documents is None:
            return
        self._size += len(data)
        if self._size > FREE_BYTES + MOST_EXPANSION * self._packed:
            raise _TooMuchError(Drop.EXPANDS_TOO_MUCH)
        if (
            self._reply is None
            and documents.between
            and _USAGE not in data
            and _META_INFO not in data
            and data.endswith((b"\n\n", b"\n\r\n"))
        ):
            return  # whole events, which say nothing of tokens
        if isinstance(documents, EventStream):
            self._lines += data.count(b"\n") + data.count(b"\r")
            if self._lines > FREE_LINES + self._size // BYTES_PER_LINE:
                raise _TooMuchError(Drop.TOO_MANY_LINES)
        for document in documents.feed(data):
            self._read(document)

    def _read(self, document: Document) -> None:
        data = document.data
        if not data or data.endswith(b"[DONE]"):
            return
        if document.cut:
            self._drop(Drop.DOCUMENT_TOO_LONG)
        try:
            if _USAGE in data or _META_INFO in data:
                self._tally.add(document)
        except (ValueError, RecursionError) as error:
            self._drop(_kind(error))
        reply = self._reply
        if reply is None or reply.lost:
            return
        if document.cut:
            reply.lose(Drop.REPLY_TOO_LONG)
            return
        try:
            reply.add(data)
        except (ValueError, RecursionError) as error:
            reply.lose(_kind(error))

    def _conclude(self) -> Usage | None:
        tally = self._tally
        prompt, cached = tally.prompt_tokens, tally.cached_tokens
        if prompt is not None and cached is not None and cached > prompt:
            self._drop(Drop.WRONG_TYPE)
            cached = None
        usage = Usage(prompt, cached, tally.completion_tokens, self._reply_text(), tally.model, self._response_id())
        return None if usage == Usage(model=tally.model) else usage

    def _reply_text(self) -> bytes:
        reply = self._reply
        if reply is None:
            return b""
        if not reply.over and reply.begun and not reply.lost:
            reply.lose(Drop.REPLY_BROKE_OFF)
        if reply.lost:
            self._drop(reply.lost)
        return reply.text()

    def _response_id(self) -> str:
        found = None if self._reply is None else self._reply.response_id
        if isinstance(found, str) and len(found) <= MAX_ID_CHARACTERS:
            return found
        if found is not None:
            self._drop(Drop.RESPONSE_ID)
        return ""

    def _drop(self, why: Drop) -> None:
        self.drops[why] = self.drops.get(why, 0) + 1

    def _give_up(self, why: Drop) -> None:
        self._drop(why)
        self._documents = None


def _documents(content_type: bytes) -> EventStream | WholeBody | None:
    kind = content_type.partition(b";")[0].strip().lower()
    if kind == b"text/event-stream":
        return EventStream()
    return WholeBody() if kind in (b"", b"application/json") or kind.endswith(b"+json") else None


def _kind(error: Exception) -> Drop:
    return Drop.WRONG_TYPE if isinstance(error, msgspec.ValidationError) else Drop.INVALID_JSON
