"""grpc.health.v1 against the client of grpcio-health-checking, over both transports."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.io.transport.health import HealthState, health_services

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
FOLLOW_READINESS = ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension"]


@pytest.fixture(params=["http2", "grpcio"])
def transport(request):
    return request.param


@pytest.fixture
def state():
    return HealthState()


@pytest.fixture
async def stub(start, dial, state):
    _, port = await start(health_services(state))
    return health_pb2_grpc.HealthStub(dial(port))


def asking(service):
    return health_pb2.HealthCheckRequest(service=service)


async def test_check(stub, state):
    for ready in (False, True, False):
        state.set_ready(ready)
        for service in FOLLOW_READINESS:
            assert (await stub.Check(asking(service))).status == (SERVING if ready else NOT_SERVING)
        assert (await stub.Check(asking("liveness"))).status == SERVING


async def test_check_of_an_unknown_service(stub):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Check(asking("nothing"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert "nothing" in error.value.details()


async def test_list(stub, state):
    state.set_ready(True)
    statuses = (await stub.List(health_pb2.HealthListRequest())).statuses
    assert {name: answer.status for name, answer in statuses.items()} == dict.fromkeys(
        [*FOLLOW_READINESS, "liveness"],
        SERVING,
    )


async def test_watch_sends_the_status_and_its_changes(stub, state):
    watch = stub.Watch(asking("readiness"))
    alive = stub.Watch(asking("liveness"))
    unknown = stub.Watch(asking("nothing"))
    assert (await watch.read()).status == NOT_SERVING
    assert (await alive.read()).status == SERVING
    assert (await unknown.read()).status == SERVICE_UNKNOWN
    for ready in (True, True, False):
        state.set_ready(ready)
    assert (await watch.read()).status == SERVING
    assert (await watch.read()).status == NOT_SERVING
    for silent in (alive, unknown):
        reading = asyncio.ensure_future(silent.read())
        await asyncio.wait([reading], timeout=0.05)
        assert not reading.done()
        silent.cancel()
        await asyncio.wait([reading])
    watch.cancel()


async def test_watch_that_ended_is_forgotten(stub, state, eventually):
    watches = [stub.Watch(asking("")) for _ in range(5)]
    for watch in watches:
        await watch.read()
    assert len(state._subscribers) == 5
    for watch in watches:
        watch.cancel()
    await eventually(lambda: not state._subscribers)


async def test_request_that_is_no_protobuf(start, dial, state):
    _, port = await start(health_services(state))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await dial(port).unary_unary("/grpc.health.v1.Health/Check")(b"\xff")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("messages", [0, 2])
async def test_not_one_request(start, dial, state, messages):
    _, port = await start(health_services(state))
    stream = dial(port).stream_stream("/grpc.health.v1.Health/Watch")()
    for _ in range(messages):
        await stream.write(b"")
    await stream.done_writing()
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await stream.read() is not grpc.aio.EOF:
            pass
    assert await stream.code() is grpc.StatusCode.INTERNAL


def test_subscribers_hear_of_changes_until_they_leave(state):
    heard = []
    leave = state.subscribe(lambda: heard.append(state.ready))
    state.subscribe(lambda: heard.append("other"))
    state.set_ready(True)
    leave()
    leave()
    state.set_ready(True)
    state.set_ready(False)
    assert heard == [True, "other", "other"]


def test_one_who_cannot_be_told_keeps_it_from_no_other():
    told, errors = [], []

    def fail():
        raise ValueError("gone")

    state = HealthState(lambda where, error: errors.append((where, str(error))))
    state.subscribe(fail)
    state.subscribe(lambda: told.append(state.ready))
    state.set_ready(True)
    state.set_ready(False)
    assert told == [True, False]
    assert errors == [("health", "gone")] * 2
