"""What is sent, and when: sessions of calls, the same for every profile.

Tokens need no text. A prompt is a few pieces: a `range` stands for its own numbers as token ids, so that two prompts
share a prefix exactly when their pieces do; `bytes` are a text, at four bytes a token. Nothing is kept per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random

import numpy as np
from msgspec import Struct, structs

TOKEN_BYTES = 4
TOKEN_IDS = 1 << 32

Piece = range | bytes


class Call(Struct, frozen=True):
    """One request. `think` is the time from the end of the call before it to this one, in seconds."""

    prompt: tuple[Piece, ...]
    answer: range
    """The tokens that the engine will generate, at least one."""
    think: float = 0.0
    model: str = ""

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens_in(piece) for piece in self.prompt)


class Session(Struct, frozen=True):
    """At least one call of a client, each sent when the one before it has been answered; the first at `start`, in seconds."""

    start: float
    calls: tuple[Call, ...]
    sheddable: bool = False
    """Whether its calls may be refused while all engines are saturated."""


class Workload(Struct, frozen=True):
    """Sessions in the order of their starts. Calls due after `end` are not sent, those due before `warm` not measured.

    `slow` has, by number, the engines that are so many times slower than others.
    """

    name: str
    sessions: Sequence[Session]
    warm: float
    end: float
    slow: dict[int, float] = {}

    @property
    def calls(self) -> int:
        """Calls in all sessions. Fewer are sent when sessions last beyond the end."""
        return sum(len(session.calls) for session in self.sessions)


def sheddable(workload: Workload, share: float, seed: int) -> Workload:
    """The same workload with this share of its sessions sheddable, by chance."""
    rng = Random(seed)
    sessions = [structs.replace(session, sheddable=rng.random() < share) for session in workload.sessions]
    return structs.replace(workload, sessions=sessions)


def tokens_in(piece: Piece) -> int:
    """How many tokens a piece has."""
    return len(piece) if isinstance(piece, range) else -(-len(piece) // TOKEN_BYTES)


def packed(pieces: Sequence[Piece]) -> bytes:
    """The token ids of the pieces, four bytes each in the machine's order."""
    return b"".join([_packed(piece) for piece in pieces])


def token_array(data: bytes) -> array[int]:
    """Packed token ids as an array of unsigned 32-bit numbers."""
    tokens = array("I")
    tokens.frombytes(data)
    return tokens


def _packed(piece: Piece) -> bytes:
    if isinstance(piece, range):
        return np.arange(piece.start, piece.stop, dtype=np.uint32).tobytes()
    return piece + bytes(-len(piece) % TOKEN_BYTES)


class FreshTokens:
    """Hands out tokens that no piece before has."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> range:
        """Return `count` of them. After 2**32 they begin anew."""
        if self._next + count >= TOKEN_IDS:
            self._next = 0
        start = self._next
        self._next += count
        return range(start, start + count)
