"""What can happen on one ext_proc stream, as values.

Events describe the protocol after decoding: header names are lower case, values are bytes, and the
endpoint facts that Envoy puts into metadata or attributes are already picked out of them.

`protocol` is what Envoy says in the first message of the stream, whichever message that is; later messages and
older Envoys leave it None.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from msgspec import Struct


class BodyMode(IntEnum):
    """How Envoy sends a body and wants it answered. Numbers are those of the protocol."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class ProtocolConfig(Struct, frozen=True, gc=False):
    """What the first message says about the body modes of this stream."""

    request_body: BodyMode
    response_body: BodyMode


class RequestHeaders(Struct, frozen=True, gc=False):
    """The client's request headers. Always the first message when Envoy sends request headers at all.

    `subset` is the subset hint: None when Envoy gave none, else the addresses it allows (maybe no address).
    """

    headers: Mapping[str, bytes]
    end_of_stream: bool = False
    subset: tuple[str, ...] | None = None
    protocol: ProtocolConfig | None = None


class RequestBody(Struct, frozen=True, gc=False):
    """A piece of the request body. `subset` as in RequestHeaders: Envoy repeats metadata on every message."""

    data: bytes
    end_of_stream: bool = False
    subset: tuple[str, ...] | None = None
    protocol: ProtocolConfig | None = None


class RequestTrailers(Struct, frozen=True, gc=False):
    """Trailers after the request body, which then may have had no end_of_stream of its own."""

    protocol: ProtocolConfig | None = None


class ResponseHeaders(Struct, frozen=True, gc=False):
    """The response headers of the endpoint, or of Envoy itself when it answered locally.

    `served` is the endpoint that answered, where Envoy says so.
    """

    status: int | None
    end_of_stream: bool = False
    served: str | None = None
    protocol: ProtocolConfig | None = None
    headers: Mapping[str, bytes] = {}


class ResponseBody(Struct, frozen=True, gc=False):
    """A piece of the response body."""

    data: bytes
    end_of_stream: bool = False
    protocol: ProtocolConfig | None = None


class ResponseTrailers(Struct, frozen=True, gc=False):
    """Trailers after the response body; engines behind HTTP/1.1 send none."""

    served: str | None = None
    protocol: ProtocolConfig | None = None


class StreamEnded(Struct, frozen=True, gc=False):
    """The ext_proc stream is over: half-closed, reset or lost. Envoy ends good streams in any of these ways."""


class TimerFired(Struct, frozen=True, gc=False):
    """The time asked for with `effects.Arm` has passed."""


Event = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | StreamEnded
    | TimerFired
)
