"""What a sidecar and a router say to each other on `POST /kvcache/routers/register`.

The router registers with `{"router_id": ...}`; the response is lines of JSON without end. A line is

    {"pod_identifier": "pod.ns", "model_name": "m", "events": [...]}

with events `{"type": "snapshot", "block_hashes": [...], "timestamps": [...]}` (replaces what the model had),
`{"type": "stored", "block_hashes": [...], "timestamp": seconds}` (or `timestamps`, one for each), `{"type": "removed",
"block_hashes": [...]}` and `{"type": "cleared"}`; or it is `{"type": "heartbeat"}`. Block hashes are Kthena's, unless both sides
were told of another protocol.

A router that adds `"accept": ["picker/1"]` also gets the engine's own events, under the key `picker` of lines of their
own: `{"version": 1}` first of all, then `{"rank": 0, "begin": since}` (forget the rank; what follows is all it has when
`since` is 0, and incomplete otherwise) and `{"rank": 0, "ts": seconds, "events": [...]}` with the events of
`picker.core.kv_events`. It should go by these then, which say more than hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from picker.core.kv_events.events import EventBatch, KvEvent
from picker.core.kv_index.ownership import Change, Cleared, Ownership, Removed

EXTENSION = "picker/1"
LINE_BLOCKS = 4096
"""Blocks in one line of ours."""
LINE_EVENTS = 256
"""Blocks in one line of the engine's own events that tell of the past: they take longer to apply."""
MAX_LINE_BYTES = 8 << 20
"""Longest line of others that is read; Kthena's have some 33 bytes a block and up to 50,000 blocks."""
MAX_REGISTRATION_BYTES = 64 << 10
MAX_NAME = 512
WRONG_MODE = "Runtime is not in memory KV event sync mode"
HEARTBEAT = b'{"type":"heartbeat"}\n'

Hash = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Rank = Annotated[int, Meta(ge=0, le=0xFFFF)]
Seconds = int | float


class RegistrationError(ValueError):
    """The body of a registration cannot be used; says why."""


class LineError(ValueError):
    """A line cannot be understood; the only argument is the reason."""


class Registration(Struct, frozen=True):
    """Who registers, and what it understands beside Kthena's events."""

    router_id: Name
    accept: list[str] = []


class BlocksStored(Struct, frozen=True):
    """Blocks that an endpoint holds, each with its store time; with `replace` it holds no others of the model."""

    model: str
    hashes: Sequence[int]
    timestamps: Sequence[float]
    replace: bool = False


class EngineBegins(Struct, frozen=True):
    """All that is known of a rank is void. What follows is all it has if `since` is 0."""

    rank: int
    since: int


class EngineBatch(Struct, frozen=True):
    """A batch of a rank's own events."""

    rank: int
    batch: EventBatch


class Extended(Struct, frozen=True):
    """The engine's own events will come."""


class Unknown(Struct, frozen=True):
    """An event of a type that came later."""


Message = BlocksStored | Removed | Cleared | EngineBegins | EngineBatch | Extended | Unknown


class _Picker(Struct):
    version: int | None = None
    rank: Rank = 0
    begin: Annotated[int, Meta(ge=0)] | None = None
    ts: float = 0.0
    events: tuple[KvEvent, ...] | None = None


class _Event(Struct):
    type: str = ""
    block_hashes: tuple[Hash, ...] = ()
    timestamp: Seconds = 0
    timestamps: tuple[Seconds, ...] | None = None


class _Line(_Event):
    model_name: Name = ""
    model: Name = ""
    events: list[Raw] | None = None
    picker: _Picker | None = None


class _Type(Struct):
    type: str


_LINE = msgspec.json.Decoder(_Line)
_EVENT = msgspec.json.Decoder(_Event)
_TYPE = msgspec.json.Decoder(_Type)
_REGISTRATION = msgspec.json.Decoder(Registration)
_ENCODER = msgspec.json.Encoder()
_BAD = (msgspec.MsgspecError, UnicodeError, RecursionError)
_KNOWN = frozenset({"snapshot", "stored", "removed", "cleared"})
_LARGEST = (1 << 64) - 1
_SIGNS_OF_LIFE = frozenset({"heartbeat", "ping", ""})


