"""Session identity: a chain of hashes over the framed content of a request.

Two chains share the hash of a position exactly when the contents up to there are the same, for the same model. What
was read before is known by its digest and costs what copying costs: turns by eight, four and two, and long texts
in pieces of `PIECE` bytes. So a conversation that grew costs what is new in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from picker.core.prompts.parse import ABSENT, Fields, Prompt
from picker.core.sessions.frames import (
    CHUNK,
    PIECE,
    Blocks,
    Chunks,
    chunks,
    closed_text,
    encoded,
    ended,
    item_blocks,
    message_blocks,
    open_text,
    string,
    without_markers,
)
from picker.core.tokens.lru import ByteLru
from picker.core.tokens.prompt import Api

MAX_POSITIONS: Final = 16_384
"""Positions of one chain; what comes after them is only measured. Texts of 8 MiB have as many."""

_PAGE = 32
"""Turns that are recognized together, at most; a power of two."""
_ENTRY_BYTES = 300
_POSITION_BYTES = 12
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

_pack = msgspec.msgpack.Encoder().encode


class Positions(NamedTuple):
    """Consecutive positions: a 64-bit hash each, the bytes of content from the position before, and their sum."""

    hashes: array[int]
    sizes: array[int]
    size: int


Memory = ByteLru[tuple[int, int], Positions]
"""What follows a state, by the state and the digest of the content."""


class Chain(Struct, frozen=True):
    """The content of one prompt; `size` is its length in bytes, also where it has more than `MAX_POSITIONS` positions.

    A reply goes on from the hash `state` and, in a text, from its unfinished `rest`; `state` is None where nothing can
    go on. `opening` tells apart what comes before the first turn.
    """

    hashes: array[int]
    sizes: array[int]
    size: int
    state: int | None = None
    rest: bytes | None = None
    opening: int = 0

    def replied(self, reply: bytes) -> Chain:
        """The chain with a reply, as the client will send it back: as an assistant's message, or at the end of a text."""
        if self.state is None or not reply:
            return self
        writer = _Writer(self.state)
        if self.rest is not None:
            # A position at the end of a text is none of a longer text.
            writer.begin(self.hashes[:-1], self.sizes[:-1])
            return _text(writer, self.rest + reply)
        try:
            message = {"role": "assistant", "content": reply.decode()}
        except UnicodeDecodeError:
            return self
        writer.begin(self.hashes, self.sizes)
        writer.write(message_blocks(message))
        return writer.chain(writer.state, None, self.opening)


class Stored(NamedTuple):
    """Turns that the engine puts before those of a request, from its own memory: what they are called, and are."""

    key: int
    chain: Chain | None


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
        writer = _Writer(head, self.memory)
        if head_size:
            writer.begin(array("Q", [head]), array("I", [head_size]))
        if system is not None:
            writer.write(message_blocks({"role": "system", "content": system}))
        opening = writer.state
        if stored is not None:
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
                msgspec.structs.replace(_text(_Writer(state, self.memory), tokens), state=None)
                for tokens in prompt.texts
            ]
        state = xxh3_64_intdigest(b"C", head)
        return [_text(_Writer(state, self.memory), text) for text in prompt.texts]

    def _turns(self, writer: _Writer, turns: Sequence[Any], blocks_of: Callable[[Any], Blocks]) -> None:
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
            return _head(model, ()), 0
        key = (model, xxh3_128_intdigest(b"\0".join(raws)))
        known = self._heads.get(key)
        if known is None:
            items = tuple(_rendered(name, bytes(raw)) for name, raw in zip(raws[::2], raws[1::2], strict=True))
            size = sum(len(item) for name, item in zip(raws[::2], items, strict=True) if name != b"cache_salt")
            known = _head(model, items), size
            self._heads.put(key, known, _ENTRY_BYTES + len(model))
        return known


class _Writer:
    """Turns blocks into positions."""

    __slots__ = ("_memory", "hashes", "size", "sizes", "state")

    def __init__(self, state: int, memory: Memory | None = None) -> None:
        self.state = state
        self.hashes = array("Q")
        self.sizes = array("I")
        self.size = 0
        self._memory = memory

    def begin(self, hashes: array[int], sizes: array[int]) -> None:
        """Start with these positions."""
        self.hashes, self.sizes, self.size = hashes[:], sizes[:], sum(sizes)

    def write(self, blocks: Blocks) -> None:
        if Chunks in map(type, blocks):
            for block in blocks:
                if isinstance(block, Chunks):
                    self._pieces(block.data)
                else:
                    self._each((block,))
        else:
            self._each(cast("Sequence[bytes]", blocks))

    def _each(self, blocks: Sequence[bytes]) -> None:
        state = self.state
        lengths = [*map(len, blocks)]
        self.hashes.extend([state := xxh3_64_intdigest(block, state) for block in blocks])
        self.sizes.extend(lengths)
        self.size += sum(lengths)
        self.state = state

    def _pieces(self, data: bytes) -> None:
        take = chunks(PIECE // CHUNK)
        for at in range(0, len(data), PIECE):
            key = (self.state, xxh3_128_intdigest(data[at : at + PIECE]))
            if not self.recall(key):
                start = len(self.hashes)
                self._each(take(data, at))
                self.remember(key, start)

    def key(self, turns: Sequence[Any], kind: int) -> tuple[int, int] | None:
        """What turns that follow this state, and become blocks in this way, are remembered by."""
        try:
            return (self.state, xxh3_128_intdigest(_pack(turns), kind))
        except OverflowError:  # whole numbers beyond 64 bits
            return None

    def recall(self, key: tuple[int, int]) -> bool:
        """Go on with what followed this state before, if it is remembered."""
        known = self._memory.get(key) if self._memory is not None else None
        if known is None:
            return False
        self.hashes.extend(known.hashes)
        self.sizes.extend(known.sizes)
        self.size += known.size
        self.state = known.hashes[-1]
        return True

    def remember(self, key: tuple[int, int], start: int) -> None:
        """Remember the positions from `start` on as what follows a state."""
        if self._memory is not None:
            sizes = self.sizes[start:]
            known = Positions(self.hashes[start:], sizes, sum(sizes))
            self._memory.put(key, known, _ENTRY_BYTES + _POSITION_BYTES * len(known.hashes))

    def go_on_from(self, stored: Stored, opening: int) -> None:
        """Put stored turns before those to come; only what came before the first turn has to be the same."""
        chain = stored.chain
        if chain is not None and chain.state is not None and chain.rest is None and chain.opening == opening:
            self.begin(chain.hashes, chain.sizes)
            self.state = chain.state
        else:
            self.state = xxh3_64_intdigest(b"S%d" % stored.key, opening)

    def chain(self, state: int | None, rest: bytes | None, opening: int) -> Chain:
        """What was written, as far as it may go."""
        hashes, sizes, size = self.hashes, self.sizes, self.size
        if len(hashes) > MAX_POSITIONS:
            return Chain(hashes[:MAX_POSITIONS], sizes[:MAX_POSITIONS], size, opening=opening)
        return Chain(hashes, sizes, size, state, rest, opening)


def _page(writer: _Writer, turns: Sequence[Any], blocks_of: Callable[[Any], Blocks]) -> None:
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


def _text(writer: _Writer, text: bytes) -> Chain:
    blocks, rest = open_text(text)
    writer.write(blocks)
    state = writer.state
    writer.write([ended(closed_text(rest))])
    return writer.chain(state, rest, 0)


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
def _head(model: str, items: tuple[bytes, ...]) -> int:
    return xxh3_64_intdigest(string(model.encode()) + b"".join(items))


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
