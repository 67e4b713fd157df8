"""Services, servers and clients that the transport tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc.aio
import pytest
import structlog.testing
import uvloop

from picker.io.rpc import Call, Services, Status
from picker.io.transport.grpcio_server import GrpcioServer
from picker.io.transport.server import Http2Server

CHUNK = 64 * 1024
UNBOUNDED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Recorder:
    """Every handler of every RPC, in order of arrival."""

    def __init__(self) -> None:
        self.handlers: list[Recorded] = []

    def services(self) -> Services:
        methods: dict[str, type[Recorded]] = {
            "Echo": Echo,
            "Unary": Unary,
            "Hold": Recorded,
            "Flood": Flood,
            "NotFound": NotFound,
            "Metadata": Metadata,
            "FailOnMessage": FailOnMessage,
            "FailOnHalfClose": FailOnHalfClose,
            "FailOnClose": FailOnClose,
        }
        services: dict[str, Callable[[Call], Any]] = {
            f"/test.Test/{name}": self._factory(kind) for name, kind in methods.items()
        }
        services["/test.Test/FailToOpen"] = fail_to_open
        return services

    def _factory(self, kind: type[Recorded]) -> Callable[[Call], Recorded]:
        def make(call: Call) -> Recorded:
            handler = kind(call)
            self.handlers.append(handler)
            return handler

        return make


class Recorded:
    """Takes messages, answers nothing, and checks that `closed` comes once and last."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.calls: list[bytes | str] = []

    def message(self, data: bytes) -> None:
        assert "closed" not in self.calls
        self.calls.append(data)

    def half_closed(self) -> None:
        assert "half_closed" not in self.calls
        assert "closed" not in self.calls
        self.calls.append("half_closed")

    def closed(self) -> None:
        assert "closed" not in self.calls
        self.calls.append("closed")

    @property
    def is_closed(self) -> bool:
        return "closed" in self.calls


class Echo(Recorded):
    def message(self, data: bytes) -> None:
        super().message(data)
        self.call.send(data)

    def half_closed(self) -> None:
        super().half_closed()
        self.call.finish()


class Unary(Recorded):
    def message(self, data: bytes) -> None:
        super().message(data)
        self.call.send(data[::-1])
        self.call.finish()


class Flood(Recorded):
    """Answers each message with as many chunks as it says."""

    def message(self, data: bytes) -> None:
        super().message(data)
        for _ in range(int(data)):
            self.call.send(bytes(CHUNK))

    def half_closed(self) -> None:
        super().half_closed()
        self.call.finish()


class NotFound(Recorded):
    def message(self, data: bytes) -> None:
        super().message(data)
        self.call.finish(Status.NOT_FOUND, "100 % café\nno such thing")
        self.call.send(b"too late")
        self.call.finish()


class Metadata(Recorded):
    def message(self, data: bytes) -> None:
        super().message(data)
        self.call.send(self.call.metadata.get(data.decode(), "<none>").encode())
        self.call.finish()


class FailOnMessage(Recorded):
    def message(self, data: bytes) -> None:
        super().message(data)
        raise ValueError("a secret of the server")


class FailOnHalfClose(Recorded):
    def half_closed(self) -> None:
        super().half_closed()
        raise ValueError("a secret of the server")


class FailOnClose(Echo):
    def closed(self) -> None:
        super().closed()
        raise ValueError("a secret of the server")


def fail_to_open(_call: Call) -> Any:
    raise ValueError("a secret of the server")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


Eventually = Callable[[Callable[[], Any]], Awaitable[None]]


@pytest.fixture
def eventually() -> Eventually:
    """Wait until a condition holds."""

    async def wait(condition: Callable[[], Any]) -> None:
        deadline = asyncio.get_running_loop().time() + 10
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "timed out"
            await asyncio.sleep(0.005)

    return wait


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """Every log line of the test."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def new_recorder() -> type[Recorder]:
    """For tests that need many."""
    return Recorder


Start = Callable[..., Awaitable[tuple[Any, int]]]


@pytest.fixture
async def start(transport: str, recorder: Recorder, eventually: Eventually) -> AsyncIterator[Start]:
    """Start a server of the transport under test on a free port of the loopback interface."""
    servers: list[Any] = []

    async def begin(services: Services | None = None, **options: Any) -> tuple[Any, int]:
        kind = {"http2": Http2Server, "grpcio": GrpcioServer}[transport]
        server = kind(services or recorder.services(), **options)
        servers.append(server)
        return server, await server.start("127.0.0.1", 0)

    yield begin
    for server in servers:
        await server.close(0)
    await eventually(lambda: all(handler.is_closed for handler in recorder.handlers))


@pytest.fixture
async def dial() -> AsyncIterator[Callable[[int], grpc.aio.Channel]]:
    """Open a channel that is closed after the test."""
    channels: list[grpc.aio.Channel] = []

    def connect(port: int, credentials: grpc.ChannelCredentials | None = None, **options: Any) -> grpc.aio.Channel:
        extra = [*UNBOUNDED, *options.items()]
        target = f"127.0.0.1:{port}"
        channel = (
            grpc.aio.insecure_channel(target, extra)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, [*extra, ("grpc.ssl_target_name_override", "localhost")])
        )
        channels.append(channel)
        return channel

    yield connect
    for channel in channels:
        await channel.close()
