"""Between the bytes of ext_proc messages and the values of `picker.core.exchange`.

Values of headers go out as `raw_value`, which is where Envoy puts and expects them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value
from msgspec import Struct as Record

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from picker.core.exchange.effects import BodyReply, HeadersReply, Immediate, Side, StreamedBody, TrailersReply
from picker.core.exchange.events import (
    BodyMode,
    Event,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from picker.core.headers import DESTINATION, LB_METADATA, SERVED, SUBSET, SUBSET_METADATA

_OVERWRITE = pb.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_ATTRIBUTES = "envoy.filters.http.ext_proc"
_UPSTREAM_ADDRESS = "upstream.address"
_MODES = {mode.value: mode for mode in BodyMode}


class MalformedMessageError(Exception):
    """A message that is no ProcessingRequest."""


class UnknownMessageError(Exception):
    """A ProcessingRequest of a kind that is not known here: a newer Envoy may send one."""


class Observed(Record, frozen=True, gc=False):
    """What happened, told in observability mode: Envoy expects no answer, and would ignore one."""

    event: Event


def decode(data: bytes) -> Event | Observed:
    """Decode one ProcessingRequest. Raises MalformedMessageError or UnknownMessageError."""
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError("not a ProcessingRequest") from error
    event = _event(message)
    return Observed(event) if message.observability_mode else event


def _event(message: pb.ProcessingRequest) -> Event:
    kind = message.WhichOneof("request")
    protocol = _protocol(message) if message.HasField("protocol_config") else None
    if kind == "response_body":
        body = message.response_body
        return ResponseBody(body.body, body.end_of_stream, protocol)
    if kind == "request_body":
        body = message.request_body
        return RequestBody(body.body, body.end_of_stream, _subset(message), protocol)
    if kind == "request_headers":
        headers = message.request_headers
        fields = {header.key: header.raw_value or header.value.encode() for header in headers.headers.headers}
        return RequestHeaders(fields, headers.end_of_stream, _subset(message), protocol)
    if kind == "response_headers":
        headers = message.response_headers
        fields = {header.key: header.raw_value or header.value.encode() for header in headers.headers.headers}
        return ResponseHeaders(
            _status(fields.get(":status", b"")),
            headers.end_of_stream,
            _served(message),
            protocol,
            fields.get("content-type", b""),
            fields.get("content-encoding", b""),
        )
    if kind == "request_trailers":
        return RequestTrailers(protocol)
    if kind == "response_trailers":
        return ResponseTrailers(_served(message), protocol)
    raise UnknownMessageError("a ProcessingRequest of a kind that is not known here")


Reply = HeadersReply | BodyReply | StreamedBody | TrailersReply | Immediate


def encode(reply: Reply) -> bytes:
    """Encode one ProcessingResponse."""
    kind = type(reply)
    if kind is StreamedBody:
        return _streamed(reply)  # type: ignore[arg-type]
    if kind is Immediate:
        return _immediate(reply).SerializeToString()  # type: ignore[arg-type]
    if kind is BodyReply and reply.body is not None:  # type: ignore[union-attr]  # too large to be remembered
        return _encode(reply)  # type: ignore[arg-type]
    return _known(reply)


def _streamed(reply: StreamedBody) -> bytes:
    message = pb.ProcessingResponse()
    body = message.request_body if reply.side is Side.REQUEST else message.response_body
    streamed = body.response.body_mutation.streamed_response
    streamed.body = reply.data
    if reply.end_of_stream:
        streamed.end_of_stream = True
    return message.SerializeToString()


def _immediate(reply: Immediate) -> pb.ProcessingResponse:
    message = pb.ProcessingResponse()
    immediate = message.immediate_response
    immediate.status.code, immediate.body, immediate.details = reply.status, reply.body, reply.details
    _set(immediate.headers, reply.headers)
    return message


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
    if isinstance(reply, BodyReply) and reply.body is not None:
        answer.response.body_mutation.body = reply.body
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


def _status(value: bytes) -> int | None:
    return int(value) if len(value) == 3 and value.isdigit() else None


def _protocol(message: pb.ProcessingRequest) -> ProtocolConfig | None:
    modes = message.protocol_config
    request, response = _MODES.get(modes.request_body_mode), _MODES.get(modes.response_body_mode)
    if request is None or response is None:
        return None
    return ProtocolConfig(request, response)


def _metadata(message: pb.ProcessingRequest, namespace: str, key: str) -> Value | None:
    values: Struct | None = message.metadata_context.filter_metadata.get(namespace)
    return None if values is None else values.fields.get(key)


def _subset(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """The subset hint: a list, or a string with commas, of "ip" or "ip:port"; None when there is none."""
    value = _metadata(message, SUBSET_METADATA, SUBSET)
    if value is None:
        return None
    return tuple(part.strip() for text in _strings(value) for part in text.split(",") if part.strip())


def _strings(value: Value) -> Iterator[str]:
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        yield value.string_value
    elif kind == "list_value":
        for item in value.list_value.values:
            yield item.string_value


def _served(message: pb.ProcessingRequest) -> str | None:
    """The endpoint that answered: what the gateway says it was, else the upstream address Envoy used."""
    value = _metadata(message, LB_METADATA, SERVED)
    if value is not None and value.string_value:
        return value.string_value
    attributes: Struct | None = message.attributes.get(_ATTRIBUTES)
    value = None if attributes is None else attributes.fields.get(_UPSTREAM_ADDRESS)
    return None if value is None else value.string_value or None