def parse_registration(body: bytes) -> Registration:
    """Read the body of a registration; fields of older protocols are ignored. Raises RegistrationError."""
    try:
        registration = _REGISTRATION.decode(body)
    except _BAD as error:
        raise RegistrationError(f"the body is no registration: {error}") from error
    if not registration.router_id.strip():
        raise RegistrationError("router_id must not be empty")
    if not registration.router_id.isprintable():
        raise RegistrationError("router_id must be printable")
    return registration


def registration(router_id: str, *, extended: bool) -> bytes:
    """Make the body of a registration."""
    return _ENCODER.encode({"router_id": router_id, **({"accept": [EXTENSION]} if extended else {})})


def snapshot_lines(owner: str, ownership: Ownership) -> Iterator[bytes]:
    """Say all that is owned, model by model. The ownership must not change between two lines."""
    for model in ownership.models:
        holdings = iter(ownership.holdings(model))
        first = True
        while (some := list(islice(holdings, LINE_BLOCKS))) or first:
            event = {
                "type": "snapshot" if first else "stored",
                "block_hashes": [block for block, _ in some],
                "timestamps": [holding.stored_at for _, holding in some],
            }
            first = False
            yield _line(owner, model, event)


def change_lines(owner: str, changes: Iterable[Change]) -> Iterator[bytes]:
    """Say what changed."""
    for change in changes:
        if isinstance(change, Cleared):
            yield _line(owner, change.model, {"type": "cleared"})
            continue
        for start in range(0, len(change.hashes), LINE_BLOCKS):
            hashes = change.hashes[start : start + LINE_BLOCKS]
            if isinstance(change, Removed):
                yield _line(owner, change.model, {"type": "removed", "block_hashes": hashes})
            else:
                event = {"type": "stored", "block_hashes": hashes, "timestamp": change.timestamp}
                yield _line(owner, change.model, event)


def extension_line(**fields: Any) -> bytes:
    """Say something under the key `picker`: `version`, or `rank` and `begin`, or `rank`, `ts` and `events`."""
    return _ENCODER.encode({"picker": fields}) + b"\n"


def parse_line(line: bytes) -> list[Message]:
    """Read one line; a sign of life is no message. Tolerates other spellings of the same.

    Raises LineError: `malformed`, or `timestamps` when there is not one for each block. Then what the endpoint holds is
    not known any more.
    """
    try:
        parsed = _LINE.decode(line)
        model = parsed.model_name or parsed.model
        messages = [] if parsed.picker is None else _engine_messages(parsed.picker)
        if parsed.events is not None:
            for raw in parsed.events:
                kind = _TYPE.decode(raw).type
                if kind in _KNOWN:
                    messages.extend(_message(_EVENT.decode(raw), model))
                elif kind not in _SIGNS_OF_LIFE:
                    messages.append(Unknown())
        elif parsed.type in _KNOWN:
            messages.extend(_message(parsed, model))
        elif parsed.type not in _SIGNS_OF_LIFE:
            messages.append(Unknown())
    except _BAD as error:
        raise LineError("malformed") from error
    return messages


def _message(event: _Event, model: str) -> Iterator[Message]:
    if event.block_hashes and max(event.block_hashes) > _LARGEST:
        raise LineError("malformed")
    if event.type == "cleared":
        yield Cleared(model, ())
    elif event.type == "removed":
        yield Removed(model, event.block_hashes)
    else:
        times = event.timestamps
        if times is None:
            times = (event.timestamp,) * len(event.block_hashes)
        elif len(times) != len(event.block_hashes):
            raise LineError("timestamps")
        yield BlocksStored(model, event.block_hashes, times, replace=event.type == "snapshot")


def _engine_messages(picker: _Picker) -> list[Message]:
    messages: list[Message] = []
    if picker.version == 1:
        messages.append(Extended())
    if picker.begin is not None:
        messages.append(EngineBegins(picker.rank, picker.begin))
    if picker.events is not None:
        messages.append(EngineBatch(picker.rank, EventBatch(picker.ts, picker.events, picker.rank)))
    return messages


def _line(owner: str, model: str, event: dict[str, Any]) -> bytes:
    return _ENCODER.encode({"pod_identifier": owner, "model_name": model, "events": [event]}) + b"\n"
