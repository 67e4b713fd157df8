"""Our messages against an independent implementation of the same protocol, both ways.

`envoy_data_plane` is generated from Envoy's own definitions; ours are written by hand in proto/. What one encodes the
other must read.
"""

from __future__ import annotations

import contextlib

import pytest
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderMap,
    HeaderValue,
    HeaderValueOptionHeaderAppendAction,
    Metadata,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy_data_plane.google.protobuf import ListValue, Struct, Value
from hypothesis import given
from hypothesis import strategies as st

from picker.core.exchange.effects import BodyReply, HeadersReply, Immediate, Side, StreamedBody, TrailersReply
from picker.core.exchange.events import (
    BodyMode,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from picker.io.extproc.codec import MalformedMessageError, UnknownMessageError, decode, encode

names = st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True)
header_maps = st.dictionaries(names, st.binary(min_size=1, max_size=40), max_size=12)
modes = st.sampled_from([mode for mode in ProcessingModeBodySendMode if mode.name != "GRPC"])
addresses = st.from_regex(r"10\.[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}:[0-9]{2,4}", fullmatch=True)


def header_map(headers: dict[str, bytes]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=value) for key, value in headers.items()])


def text(value: str) -> Value:
    return Value(string_value=value)


def metadata(namespace: str, key: str, value: Value) -> Metadata:
    return Metadata(filter_metadata={namespace: Struct(fields={key: value})})


@given(header_maps, st.booleans(), st.none() | st.tuples(modes, modes))
def test_request_headers(headers, end_of_stream, protocol):
    request = ProcessingRequest(
        request_headers=HttpHeaders(headers=header_map(headers), end_of_stream=end_of_stream),
        metadata_context=Metadata(),
        protocol_config=protocol
        and ProtocolConfiguration(request_body_mode=protocol[0], response_body_mode=protocol[1]),
    )
    expected = protocol and ProtocolConfig(BodyMode(int(protocol[0])), BodyMode(int(protocol[1])))
    assert decode(bytes(request)) == RequestHeaders(headers, end_of_stream, None, expected)


@given(st.binary(max_size=2000), st.booleans())
def test_bodies(data, end_of_stream):
    body = HttpBody(body=data, end_of_stream=end_of_stream)
    assert decode(bytes(ProcessingRequest(request_body=body))) == RequestBody(data, end_of_stream)
    assert decode(bytes(ProcessingRequest(response_body=body))) == ResponseBody(data, end_of_stream)


def test_trailers():
    trailers = HttpTrailers(trailers=header_map({"grpc-status": b"0"}))
    assert decode(bytes(ProcessingRequest(request_trailers=trailers))) == RequestTrailers()
    assert decode(bytes(ProcessingRequest(response_trailers=trailers))) == ResponseTrailers()


@pytest.mark.parametrize(
    ("status", "expected"),
    [(b"200", 200), (b"429", 429), (b"", None), (b"20", None), (b"abc", None), ("２００".encode(), None)],
)
def test_status_of_response_headers(status, expected):
    request = ProcessingRequest(response_headers=HttpHeaders(headers=header_map({":status": status})))
    event = decode(bytes(request))
    assert isinstance(event, ResponseHeaders)
    assert event.status == expected


def test_header_values_of_older_envoys_come_as_text():
    headers = HeaderMap(headers=[HeaderValue(key="x-a", value="ü")])
    event = decode(bytes(ProcessingRequest(request_headers=HttpHeaders(headers=headers))))
    assert isinstance(event, RequestHeaders)
    assert event.headers == {"x-a": "ü".encode()}


def subset_of(value: Value) -> tuple[str, ...] | None:
    hint = metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", value)
    event = decode(bytes(ProcessingRequest(request_body=HttpBody(), metadata_context=hint)))
    assert isinstance(event, RequestBody)
    return event.subset


@given(st.lists(addresses, max_size=5))
def test_subset_hint_as_list_and_as_string(wanted):
    assert subset_of(Value(list_value=ListValue(values=[text(address) for address in wanted]))) == tuple(wanted)
    assert subset_of(text(",".join(wanted))) == tuple(wanted)
    assert subset_of(text(" , ".join(wanted))) == tuple(wanted)
    assert subset_of(Value(list_value=ListValue(values=[text(",".join(wanted))]))) == tuple(wanted)


def test_subset_hint_of_a_wrong_type_allows_no_endpoint():
    assert subset_of(Value(number_value=7)) == ()
    assert subset_of(Value(struct_value=Struct())) == ()


