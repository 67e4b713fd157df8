"""A session's identity: a chain of hashes over framed content.

Two chains share the hash of a position exactly when the contents up to there are the same, for the same model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from picker.core.sessions.frames import (
    CHUNK,
    PIECE,
    Blocks,
    Chunks,
    chunks,
    closed_text,
    ended,
    message_blocks,
    open_text,
)
from picker.core.tokens.lru import ByteLru

MAX_POSITIONS: Final = 16_384
"""Positions of one chain; what comes after them is only measured. Texts of 8 MiB have as many."""

_ENTRY_BYTES = 300
_POSITION_BYTES = 12

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
        writer = Writer(self.state)
        if self.rest is not None:
            # A position at the end of a text is none of a longer text.
            writer.begin(self.hashes[:-1], self.sizes[:-1])
            return text_chain(writer, self.rest + reply)
        try:
            message = {"role": "assistant", "content": reply.decode()}
        except UnicodeDecodeError:
            return self
        writer.begin(self.hashes, self.sizes)
        writer.write(message_blocks(message))
        return writer.chain(writer.state, None, self.opening)

    def named(self, key: int) -> Chain:
        """The chain with a reply of which only its name is known: one more position, of no bytes."""
        if self.state is None or self.rest is not None:
            return self
        writer = Writer(xxh3_64_intdigest(b"N%d" % key, self.state))
        writer.begin(self.hashes, self.sizes)
        writer.hashes.append(writer.state)
        writer.sizes.append(0)
        return writer.chain(writer.state, None, self.opening)


class Stored(NamedTuple):
    """Turns that the engine puts before those of a request, from its own memory: what they are called, and are.

    With `fixed` they are that whatever the request says; else only if it has the same before its first turn.
    """

    key: int
    chain: Chain | None
    fixed: bool = False


class Writer:
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
        """Put stored turns before those to come. What comes is another's where it cannot follow them."""
        chain, state = stored.chain, None
        if chain is not None:
            if chain.rest is None and chain.opening == opening:
                state = chain.state
            if state is not None or stored.fixed:
                self.begin(chain.hashes, chain.sizes)
                self.size = chain.size
        self.state = xxh3_64_intdigest(b"S%d" % stored.key, opening) if state is None else state

    def chain(self, state: int | None, rest: bytes | None, opening: int) -> Chain:
        """What was written, as far as it may go."""
        hashes, sizes, size = self.hashes, self.sizes, self.size
        if len(hashes) > MAX_POSITIONS:
            return Chain(hashes[:MAX_POSITIONS], sizes[:MAX_POSITIONS], size, opening=opening)
        return Chain(hashes, sizes, size, state, rest, opening)


def text_chain(writer: Writer, text: bytes) -> Chain:
    blocks, rest = open_text(text)
    writer.write(blocks)
    state = writer.state
    writer.write([ended(closed_text(rest))])
    return writer.chain(state, rest, 0)
