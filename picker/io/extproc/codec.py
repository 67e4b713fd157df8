"""Between the bytes of ext_proc messages and the values of `picker.core.exchange`.

Values of headers go out as `raw_value`, which is where Envoy puts and expects them.
"""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.message import DecodeError

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from picker.core.exchange.effects import BodyReply, HeadersReply, Immediate, Side, StreamedBody, TrailersReply
from picker.core.exchange.events import (
    Event,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from picker.core.headers import DESTINATION, LB_METADATA
from picker.io.extproc.context import Context, Observed, read_context
from picker.io.extproc.wire import status_of, streamed_body

_OVERWRITE = pb.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD


class MalformedMessageError(Exception):
    """A message that is no ProcessingRequest."""


class UnknownMessageError(Exception):
    """A ProcessingRequest of a kind that is not known here: a newer Envoy may send one."""


def decode(data: bytes) -> Event | Observed:
    """Decode one ProcessingRequest; `wire.read` does so faster for most. Raises MalformedMessageError, UnknownMessageError."""
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError("not a ProcessingRequest") from error
    context = read_context(message)
    event = _event(message, context)
    return Observed(event) if context.observed else event


def _event(message: pb.ProcessingRequest, context: Context) -> Event:
    kind = message.WhichOneof("request")
    protocol = context.protocol
    if kind == "response_body":
        body = message.response_body
        return ResponseBody(body.body, body.end_of_stream, protocol)
    if kind == "request_body":
        body = message.request_body
        return RequestBody(body.body, body.end_of_stream, context.subset, protocol)
    if kind == "request_headers":
        headers = message.request_headers
        return RequestHeaders(_fields(headers), headers.end_of_stream, context.subset, protocol)
    if kind == "response_headers":
        headers = message.response_headers
        fields = _fields(headers)
        return ResponseHeaders(status_of(fields), headers.end_of_stream, context.served, protocol, fields)
    if kind == "request_trailers":
        return RequestTrailers(protocol)
    if kind == "response_trailers":
        return ResponseTrailers(context.served, protocol)
    raise UnknownMessageError("a ProcessingRequest of a kind that is not known here")


def _fields(message: pb.HttpHeaders) -> dict[str, bytes]:
    return {header.key: header.raw_value or header.value.encode() for header in message.headers.headers}


Reply = HeadersReply | BodyReply | StreamedBody | TrailersReply | Immediate


def encode(reply: Reply) -> bytes:
    """Encode one ProcessingResponse."""
    kind = type(reply)
    if kind is StreamedBody:
        return streamed_body(reply)  # type: ignore[arg-type]
    if kind is Immediate:
        return _immediate(reply).SerializeToString()  # type: ignore[arg-type]
    if kind is BodyReply and reply.body is not None:  # type: ignore[union-attr]  # too large to be remembered
        return _encode(reply)  # type: ignore[arg-type]
    return _known(reply)


def _immediate(reply: Immediate) -> pb.ProcessingResponse:
    message = pb.ProcessingResponse()
    immediate = message.immediate_response
    immediate.status.code, immediate.body, immediate.details = reply.status, reply.body, reply.details
    _set(immediate.headers, reply.headers)
    return message


def more_time(seconds: float) -> bytes:
    """Ask Envoy to wait for so long for the answer to the message it sent last; it does up to `max_message_timeout`."""
    message = pb.ProcessingResponse()
    message.override_message_timeout.FromMilliseconds(int(seconds * 1000))
    return message.SerializeToString()


def _encode(reply: HeadersReply | BodyReply | TrailersReply) -> bytes:
    message = pb.ProcessingResponse()
    if isinstance(reply, TrailersReply):
        (message.request_trailers if reply.side is Side.REQUEST else message.response_trailers).SetInParent()
        _steer(message, reply.destination)
        return message.SerializeToString()
    answer: pb.HeadersResponse | pb.BodyResponse
    if isinstance(reply, HeadersReply):
        answer = message.request_headers if reply.side is Side.REQUEST else message.response_headers
    else:
        answer = message.request_body if reply.side is Side.REQUEST else message.response_body
    answer.SetInParent()
    if reply.remove_headers:
        answer.response.header_mutation.remove_headers.extend(reply.remove_headers)
    if reply.destination is not None:
        _set(answer.response.header_mutation, ((DESTINATION, reply.destination.encode()), *reply.set_headers))
        _steer(message, reply.destination)
    elif reply.set_headers:
        _set(answer.response.header_mutation, reply.set_headers)
    if isinstance(reply, BodyReply) and reply.body is not None:
        answer.response.body_mutation.body = reply.body
        if reply.side is Side.REQUEST:
            _set(answer.response.header_mutation, (("content-length", b"%d" % len(reply.body)),))
    if isinstance(reply, HeadersReply) and reply.modes is not None:
        message.mode_override.CopyFrom(_override(reply.modes))
    return message.SerializeToString()


_known = lru_cache(maxsize=4096)(_encode)
"""Most answers change nothing or name one of few destinations, so that their bytes are there already."""


def _steer(message: pb.ProcessingResponse, destination: str | None) -> None:
    """Name the destination in dynamic metadata, which no client can set."""
    if destination is not None:
        fields = message.dynamic_metadata.fields[LB_METADATA].struct_value.fields
        fields[DESTINATION].string_value = destination


def _override(modes: ProtocolConfig) -> pb.ProcessingMode:
    """All of the modes, for those that are left out would be none. Trailers stay unsent, their default."""
    return pb.ProcessingMode(
        request_header_mode=pb.HeaderSendMode.SEND,
        response_header_mode=pb.HeaderSendMode.SEND,
        request_body_mode=modes.request_body.name,
        response_body_mode=modes.response_body.name,
    )


def _set(mutation: pb.HeaderMutation, headers: tuple[tuple[str, bytes], ...]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key, option.header.raw_value = name, value
