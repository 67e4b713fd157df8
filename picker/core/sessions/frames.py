"""From messages to blocks: what an engine would render of a conversation, framed so that no two contents look alike.

A block ends where a message ends, and within a text after each `CHUNK` bytes of it. Blocks are made of items that tell
their own length, and a block of just `CHUNK` bytes is a chunk of the text that the block before it begins or goes on
with. So the blocks of two conversations are equal exactly as far as their contents are.

What counts: role, name, reasoning, tool calls and their ids (some chat templates render those), then the content: text
byte for byte, a lone text part like plain text, other parts with all their fields, media by their data. What does not:
ids and states of messages and items, cache markers, signatures, log probabilities, and fields that no engine knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from struct import Struct as Layout
from typing import Any, Final, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

CHUNK: Final = 512
"""Bytes of a text in one block: some 128 tokens, eight blocks of an engine."""

PIECE: Final = 32 * CHUNK
"""Bytes of a text that are recognized together."""

_CHUNKS_OF_PIECE = PIECE // CHUNK

MEDIA_BYTES: Final = 4096
"""What an image or a sound weighs: some thousand tokens, however long its data are."""

_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_MEDIA = ("image", "audio", "video", "file", "document")
_BEFORE_CONTENT = (
    "name",
    "tool_call_id",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
)
"""Fields of a message that are rendered, mostly before its content; here always, so that no text is told apart late."""
_NOT_OF_PART = frozenset({"cache_control", "signature", "citations", "annotations", "logprobs"})
_NOT_OF_ITEM = frozenset({"id", "status", "cache_control", "encrypted_content"})
_REFERENCE = "item_reference"

_ROLES = {role: b"%d:%b" % (len(role), role.encode()) for role in ("user", "assistant", "system", "tool", "developer")}
_encode = msgspec.json.Encoder().encode


def encoded(value: Any) -> bytes:
    """JSON of a decoded value, its keys in their order. Raises RecursionError for what is nested too deeply."""
    try:
        return _encode(value)
    except OverflowError:  # whole numbers beyond 64 bits
        return json.dumps(value).encode()


def string(value: bytes) -> bytes:
    """An item that tells its length."""
    return b"%d:%b" % (len(value), value)


class Chunks(NamedTuple):
    """Many consecutive blocks of one text, a multiple of `PIECE` bytes: each `CHUNK` bytes are one block."""

    data: bytes


Blocks = list[bytes | Chunks]


def message_blocks(message: Any) -> Blocks:
    """Blocks of one message; the last one ends it. Whatever it is, there is at least one."""
    if not isinstance(message, dict):
        return [ended(b"V" + string(encoded(message)) + b"E")]
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and isinstance(role, str) and isinstance(content, str):
        text = content.encode()
        if len(text) < CHUNK:
            return [ended(b"M%bt%d:%bE" % (_role(role), len(text), text))]
        blocks, rest = open_text(text, CHUNK)
        return [b"M%bT%b" % (_role(role), text[:CHUNK]), *blocks, ended(b"t%d:%bE" % (len(rest), rest))]
    pending = [b"M" + _role(role) if isinstance(role, str) else b"m" + string(encoded(role))]
    pending += [
        b"F" + string(name.encode()) + string(encoded(value))
        for name in _BEFORE_CONTENT
        if (value := message.get(name))
    ]
    blocks = []
    _content(content, pending, blocks)
    pending.append(b"E")
    blocks.append(ended(b"".join(pending)))
    return blocks


def item_blocks(item: Any) -> Blocks:
    """Blocks of one item of the Responses API: a message, or a call, a result, reasoning and the like."""
    if not isinstance(item, dict):
        return message_blocks(item)
    kind = item.get("type")
    if item.get("role") and kind in (None, "", "message"):
        return message_blocks(item)
    dropped = _NOT_OF_ITEM - {"id"} if kind == _REFERENCE else _NOT_OF_ITEM
    return [ended(b"I" + string(_object(item, dropped)) + b"E")]


def open_text(text: bytes, start: int = 0) -> tuple[Blocks, bytes]:
    """Blocks of the whole chunks, from `start` on, of a text that may go on, and the rest of it."""
    whole = (len(text) - start) // CHUNK
    blocks: Blocks = []
    if whole >= _CHUNKS_OF_PIECE:
        pieces = start + whole // _CHUNKS_OF_PIECE * PIECE
        blocks.append(Chunks(text[start:pieces]))
        start, whole = pieces, whole % _CHUNKS_OF_PIECE
    blocks += chunks(whole)(text, start)
    return blocks, text[start + whole * CHUNK :]


@lru_cache(maxsize=2 * (PIECE // CHUNK))
def chunks(count: int) -> Callable[[bytes, int], tuple[bytes, ...]]:
    """What takes so many chunks out of a text, from a place on."""
    return Layout(f"{CHUNK}s" * count).unpack_from


def ended(block: bytes) -> bytes:
    """A block that is no chunk, whatever its length."""
    return block if len(block) != CHUNK else block + b"."


def closed_text(rest: bytes) -> bytes:
    """The item that ends a text."""
    return b"t%d:%b" % (len(rest), rest)


def without_markers(tools: Any) -> Any:
    """A list of tools as an engine renders it."""
    if not isinstance(tools, list):
        return tools
    return [
        {name: value for name, value in tool.items() if name != "cache_control"} if isinstance(tool, dict) else tool
        for tool in tools
    ]


def _role(role: str) -> bytes:
    return _ROLES.get(role) or string(role.encode())


def _content(content: Any, pending: list[bytes], blocks: Blocks, depth: int = 0) -> None:
    if isinstance(content, str):
        _text(content, pending, blocks)
    elif isinstance(content, list):
        for part in content:
            _part(part, pending, blocks, depth)
    elif content is not None:
        pending.append(b"V" + string(encoded(content)))


def _text(text: str, pending: list[bytes], blocks: Blocks) -> None:
    data = text.encode()
    if len(data) >= CHUNK:
        blocks.append(b"%bT%b" % (b"".join(pending), data[:CHUNK]))
        pending.clear()
        more, data = open_text(data, CHUNK)
        blocks += more
    pending.append(closed_text(data))


def _part(part: Any, pending: list[bytes], blocks: Blocks, depth: int) -> None:
    if isinstance(part, str):
        _text(part, pending, blocks)
        return
    if not isinstance(part, dict):
        pending.append(b"V" + string(encoded(part)))
        return
    kind, text = part.get("type"), part.get("text")
    if isinstance(text, str) and (not isinstance(kind, str) or kind in _TEXT_TYPES):
        _text(text, pending, blocks)
    elif kind == "tool_result" and not depth:
        pending.append(b"R" + string(_object(part, _NOT_OF_PART | {"content"})))
        _content(part.get("content"), pending, blocks, depth + 1)
        pending.append(b"r")
    else:
        data = _object(part, _NOT_OF_PART)
        if isinstance(kind, str) and len(data) > MEDIA_BYTES and any(name in kind for name in _MEDIA):
            data = b"%b%b" % (xxh3_128_digest(data), data[: MEDIA_BYTES - 16])
        pending.append(b"P" + string(data))


def _object(value: Mapping[str, Any], dropped: Iterable[str]) -> bytes:
    """An object whose own keys may come in any order; those of the objects inside count as they come."""
    return encoded({name: value[name] for name in sorted(value.keys() - dropped)})
