"""What stands on the wire between an engine's KV-event sockets and us: addresses and message parts.

A live message is `[topic, sequence, payload]`. A replay is asked with `[b"", start]` and comes as one message a batch,
`[b"", sequence, payload]` up to vLLM 0.25 and SGLang 0.5.21, `[b"", topic, sequence, payload]` since; the last one has
the sequence -1. Sequences have 8 bytes, big endian. Data-parallel rank r has the ports of rank 0 plus r.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

_LARGEST = (1 << 63) - 1
_END = b"\xff" * 8
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:/*]+):(\d{1,5})", re.ASCII)


class Frame(Struct, frozen=True, gc=False):
    """One batch as it came. `topic` and `sequence` are None where the publisher sends none."""

    topic: bytes | None
    sequence: int | None
    payload: bytes


class MalformedFrameError(ValueError):
    """A message that no engine sends."""


def parse_live(parts: Sequence[bytes]) -> Frame:
    """Read a live message; some publishers send neither sequence nor topic. Raises MalformedFrameError."""
    match parts:
        case [topic, sequence, payload]:
            return Frame(topic, _number(sequence), payload)
        case [topic, payload]:
            return Frame(topic, None, payload)
        case [payload]:
            return Frame(None, None, payload)
    raise MalformedFrameError(f"{len(parts)} parts; a message has topic, sequence and payload")


def parse_replay(parts: Sequence[bytes]) -> Frame | None:
    """Read a message of a replay, None for its end. Raises MalformedFrameError."""
    match parts:
        case [b"", sequence, payload]:
            topic = None
        case [b"", topic, sequence, payload]:
            pass
        case _:
            raise MalformedFrameError(f"{len(parts)} parts; a replay has a delimiter, topic, sequence and payload")
    return None if sequence == _END else Frame(topic, _number(sequence), payload)


def replay_request(start: int) -> list[bytes]:
    """Return the message, for a DEALER socket, that asks for the batches from `start` on."""
    return [b"", start.to_bytes(8, "big")]


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return where data-parallel rank `rank` listens, given where rank 0 does.

    Takes `tcp://host:port`, and `ipc://path` for rank 0. Raises ValueError for anything else.
    """
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        if rank:
            raise ValueError(f"endpoint is {endpoint!r}: an ipc endpoint has rank 0 only, give tcp://host:port")
        return endpoint
    found = _TCP.fullmatch(endpoint)
    if found is None:
        raise ValueError(f"endpoint is {endpoint!r}: give tcp://host:port, where the engine can be reached")
    port = int(found[2])
    if not (port and port + rank <= 65_535):
        raise ValueError(f"endpoint is {endpoint!r}: rank {rank} would be at port {port + rank}, which does not exist")
    return f"tcp://{found[1]}:{port + rank}"


def _number(sequence: bytes) -> int:
    number = int.from_bytes(sequence, "big")
    if len(sequence) != 8 or number > _LARGEST:
        raise MalformedFrameError(f"sequence is {sequence[:16]!r}; it has 8 bytes and counts from 0")
    return number
