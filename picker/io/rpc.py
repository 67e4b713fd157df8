"""The seam between RPC services and the transports that carry them.

A transport (our own HTTP/2 layer, or grpcio) turns each RPC into one `Call` and one `Handler`. Handlers are
plain synchronous objects: the transport calls them from its event loop, they call back with bytes. Message
bytes are serialised protobuf, without the five-byte gRPC frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Protocol


class Status(IntEnum):
    """gRPC status codes that the picker sends."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Call(Protocol):
    """One RPC, as its handler sees it. Calls after the end of the RPC do nothing."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Request metadata; names are lower case; binary (`-bin`) entries are left out."""

    def send(self, message: bytes) -> None:
        """Queue one message. Never blocks; the transport stops reading from a peer that does not read."""

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """Send the trailers and end the RPC."""


class Handler(Protocol):
    """What a service does with one RPC. `closed` comes exactly once and last, whatever happened."""

    def message(self, data: bytes) -> None:
        """A message from the peer."""

    def half_closed(self) -> None:
        """The peer will send no more messages; answers may still be sent."""

    def closed(self) -> None:
        """The RPC is over: finished, reset, cancelled, timed out, or its connection lost."""


HandlerFactory = Callable[[Call], Handler]
Services = Mapping[str, HandlerFactory]
"""Full method path ("/package.Service/Method") to the factory of its handlers."""
