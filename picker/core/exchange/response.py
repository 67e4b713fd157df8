"""The response half of an exchange: answers each message at once, and tells when a routed request is over."""

from __future__ import annotations

from typing import Final

from picker.core.exchange.effects import (
    Anomaly,
    Answered,
    BodyReply,
    Effect,
    Finish,
    FirstChunk,
    HeadersReply,
    LearnedOn,
    Report,
    Side,
    StreamedBody,
    TrailersReply,
)
from picker.core.exchange.events import BodyMode, ResponseBody, ResponseHeaders, ResponseTrailers

PIECE_BYTES: Final = 62_000
"""Longest body piece sent in full duplex: some gateways refuse messages of 64 KiB."""

Effects = tuple[Effect, ...]

_HEADERS: Final[Effects] = (HeadersReply(Side.RESPONSE),)
_BODY: Final[Effects] = (BodyReply(Side.RESPONSE),)
_FIRST_CHUNK: Final[Effects] = (FirstChunk(),)
_TRAILERS: Final[Effects] = (TrailersReply(Side.RESPONSE),)
# Members of enumerations are looked up once: in Python 3.11 that takes longer than a call.
_MODE_NONE: Final = BodyMode.NONE
_DUPLEX: Final = BodyMode.FULL_DUPLEX_STREAMED
_STREAMED: Final = BodyMode.STREAMED
_RESPONSE: Final = Side.RESPONSE
_RESPONSE_BODY: Final = LearnedOn.RESPONSE_BODY
_UNEXPECTED: Final[Effects] = (Report(Anomaly.UNEXPECTED_MESSAGE),)
_DUPLICATE: Final[Effects] = (Report(Anomaly.DUPLICATE_END_OF_STREAM),)


def pieces(side: Side, data: bytes, *, end_of_stream: bool) -> Effects:
    """Cut `data` into body pieces for full duplex. No data and no end of the stream make no piece."""
    if len(data) <= PIECE_BYTES:
        return (StreamedBody(side, data, end_of_stream),) if data or end_of_stream else ()
    last = (len(data) - 1) // PIECE_BYTES * PIECE_BYTES
    return tuple(
        StreamedBody(side, data[at : at + PIECE_BYTES], end_of_stream and at == last)
        for at in range(0, len(data), PIECE_BYTES)
    )


def informational(status: int | None) -> bool:
    """Whether a final status is still to come (1xx)."""
    return status is not None and 100 <= status < 200


class ResponseHalf:
    """What is known of the response. `mode` is None where Envoy does not say it, `routed` once a `Finish` is due."""

    __slots__ = ("_body_began", "_over", "_served", "_started", "_status", "mode", "routed")

    def __init__(self) -> None:
        self.mode: BodyMode | None = None
        self.routed = False
        self._started = False
        self._body_began = False
        self._over = False
        self._status: int | None = None
        self._served: str | None = None

    def headers(self, event: ResponseHeaders) -> Effects:
        """Answer the headers; end_of_stream there proves the end as well as the body's would."""
        if event.served is not None:
            self._served = event.served
        if informational(event.status):
            return _HEADERS
        if self._started:
            return _UNEXPECTED + _HEADERS
        self._started = True
        self._status = event.status
        effects = _HEADERS
        if self.routed:
            follows = not event.end_of_stream and (self.mode is _DUPLEX or self.mode is _STREAMED)
            effects += (Answered(event.status, event.headers, follows),)
        if event.end_of_stream:
            self._over = True
            return effects + self.finish(_RESPONSE_BODY)
        return effects

    def body(self, event: ResponseBody) -> Effects:
        """Answer a piece of the body in the shape of the mode."""
        duplex = self.mode is _DUPLEX
        if self._over:
            return _DUPLICATE if duplex else _DUPLICATE + _BODY
        if duplex:
            effects = pieces(_RESPONSE, event.data, end_of_stream=event.end_of_stream)
        elif self.mode is _MODE_NONE:
            effects = _UNEXPECTED + _BODY
        else:
            effects = _BODY
        if event.data and not self._body_began:
            self._body_began = True
            if self.routed:
                effects += _FIRST_CHUNK
        if event.end_of_stream:
            self._over = True
            return effects + self.finish(_RESPONSE_BODY)
        return effects

    def trailers(self, event: ResponseTrailers) -> Effects:
        """Answer the trailers."""
        if event.served is not None:
            self._served = event.served
        self._over = True
        return _TRAILERS + self.finish(LearnedOn.RESPONSE_TRAILERS)

    def finish(self, learned_on: LearnedOn) -> Effects:
        """The request is over: the `Finish` if one is due, which then is due no more."""
        if not self.routed:
            return ()
        self.routed = False
        success = self._status is not None and 200 <= self._status < 300
        return (Finish(success, learned_on, self._status, self._served),)

    def fail(self) -> Effects:
        """The `Finish` of a request whose destination was found too late to be told."""
        return (Finish(success=False, learned_on=LearnedOn.STREAM_END, status=self._status, served=self._served),)
