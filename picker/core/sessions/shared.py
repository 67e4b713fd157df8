"""Chains, and what names stand for, as pickers tell each other of them. What is read may come from anyone.

A chain is told without its content: 12 bytes for each position. Of what the end of a request adds to its chain, only that
is told. Everything that reads raises ValueError for what cannot have been told.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from picker.core.sessions.chain import MAX_POSITIONS, Chain

MAX_SHARED_BYTES: Final = 1 << 30
"""No prompt is longer."""
MAX_IDS: Final = 32
"""Names of one request; further ones are not told."""

_Count = Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
_Key = Annotated[int, Meta(ge=0)]

_encode = msgspec.msgpack.Encoder().encode
_chains = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]])
_names = msgspec.msgpack.Decoder(list[tuple[_Key, bytes, bytes, _Key, bool]])
_end = msgspec.msgpack.Decoder(
    tuple[_Count, bytes, bytes, _Key, bool, Annotated[tuple[_Key, ...], Meta(max_length=MAX_IDS)]]
)


def packed_chains(chains: Iterable[Chain]) -> bytes:
    """Chains of one request, or of what an endpoint holds."""
    return _encode([(chain.hashes.tobytes(), chain.sizes.tobytes()) for chain in chains])


def chains_of(shared: bytes) -> list[Chain]:
    """Read them; nothing can go on from them."""
    try:
        pairs = _chains.decode(shared)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    return [_chain(array("Q", hashes), array("I", sizes)) for hashes, sizes in pairs]


def packed_names(named: Iterable[tuple[int, Chain]]) -> bytes:
    """What names stand for."""
    return _encode([
        (key, chain.hashes.tobytes(), chain.sizes.tobytes(), chain.opening, _goes_on(chain)) for key, chain in named
    ])  # fmt: skip


def names_of(shared: bytes) -> list[tuple[int, Chain]]:
    """Read it."""
    try:
        told = _names.decode(shared)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    return [
        (key, _chain(array("Q", hashes), array("I", sizes), opening, goes_on=goes_on))
        for key, hashes, sizes, opening, goes_on in told
    ]


def packed_end(before: Chain, after: Chain, ids: Sequence[int]) -> bytes:
    """What a request's chain became at its end, for who knows what it was, and the names that stand for it.

    A position at the end of a text is none of a longer text.
    """
    kept = len(before.hashes) - (before.rest is not None and after is not before)
    added = after.hashes[kept:], after.sizes[kept:]
    return _encode((kept, *(one.tobytes() for one in added), after.opening, _goes_on(after), ids[:MAX_IDS]))


def end_of(shared: bytes, before: Chain) -> tuple[Chain, tuple[int, ...]]:
    """Read it: the chain, and its names."""
    try:
        kept, hashes, sizes, opening, goes_on, ids = _end.decode(shared)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if kept > len(before.hashes):
        raise ValueError("so much was not there before")
    added = array("Q", hashes), array("I", sizes)
    return _chain(before.hashes[:kept] + added[0], before.sizes[:kept] + added[1], opening, goes_on=goes_on), ids


def _goes_on(chain: Chain) -> bool:
    """Whether turns can follow a chain as it is told: after its last position."""
    return chain.rest is None and chain.state == chain.hashes[-1]


def _chain(hashes: array[int], sizes: array[int], opening: int = 0, *, goes_on: bool = False) -> Chain:
    if not 0 < len(hashes) == len(sizes) <= MAX_POSITIONS:
        raise ValueError("as many sizes as hashes are needed")
    size = sum(sizes)
    if size > MAX_SHARED_BYTES:
        raise ValueError("no prompt is that long")
    return Chain(hashes, sizes, size, hashes[-1] if goes_on else None, None, opening)
