"""The text of a response, for the next turn of its conversation to be recognized by, and the name that it may go by there.

Only a reply that is one piece of plain text is told: with tool calls, reasoning or several parts, what the next turn
will hold of it, and how, is the client's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Struct

from picker.core.usage.usage import Drop

MAX_REPLY_CHARACTERS: Final = 256 * 1024
"""A longer reply is not kept."""
MAX_ID_CHARACTERS: Final = 512
"""A longer id of a response is none; engines' have some forty."""


class _Said(Struct, gc=False):
    content: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    audio: Any = None


class _Choice(Struct, gc=False):
    index: int = 0
    message: _Said | None = None
    delta: _Said | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Choices(Struct, gc=False):
    choices: list[_Choice] = []


class _Part(Struct, gc=False):
    type: str = ""
    text: str | None = None


class _Item(Struct, gc=False):
    type: str = ""
    content: list[_Part] | None = None


class _Response(Struct, gc=False):
    id: Any = None
    status: str | None = None
    output: list[_Item] | None = None


class _ResponseEvent(_Response, gc=False):
    type: str = ""
    response: _Response | None = None


class _Delta(Struct, gc=False):
    type: str = ""
    text: str | None = None
    stop_reason: str | None = None


class _MessageEvent(Struct, gc=False):
    type: str = ""
    content: list[_Part] | None = None
    content_block: _Part | None = None
    delta: _Delta | None = None
    stop_reason: str | None = None


_decode_choices = msgspec.json.Decoder(_Choices).decode
_decode_response = msgspec.json.Decoder(_ResponseEvent).decode
_decode_message = msgspec.json.Decoder(_MessageEvent).decode

_OVER = frozenset({"completed", "incomplete"})


class Reply:
    """The reply of one response as far as it came. `lost` says why it will not be told."""

    __slots__ = ("_length", "_parts", "_read", "_texts", "lost", "over", "response_id")

    def __init__(self, path: str) -> None:
        self._read = _reader(path)
        self._texts: list[str] = []
        self._length = 0
        self._parts = 0
        self.over = False
        self.lost: Drop | None = None
        self.response_id: Any = None
        """What a response that is over calls itself, whatever that is."""

    def add(self, data: bytes) -> None:
        """Take in a body, or one event. Raises ValueError, which msgspec's errors are, or RecursionError."""
        self._read(self, data)

    @property
    def begun(self) -> bool:
        """Whether anything came."""
        return bool(self._texts or self._parts)

    def text(self) -> bytes:
        """Return the text in UTF-8."""
        return "".join(self._texts).encode()

    def lose(self, why: Drop) -> None:
        """The reply will not be told."""
        self.lost = why
        self._texts.clear()

    def say(self, text: str | None) -> None:
        """The reply goes on with this."""
        if not text or self.lost:
            return
        self._length += len(text)
        if self._length > MAX_REPLY_CHARACTERS:
            self.lose(Drop.REPLY_TOO_LONG)
        else:
            self._texts.append(text)

    def part(self, part: _Part) -> None:
        """The reply has this part."""
        self._parts += 1
        if self._parts > 1 or part.type not in ("text", "output_text"):
            self.lose(Drop.REPLY_NOT_TEXT)
        self.say(part.text)


def _choices(reply: Reply, data: bytes) -> None:
    for choice in _decode_choices(data).choices:
        if choice.index:
            continue
        said = choice.message or choice.delta
        if said is not None:
            if (
                said.tool_calls
                or said.function_call
                or said.reasoning
                or said.reasoning_content
                or said.refusal
                or said.audio
            ):
                reply.lose(Drop.REPLY_NOT_TEXT)
            reply.say(said.content)
        reply.say(choice.text)
        reply.over = reply.over or choice.finish_reason is not None


def _response(reply: Reply, data: bytes) -> None:
    event = _decode_response(data)
    response = event.response or event
    if response.status not in _OVER:
        return
    reply.over = True
    reply.response_id = response.id
    for item in response.output or ():
        if item.type != "message":
            reply.lose(Drop.REPLY_NOT_TEXT)
        for part in item.content or ():
            reply.part(part)


def _message(reply: Reply, data: bytes) -> None:
    event = _decode_message(data)
    for part in event.content or ():
        reply.part(part)
    if event.content_block is not None:
        reply.part(event.content_block)
    if event.delta is not None:
        reply.say(event.delta.text)
        reply.over = reply.over or event.delta.stop_reason is not None
    reply.over = reply.over or event.stop_reason is not None


def _nothing(reply: Reply, data: bytes) -> None:
    """Replies of other APIs are not read."""


_READERS: Final[tuple[tuple[str, Callable[[Reply, bytes], None]], ...]] = (
    ("/completions", _choices),
    ("/responses", _response),
    ("/messages", _message),
)


@lru_cache(maxsize=256)
def _reader(path: str) -> Callable[[Reply, bytes], None]:
    path = path.partition("?")[0].rstrip("/")
    return next((read for suffix, read in _READERS if path.endswith(suffix)), _nothing)
