"""The ext_proc service, spoken to in protobuf through the seam that transports use."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping

import pytest

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.io.extproc.service import METHOD, ExtProcService
from picker.io.extproc.settings import ExtProcSettings
from picker.io.metrics import Metrics
from picker.io.rpc import Status
from picker.io.telemetry import Hub

BUFFERED, DUPLEX = pb.BodySendMode.BUFFERED, pb.BodySendMode.FULL_DUPLEX_STREAMED
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 100}]}).encode()


class Call:
    """An RPC that keeps what it is given."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self.metadata = metadata
        self.sent: list[pb.ProcessingResponse] = []
        self.status: Status | None = None

    def send(self, message: bytes) -> None:
        self.sent.append(pb.ProcessingResponse.FromString(message))

    def finish(self, status: Status = Status.OK, message: str = "") -> None:  # noqa: ARG002
        self.status = status


class Rig:
    def __init__(self, addresses: int = 3, **settings) -> None:
        spec = SchedulerSpec(("least-request",), (("least-request", 1), ("prefix-cache", 1)))
        scheduler, _ = build_scheduler(spec, None, lambda _: None)
        self.director = Director(
            scheduler, EndpointTable(), fallbacks=2, rng=random.Random(3), timer=time.perf_counter_ns
        )
        self.director.replace_endpoints(Endpoint(f"e{i}", f"10.0.0.{i}:80") for i in range(addresses))
        self.metrics = Metrics()
        self.metrics.director = self.director
        self.service = ExtProcService(self.director, Hub(self.metrics), ExtProcSettings(**settings))
        self.metrics.service = self.service

    def open(self, metadata: Mapping[str, str] = {}):
        call = Call(metadata)
        return call, self.service.services[METHOD](call)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"picker_{name}", labels)


def headers(mode, *, end_of_stream: bool = False, path: str = "/v1/chat/completions") -> bytes:
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    for key, value in ((":path", path), (":method", "POST")):
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    message.request_headers.end_of_stream = end_of_stream
    return message.SerializeToString()


def body(data: bytes, *, end_of_stream: bool = True) -> bytes:
    message = pb.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = data, end_of_stream
    return message.SerializeToString()


def response(status: int = 200) -> bytes:
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"%d" % status)
    return message.SerializeToString()


def destinations(answer) -> list[str]:
    (option,) = answer.response.header_mutation.set_headers
    assert option.header.key == "x-gateway-destination-endpoint"
    return option.header.raw_value.decode().split(",")


def test_a_request_is_routed_counted_and_learnt_from():
    rig = Rig()
    call, stream = rig.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    picked = destinations(call.sent[1].request_body)
    assert sorted(picked) == ["10.0.0.0:80", "10.0.0.1:80", "10.0.0.2:80"]
    assert rig.value("in_flight_requests") == rig.value("open_streams") == 1
    stream.message(response())
    stream.half_closed()
    stream.closed()
    assert rig.value("in_flight_requests") == rig.value("open_streams") == rig.value("prefix_cache_held") == 0
    assert rig.value("learned_total", on="stream_end", success="true") == 1
    assert call.status is Status.OK

    call, stream = rig.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    assert destinations(call.sent[1].request_body)[0] == picked[0]


@pytest.mark.parametrize(("wanted", "count"), [("0", 1), ("1", 2), ("9", 3), ("-1", 3), ("many", 3), ("99999", 3)])
def test_an_envoy_says_how_many_fallbacks_it_can_use(wanted, count):
    call, stream = Rig().open({"x-picker-fallbacks": wanted})
    stream.message(headers(BUFFERED, end_of_stream=True))
    assert len(destinations(call.sent[0].request_headers)) == count


def test_scoring_that_fails_leaves_the_choice_to_in_flight_counts():
    rig = Rig()

    class Broken:
        name, producer = "broken", None

        def score(self, *_):
            raise RuntimeError("boom")

    rig.director.scheduler.scorers = ((Broken(), 1.0),)
    picked = []
    for _ in range(3):
        call, stream = rig.open()
        stream.message(headers(BUFFERED))
        stream.message(body(BODY))
        picked += destinations(call.sent[1].request_body)[:1]
    assert sorted(picked) == ["10.0.0.0:80", "10.0.0.1:80", "10.0.0.2:80"]
    assert rig.value("errors_total", where="decide") == 3