def test_no_subset_hint_is_not_an_empty_one():
    other = metadata("envoy.lb.subset_hint", "something-else", text("x"))
    event = decode(bytes(ProcessingRequest(request_body=HttpBody(), metadata_context=other)))
    assert isinstance(event, RequestBody)
    assert event.subset is None


def test_served_endpoint_from_metadata_goes_before_the_upstream_address():
    served = metadata("envoy.lb", "x-gateway-destination-endpoint-served", text("10.0.0.2:8000"))
    upstream = {"envoy.filters.http.ext_proc": Struct(fields={"upstream.address": text("10.0.0.1:8000")})}
    headers = HttpHeaders(headers=header_map({":status": b"200"}))
    both = decode(bytes(ProcessingRequest(response_headers=headers, metadata_context=served, attributes=upstream)))
    only = decode(bytes(ProcessingRequest(response_headers=headers, attributes=upstream)))
    neither = decode(bytes(ProcessingRequest(response_headers=headers)))
    assert [event.served for event in (both, only, neither)] == ["10.0.0.2:8000", "10.0.0.1:8000", None]


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12"])
def test_other_bytes_are_malformed(data):
    with pytest.raises(MalformedMessageError):
        decode(data)


@pytest.mark.parametrize("data", [b"", bytes(ProcessingRequest(observability_mode=True))])
def test_other_messages_are_unknown(data):
    with pytest.raises(UnknownMessageError):
        decode(data)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_an_event_or_refused(data):
    with contextlib.suppress(MalformedMessageError, UnknownMessageError):
        decode(data)


def read(reply) -> ProcessingResponse:
    return ProcessingResponse().parse(encode(reply))


@pytest.mark.parametrize("side", list(Side))
def test_plain_answers_change_nothing(side):
    for reply, field in (
        (HeadersReply(side), f"{side}_headers"),
        (BodyReply(side), f"{side}_body"),
        (TrailersReply(side), f"{side}_trailers"),
    ):
        message = read(reply)
        answers = [name for name in ProcessingResponse.__dataclass_fields__ if getattr(message, name, None)]
        assert getattr(message, field) is not None
        assert answers in ([], [field])
        assert not getattr(getattr(message, field), "response", None)


@given(st.sampled_from([HeadersReply, BodyReply]), addresses, st.lists(names, max_size=3))
def test_destination_is_an_overwriting_header_and_the_same_metadata(kind, address, removed):
    fallback = f"{address},10.9.9.9:80"
    reply = kind(Side.REQUEST, tuple(removed), fallback)
    message = read(reply)
    answer = message.request_headers if kind is HeadersReply else message.request_body
    assert answer is not None
    mutation = answer.response.header_mutation
    sent = [(option.header.key, option.header.raw_value) for option in mutation.set_headers]
    assert sent == [("x-gateway-destination-endpoint", fallback.encode())]
    overwrite = HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    assert {option.append_action for option in mutation.set_headers} == {overwrite}
    assert list(mutation.remove_headers) == removed
    fields = message.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert fields["x-gateway-destination-endpoint"].string_value == fallback


def test_modes_that_are_asked_for_are_all_named_as_envoy_replaces_them_all():
    modes = ProtocolConfig(BodyMode.BUFFERED, BodyMode.STREAMED)
    override = read(HeadersReply(Side.REQUEST, modes=modes)).mode_override
    assert override is not None
    assert override.request_body_mode is ProcessingModeBodySendMode.BUFFERED
    assert override.response_body_mode is ProcessingModeBodySendMode.STREAMED
    assert (override.request_header_mode.name, override.response_header_mode.name) == ("SEND", "SEND")
    assert (override.request_trailer_mode.name, override.response_trailer_mode.name) == ("DEFAULT", "DEFAULT")


@given(st.sampled_from(list(Side)), st.binary(max_size=500), st.booleans())
def test_streamed_body(side, data, end_of_stream):
    message = read(StreamedBody(side, data, end_of_stream))
    answer = message.request_body if side is Side.REQUEST else message.response_body
    assert answer is not None
    streamed = answer.response.body_mutation.streamed_response
    assert streamed is not None
    assert (streamed.body, streamed.end_of_stream) == (data, end_of_stream)


def test_immediate_response():
    message = read(Immediate(429, b"{}", (("retry-after", b"1"),), "picker_filtered_out"))
    answer = message.immediate_response
    assert answer is not None
    assert (int(answer.status.code), answer.body, answer.details) == (429, b"{}", "picker_filtered_out")
    (option,) = answer.headers.set_headers
    assert (option.header.key, option.header.raw_value) == ("retry-after", b"1")
