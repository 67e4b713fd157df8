"""What is read from bytes and written as bytes is what protobuf reads and writes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from picker.core.exchange.effects import Side, StreamedBody
from picker.core.exchange.events import RequestBody, RequestHeaders, ResponseBody, ResponseHeaders
from picker.core.headers import CLIENT_FORBIDDEN
from picker.io.extproc.codec import MalformedMessageError, UnknownMessageError, decode, encode
from picker.io.extproc.context import Observed
from picker.io.extproc.header_fields import HeaderFields
from picker.io.extproc.wire import read

names = st.sampled_from([":path", ":method", ":status", "content-type", "x-request-id", *sorted(CLIENT_FORBIDDEN)])
values = st.binary(max_size=20) | st.sampled_from([127, 128, 300, 20_000]).map(lambda size: b"v" * size)
entries = st.builds(
    lambda name, value, old: (
        pb.HeaderValue(key=name, value="old") if old else pb.HeaderValue(key=name, raw_value=value)
    ),
    names,
    values,
    st.sampled_from([False, False, False, True]),
)
header_maps = st.lists(entries, max_size=8).map(lambda chosen: pb.HeaderMap(headers=chosen))
sizes = st.sampled_from([0, 1, 127, 128, 4096, 16_383, 16_384, 62_000])


def messages(headers: pb.HeaderMap, size: int, end: bool, kind: str, extra: bytes) -> bytes:
    message = pb.ProcessingRequest()
    part = getattr(message, kind)
    part.SetInParent()
    if kind.endswith("headers"):
        part.headers.CopyFrom(headers)
    else:
        part.body = b"b" * size
    part.end_of_stream = end
    return message.SerializeToString() + extra


def context(protocol: bool, observed: bool, metadata: bool) -> bytes:
    message = pb.ProcessingRequest(observability_mode=observed)
    if protocol:
        message.protocol_config.request_body_mode = pb.BUFFERED
    if metadata:
        fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
        fields["x-gateway-destination-endpoint-subset"].string_value = "10.0.0.1:80"
        message.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"].string_value = "10.0.0.2:80"
    return message.SerializeToString()


kinds = st.sampled_from(["request_headers", "response_headers", "request_body", "response_body"])
contexts = st.builds(context, st.booleans(), st.booleans(), st.booleans())
plain = st.builds(messages, header_maps, sizes, st.booleans(), kinds, contexts)


@given(plain)
def test_what_envoy_sends_is_read_without_protobuf_and_alike(data):
    event = read(data)
    assert event is not None
    assert event == decode(data)


@st.composite
def damaged(draw):
    data = bytearray(draw(plain)[:400])
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["change", "drop", "insert", "cut", "repeat"])):
            case "change" if data:
                data[at] = draw(st.integers(0, 255))
            case "drop":
                del data[at : at + draw(st.integers(1, 4))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del data[at:]
            case _:
                data += data[at:]
    return bytes(data)


@given(damaged() | st.binary(max_size=30))
@example(b"\x22\x00")
@example(b"\x22\x80\x00")
@example(b"\x22\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")
@example(b"\x22\x05\x0a\x7f\x41\x41\x41")
@example(b"\x22\x02\x0a\x02\x50\x01")  # content that goes on after the end of its message
@example(b"\x12\x06\x0a\x04\x0a\x02\x0a\x05")
def test_damaged_bytes_mean_what_protobuf_says_or_no_headers(data):
    event = read(data)
    if event is None:
        return
    try:
        expected = decode(data)
    except MalformedMessageError:
        # Only headers are read later, when somebody asks for one.
        happened = event.event if isinstance(event, Observed) else event
        assert isinstance(happened, RequestHeaders | ResponseHeaders)
        return
    except UnknownMessageError:
        pytest.fail("protobuf sees nothing in it")
    assert event == expected


@given(header_maps, names)
def test_a_header_is_found_as_protobuf_finds_it(header_map, name):
    data = header_map.SerializeToString()
    fields = {entry.key: entry.raw_value or entry.value.encode() for entry in header_map.headers}
    assert HeaderFields(data).get(name) == fields.get(name)
    assert HeaderFields(data).get(name, b"?") == fields.get(name, b"?")
    assert (name in HeaderFields(data)) == (name in fields)
    assert HeaderFields(data) == fields
    assert HeaderFields(data).keys().isdisjoint(CLIENT_FORBIDDEN) == fields.keys().isdisjoint(CLIENT_FORBIDDEN)


def test_a_header_that_stands_in_the_value_of_another_is_not_taken_for_one():
    inner = pb.HeaderMap(headers=[pb.HeaderValue(key=":path", raw_value=b"/forged")]).SerializeToString()
    forged = [pb.HeaderValue(key="x-note", raw_value=inner), pb.HeaderValue(key=":path", raw_value=b"/true")]
    for headers in (forged, forged[::-1]):
        fields = HeaderFields(pb.HeaderMap(headers=headers).SerializeToString())
        assert fields.get(":path") == b"/true"
    with pytest.raises(KeyError):
        fields["x-absent"]


@given(st.binary(max_size=60), names)
def test_any_bytes_have_headers_or_none(data, name):
    fields = HeaderFields(data)
    value = fields.get(name)
    assert value is None or value in data
    try:
        pb.HeaderMap.FromString(data)
    except DecodeError:
        assert dict(fields) == {}


@given(st.sampled_from(Side), sizes, st.booleans())
def test_pieces_of_body_are_written_as_protobuf_reads_them(side, size, end):
    data = bytes(size)
    message = pb.ProcessingResponse.FromString(encode(StreamedBody(side, data, end)))
    assert message.WhichOneof("response") == f"{side}_body"
    body = message.request_body if side is Side.REQUEST else message.response_body
    streamed = body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (data, end)


def test_bodies_are_read_whole():
    message = pb.ProcessingRequest()
    message.request_body.body = bytes(300_000)
    assert read(message.SerializeToString()) == RequestBody(bytes(300_000))
    message.response_body.body = b"x"
    assert read(message.SerializeToString()) == ResponseBody(b"x")
