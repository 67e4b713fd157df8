"""What an exchange wants done, as values: answers to Envoy, a decision, something to learn."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from picker.core.exchange.events import BodyMode, ProtocolConfig


class Side(StrEnum):
    """Which half of the HTTP exchange an answer belongs to."""

    REQUEST = "request"
    RESPONSE = "response"


class HeadersReply(Struct, frozen=True, gc=False):
    """Answers a headers message.

    `destination` becomes the destination header (overwriting the client's) and the same dynamic metadata; its name is
    never in `remove_headers` too, nor are those of `set_headers`, which overwrite what is there. `modes` asks Envoy for
    these body modes, which it grants where it is configured to.
    """

    side: Side
    remove_headers: tuple[str, ...] = ()
    destination: str | None = None
    modes: ProtocolConfig | None = None
    set_headers: tuple[tuple[str, bytes], ...] = ()


class BodyReply(Struct, frozen=True, gc=False):
    """Answers a body message in every mode but full duplex; `body` replaces the body. Further fields as in HeadersReply."""

    side: Side
    remove_headers: tuple[str, ...] = ()
    destination: str | None = None
    set_headers: tuple[tuple[str, bytes], ...] = ()
    body: bytes | None = None


class StreamedBody(Struct, frozen=True, gc=False):
    """Sends a piece of body onwards in full duplex, where every byte has to come back from us."""

    side: Side
    data: bytes
    end_of_stream: bool


class TrailersReply(Struct, frozen=True, gc=False):
    """Answers a trailers message; the trailers pass unchanged.

    `destination` goes out as dynamic metadata only: this answer cannot change the request headers.
    """

    side: Side
    destination: str | None = None


class Immediate(Struct, frozen=True, gc=False):
    """Answers the client in the endpoint's place; Envoy then ends the stream."""

    status: int
    body: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    details: str = ""


class BodyState(StrEnum):
    """How much of the request body a decision can use."""

    COMPLETE = "complete"
    NONE = "no_body"
    """The request has none (GET) or Envoy does not send it."""
    STREAMED = "body_mode_streamed"
    """Envoy sends it only after the destination is fixed."""
    TRUNCATED = "body_truncated"
    """Only the beginning came: BUFFERED_PARTIAL past Envoy's limit, or more than `max_body_bytes`."""


class Decide(Struct, frozen=True, gc=False):
    """Choose a destination, then call `Exchange.decided`. Emitted at most once for each stream."""

    headers: Mapping[str, bytes]
    body: bytes
    body_state: BodyState
    body_mode: BodyMode | None
    subset: tuple[str, ...] | None


class Answered(Struct, frozen=True, gc=False):
    """The final response headers of a routed request came. Emitted at most once, before `Finish`."""

    status: int | None
    headers: Mapping[str, bytes] = {}
    body_follows: bool = False
    """Whether Envoy will send the body piece by piece as it comes, so that a `FirstChunk` tells of the first one."""


class FirstChunk(Struct, frozen=True, gc=False):
    """The response body of a routed request began. Emitted at most once, and only where Envoy sends the body."""


class LearnedOn(StrEnum):
    """Which signal ended the request."""

    RESPONSE_TRAILERS = "response_trailers"
    RESPONSE_BODY = "response_body"
    """The body's end_of_stream, or that of the response headers when there is no body."""
    STREAM_END = "stream_end"


class Finish(Struct, frozen=True, gc=False):
    """The routed request is over. Emitted exactly once after a routed `Decide`, whatever happens.

    `success` is true only after a 2xx status; then the endpoint that served holds the prompt. `learned_on` says what
    proved it, and nothing when `success` is false.
    """

    success: bool
    learned_on: LearnedOn
    status: int | None
    served: str | None


class Anomaly(StrEnum):
    """Something a well-behaved Envoy does not do, or a configuration that cannot work; counted by this name."""

    STREAMED_REQUEST_BODY = "streamed_request_body"
    DUPLICATE_END_OF_STREAM = "duplicate_end_of_stream"
    UNEXPECTED_MESSAGE = "unexpected_message"
    MODE_UNKNOWN = "mode_unknown"
    BODY_TOO_LARGE = "body_too_large"
    MALFORMED_MESSAGE = "malformed_message"
    CONTROL_HEADER = "control_header_from_client"


class Report(Struct, frozen=True, gc=False):
    """Count this, and say it in the log at a bounded rate."""

    anomaly: Anomaly


class Arm(Struct, frozen=True, gc=False):
    """Feed `TimerFired` after `seconds` unless the stream ended before."""

    seconds: float


Effect = (
    HeadersReply
    | BodyReply
    | StreamedBody
    | TrailersReply
    | Immediate
    | Decide
    | Answered
    | FirstChunk
    | Finish
    | Report
    | Arm
)
