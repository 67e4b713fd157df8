"""From a request to the chains of its content.

What was read before is known by its digest and costs what copying costs: turns by thirty-two, sixteen and so on down to
two, and long texts in pieces of `PIECE` bytes. So a conversation that grew costs what is new in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from picker.core.prompts.fields import ABSENT, Fields, Prompt
from picker.core.sessions.chain import Chain, Memory, Stored, Writer, text_chain
from picker.core.sessions.frames import Blocks, encoded, item_blocks, message_blocks, string, without_markers
from picker.core.tokens.lru import ByteLru
from picker.core.tokens.prompt import Api

_PAGE = 32
"""Turns that are recognized together, at most; a power of two."""
_ENTRY_BYTES = 300
_AHEAD = (
    "tools",
    "functions",
    "response_format",
    "text",
    "output_format",
    "output_config",
    "reasoning",
    "reasoning_effort",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "cache_salt",
)
"""Fields that templates render ahead of the messages, that change how these are rendered, or keep caches apart."""
_ahead_of = attrgetter(*_AHEAD)
_PLAIN_FORMAT = {"type": "text"}


class ChainReader:
    """Reads chains from prompts. Remembers at most `memory_bytes` of what it read."""

    def __init__(self, memory_bytes: int = 64 << 20) -> None:
        self.memory: Memory = ByteLru(memory_bytes)
        self._heads: ByteLru[tuple[str, int], tuple[int, int]] = ByteLru(4 << 20)

    def read(self, path: str, prompt: Prompt, stored: Stored | None = None) -> list[Chain]:
        """Return a chain for each prompt of the request; none when there is no content.

        Raises RecursionError for content that is nested too deeply.
        """
        fields = prompt.fields
        head, head_size = self._head(prompt.model, fields)
        conversation = None if fields is None else _conversation(_api(path), fields)
        if conversation is None:
            return self._texts(head, prompt)
        system, turns, blocks_of = conversation
        writer = Writer(head, self.memory)
        if head_size:
            writer.begin(array("Q", [head]), array("I", [head_size]))
        if system is not None:
            writer.write(message_blocks({"role": "system", "content": system}))
        opening = writer.state
        if stored is not None and blocks_of is item_blocks:  # other APIs have no such thing
            writer.go_on_from(stored, opening)
        self._turns(writer, turns, blocks_of)
        if not writer.hashes:
            return []
        last = turns[-1] if turns else None
        # An engine goes on with an assistant's message at the end; what clients make of the two is their choice.
        prefilled = isinstance(last, dict) and last.get("role") == "assistant"
        return [writer.chain(None if prefilled else writer.state, None, opening)]

    def _texts(self, head: int, prompt: Prompt) -> list[Chain]:
        given = None if prompt.fields is None else prompt.fields.prompt
        if isinstance(given, list) and not isinstance(given[0], str):
            state = xxh3_64_intdigest(b"K", head)
            return [
                msgspec.structs.replace(text_chain(Writer(state, self.memory), tokens), state=None)
                for tokens in prompt.texts
            ]
        state = xxh3_64_intdigest(b"C", head)
        return [text_chain(Writer(state, self.memory), text) for text in prompt.texts]

    def _turns(self, writer: Writer, turns: Sequence[Any], blocks_of: Callable[[Any], Blocks]) -> None:
        at, left, size = 0, len(turns), _PAGE
        while left:
            while size > left:
                size //= 2
            _page(writer, turns[at : at + size], blocks_of)
            at += size
            left -= size

    def _head(self, model: str, fields: Fields | None) -> tuple[int, int]:
        """The state that a prompt starts from, and the bytes of what is rendered ahead of it."""
        raws: list[bytes] = []
        if fields is not None:
            for name, raw in zip(_AHEAD, _ahead_of(fields), strict=True):
                if raw is not ABSENT:
                    raws += (name.encode(), raw)
        if not raws:
            return _plain_head(model), 0
        key = (model, xxh3_128_intdigest(b"\0".join(raws)))
        known = self._heads.get(key)
        if known is None:
            items = [_rendered(name, bytes(raw)) for name, raw in zip(raws[::2], raws[1::2], strict=True)]
            size = sum(len(item) for name, item in zip(raws[::2], items, strict=True) if name != b"cache_salt")
            known = xxh3_64_intdigest(string(model.encode()) + b"".join(items)), size
            self._heads.put(key, known, _ENTRY_BYTES + len(model))
        return known


def _page(writer: Writer, turns: Sequence[Any], blocks_of: Callable[[Any], Blocks]) -> None:
    """Write a power of two of turns. Of what grew since it was read, the first half is known."""
    kind, half = int(blocks_of is item_blocks), len(turns) // 2
    key = writer.key(turns, kind) if half else None
    if key is not None and writer.recall(key):
        return
    start = len(writer.hashes)
    if half > 1 and (first := writer.key(turns[:half], kind)) is not None and writer.recall(first):
        _page(writer, turns[half:], blocks_of)
    else:
        writer.write([block for turn in turns for block in blocks_of(turn)])
    if key is not None:
        writer.remember(key, start)


def _conversation(api: Api | None, fields: Fields) -> tuple[Any, list[Any], Callable[[Any], Blocks]] | None:
    """What comes before the turns, the turns, and what makes blocks of one. None: texts."""
    if api is Api.RESPONSES:
        turns = fields.input
        if not isinstance(turns, list):
            turns = [] if turns is None else [{"role": "user", "content": turns}]
        return fields.instructions or None, turns, item_blocks
    return None if api is Api.COMPLETIONS else (fields.system or None, fields.messages, message_blocks)


@lru_cache(maxsize=256)
def _api(path: str) -> Api | None:
    path = path.partition("?")[0].rstrip("/")
    return next((api for api in Api if path.endswith(api)), None)


@lru_cache(maxsize=1024)
def _plain_head(model: str) -> int:
    return xxh3_64_intdigest(string(model.encode()))


def _rendered(name: bytes, raw: bytes) -> bytes:
    """A field ahead of the messages as an item; empty when it says nothing."""
    try:
        value = msgspec.json.decode(raw)
        match name, value:
            case b"tools" | b"functions", list():
                value = without_markers(value)
            case b"text", dict():
                value = value.get("format")
            case b"reasoning", dict():
                value = value.get("effort")
        if not value or value == _PLAIN_FORMAT:
            return b""
        raw = encoded(value)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a number out of range, which engines refuse
        pass
    return b"F" + string(name) + string(raw)
