"""Proposal 004, asked of the running picker over gRPC by a client of another make, with no Envoy in between.

What is held by tests elsewhere is listed in docs/conformance.md, requirement by requirement.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.protobuf import struct_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from tests.support.fake_kubernetes.server import FakeKubernetes

pytestmark = pytest.mark.asyncio(loop_scope="session")

DESTINATION = "x-gateway-destination-endpoint"
HINT = "envoy.lb.subset_hint"
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
BODY = b'{"model": "conformance-fake-model", "prompt": "San Francisco"}'
STATES = health_pb2.HealthCheckResponse
READINESS = ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension"]


@asynccontextmanager
async def stream_to(picker):
    async with grpc.aio.insecure_channel(picker.address) as channel:
        method = channel.stream_stream(
            PROCESS, pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
        )
        call = method()
        yield call
        call.cancel()


def request_headers(mode, *, ends=False, hint=None):
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    for name, value in ((":method", "POST"), (":path", "/v1/completions")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = ends
    return hinted(message, hint)


def request_body(*, hint=None):
    message = pb.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = BODY, True
    return hinted(message, hint)


def hinted(message, hint):
    """A message with the subset that a gateway allows, as it stands in the metadata; None for none."""
    if hint is not None:
        fields = message.metadata_context.filter_metadata[HINT].fields
        value = fields[f"{DESTINATION}-subset"]
        if isinstance(hint, str):
            value.string_value = hint
        else:
            value.list_value.CopyFrom(struct_pb2.ListValue())
            value.list_value.extend(hint)
    return message


async def answer_of(picker, mode, *, ends=False, hint=None):
    """The answer that ends the wait of a gateway: a destination, or an immediate response."""
    async with asyncio.timeout(5), stream_to(picker) as call:
        await call.write(request_headers(mode, ends=ends, hint=hint))
        if not ends and mode is not pb.FULL_DUPLEX_STREAMED and mode is not pb.STREAMED and mode is not pb.NONE:
            first = await call.read()
            assert first.WhichOneof("response") == "request_headers"
            assert not first.request_headers.response.header_mutation.set_headers
        if not ends and mode is not pb.STREAMED and mode is not pb.NONE:
            await call.write(request_body(hint=hint))
        return await call.read()


def destinations(answer):
    """Those of the header, after a look at the metadata: "MUST not set two different values"."""
    part = getattr(answer, answer.WhichOneof("response"))
    (option,) = [one for one in part.response.header_mutation.set_headers if one.header.key == DESTINATION]
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    named = option.header.raw_value.decode()
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == named
    return named.split(",")


MODES = {
    "no-body": (pb.BUFFERED, True),
    "none": (pb.NONE, False),
    "streamed": (pb.STREAMED, False),
    "buffered": (pb.BUFFERED, False),
    "buffered-partial": (pb.BUFFERED_PARTIAL, False),
    "full-duplex": (pb.FULL_DUPLEX_STREAMED, False),
    "full-duplex-without-body": (pb.FULL_DUPLEX_STREAMED, True),
}
every_mode = pytest.mark.parametrize(("mode", "ends"), MODES.values(), ids=MODES)


@every_mode
async def test_header_and_metadata_name_the_same_endpoints_in_order_of_trial(primary, picker_of, mode, ends):
    named = destinations(await answer_of(await picker_of(primary), mode, ends=ends))
    assert sorted(named) == sorted(primary.addresses)  # one, and two to fall back on


@every_mode
async def test_only_endpoints_of_the_subset_are_named(primary, picker_of, mode, ends):
    picker = await picker_of(primary)
    first, second, _ = primary.addresses
    for hint, allowed in (
        ([first, second], {first, second}),
        (f"{second},{first}", {first, second}),
        ([second, "192.0.2.1:8000"], {second}),
        ([primary.pods[0].ip], {first}),
    ):
        assert set(destinations(await answer_of(picker, mode, ends=ends, hint=hint))) == allowed


@every_mode
@pytest.mark.parametrize("hint", [[], "", ["192.0.2.1:8000"], [f"192.0.2.{number}" for number in range(9)]], ids=str)
async def test_503_when_no_endpoint_of_the_subset_is_eligible(primary, picker_of, mode, ends, hint):
    answer = await answer_of(await picker_of(primary), mode, ends=ends, hint=hint)
    assert answer.WhichOneof("response") == "immediate_response"
    assert answer.immediate_response.status.code == 503


@every_mode
async def test_503_when_no_endpoint_is_ready(deserted, picker_of, mode, ends):
    answer = await answer_of(await picker_of(deserted), mode, ends=ends)
    assert answer.immediate_response.status.code == 503


async def checked(picker, service):
    async with grpc.aio.insecure_channel(picker.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return answer.status


async def test_health_services_of_a_picker_that_is_ready(primary, picker_of):
    picker = await picker_of(primary)
    assert {await checked(picker, service) for service in ("liveness", *READINESS)} == {STATES.SERVING}
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await checked(picker, "envoy.service.ext_proc.v3.Other")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_services_of_a_picker_that_cannot_reach_the_api_server(start_picker, tmp_path):
    cluster = FakeKubernetes()
    await cluster.start()
    await cluster.stop()
    path = tmp_path / "kubeconfig"
    path.write_text(cluster.kubeconfig())
    picker = await start_picker({"endpoints": {"kubernetes": {"pool": {"name": "pool"}, "kubeconfig": str(path)}}})
    assert {await checked(picker, service) for service in READINESS} == {STATES.NOT_SERVING}
    assert await checked(picker, "liveness") == STATES.SERVING
