"""What pickers tell each other, as msgpack. Everything here may come from anyone who can write to Redis."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

MOST_BYTES = 8 * 1024 * 1024
"""A longer message is not read."""

_Id = Annotated[str, Meta(min_length=1, max_length=64)]
_Address = Annotated[str, Meta(max_length=256)]
_Number = Annotated[int, Meta(ge=0)]
_Tokens = Annotated[float, Meta(ge=0, le=1e9)]


class Picked(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A request goes to an endpoint, with so many tokens to compute; `shared` is what producers say of it, by name."""

    number: _Number
    address: _Address
    tokens: _Tokens
    shared: tuple[tuple[str, bytes], ...] = ()


class Prefilled(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Its prompt is computed."""

    number: _Number


class Ended(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """It is over. `served` is the endpoint that holds its prompt now, "" when none does.

    `told` is what producers learnt at its end, by name.
    """

    number: _Number
    served: _Address = ""
    told: tuple[tuple[str, bytes], ...] = ()


Event = Picked | Prefilled | Ended


class Batch(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """What happened at one picker since its batch before; without events it says that the picker lives."""

    sender: _Id
    sequence: _Number
    events: tuple[Event, ...] = ()


class Ask(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Asks a picker for what it has on its way, and if `warm` for all that it knows of prompts."""

    sender: _Id
    to: _Id
    warm: bool = False


class OnItsWay(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """All requests that a picker has on their way, as of a batch of its. Others have no more from it."""

    sender: _Id
    sequence: _Number
    picks: tuple[Picked, ...] = ()


class Known(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Prompts that an endpoint holds, as a producer of another picker knows them; without an address, what names stand for.

    The last one names no producer. `number` counts them from 0.
    """

    sender: _Id
    to: _Id
    producer: Annotated[str, Meta(max_length=64)] = ""
    address: _Address = ""
    shared: bytes = b""
    number: _Number = 0


class Leaving(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """A picker stops: what it had on its way is over."""

    sender: _Id


Message = Batch | Ask | OnItsWay | Known | Leaving

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def decode(data: bytes) -> Message:
    """Read a message. Raises ValueError for what is none."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"has {len(data)} bytes, at most {MOST_BYTES} are read")
    try:
        return _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def sent_by(data: bytes, encoded_name: bytes) -> bool:
    """Whether a message has this sender, without reading the rest: every picker hears all that it says itself.

    In an array of less than 16 fields, the sender stands after one byte that says so and one for the kind of message.
    """
    return data.startswith(encoded_name, 2)