@pytest.mark.parametrize(("broken", "where"), [("picked", "route"), ("confirm", "learn")])
def test_learning_that_fails_costs_no_request_and_no_count(broken, where):
    rig = Rig()
    (producer,) = rig.director.scheduler.producers

    class BrokenProducer:
        name = producer.name

        def match(self, *arguments):
            return Broken(producer.match(*arguments))

    class Broken:
        def __init__(self, match) -> None:
            self.info = match.info

        def picked(self, _):
            if broken == "picked":
                raise RuntimeError("boom")
            return self

        def confirm(self, *_):
            raise RuntimeError("boom")

    rig.director.scheduler.producers = (BrokenProducer(),)
    call, stream = rig.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    assert len(destinations(call.sent[1].request_body)) == 3
    stream.message(response())
    stream.closed()
    assert len(call.sent) == 3
    assert rig.value("in_flight_requests") == 0
    assert rig.value("errors_total", where=where) == 1
    assert rig.value("requests_finished_total", status="2xx") == 1


def test_a_malformed_message_ends_the_stream_and_all_it_counted():
    rig = Rig()
    call, stream = rig.open()
    stream.message(headers(DUPLEX))
    stream.message(body(BODY, end_of_stream=False))
    stream.message(b"\xff\xff\xff")
    assert call.status is Status.INVALID_ARGUMENT
    stream.closed()
    assert rig.value("anomalies_total", kind="malformed_message") == 1
    assert rig.value("open_streams") == rig.value("buffered_body_bytes") == rig.value("in_flight_requests") == 0


def test_a_message_of_an_unknown_kind_is_counted_and_the_stream_goes_on():
    rig = Rig()
    call, stream = rig.open()
    stream.message(b"\xfa\x3e\x00")  # field 1007, as a newer Envoy might send
    stream.message(headers(BUFFERED, end_of_stream=True))
    assert destinations(call.sent[0].request_headers)
    assert call.status is None
    assert rig.value("anomalies_total", kind="unexpected_message") == 1


def test_bodies_of_all_streams_together_are_bounded():
    rig = Rig(max_buffered_bytes=10_000)
    streams = [rig.open() for _ in range(4)]
    for _, stream in streams:
        stream.message(headers(DUPLEX))
        stream.message(body(b"x" * 3000, end_of_stream=False))
    assert rig.value("buffered_body_bytes") == 9000, "the fourth went beyond, and was routed with what there was"
    assert [len(call.sent) > 0 for call, _ in streams] == [False, False, False, True]
    assert rig.value("prompt_unused_total", reason="body_truncated") == 1
    call, stream = streams[3]
    stream.message(body(b"y" * 3000))
    echoed = b"".join(answer.request_body.response.body_mutation.streamed_response.body for answer in call.sent)
    assert echoed == b"x" * 3000 + b"y" * 3000
    for _, stream in streams:
        stream.closed()
    assert rig.value("buffered_body_bytes") == rig.value("in_flight_requests") == rig.value("open_streams") == 0


def refused(rig: Rig) -> pb.ImmediateResponse:
    call, stream = rig.open()
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    stream.closed()
    return call.sent[-1].immediate_response


def test_no_endpoint_is_503():
    answer = refused(Rig(addresses=0))
    assert answer.status.code == 503
    assert json.loads(answer.body)["error"]["type"] == "no_endpoints"
    assert answer.details == "picker_no_endpoints"


def test_all_saturated_is_429_with_retry_after():
    rig = Rig(retry_after_seconds=7)
    for slot in range(3):
        rig.director.table.observe(slot, EngineMetrics(waiting=10), 0)
    answer = refused(rig)
    assert answer.status.code == 429
    assert {option.header.key: option.header.raw_value for option in answer.headers.set_headers} == {
        "content-type": b"application/json",
        "retry-after": b"7",
    }
    assert rig.value("decisions_total", reason="filtered_out", model="<other>") == 1
    assert rig.value("in_flight_requests") == 0


async def test_an_envoy_that_does_not_say_its_mode_is_answered_after_the_grace():
    import asyncio

    rig = Rig(mode_grace_seconds=0.01)
    call, stream = rig.open()
    message = pb.ProcessingRequest.FromString(headers(BUFFERED))
    message.ClearField("protocol_config")
    stream.message(message.SerializeToString())
    assert call.sent == []
    await asyncio.sleep(0.05)
    assert call.sent[0].WhichOneof("response") == "request_headers"
    stream.message(body(BODY))
    assert destinations(call.sent[1].request_body)
    stream.closed()
