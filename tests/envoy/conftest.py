"""Real parts around a real Envoy: upstreams, and an ext_proc server that always answers the same."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import pytest
import pytest_asyncio
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from picker.app.envoy import start_envoy
from picker.core.headers import DESTINATION, LB_METADATA
from tests.support.http_client import RawClient, send

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
PIECE = 62_000


class Upstream:
    """Answers any request with what it saw, as JSON; `/stream?chunks=3&every=0.1` answers with slow SSE chunks."""

    def __init__(self) -> None:
        self.port = 0
        self.requests = 0
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        app = web.Application()
        app.router.add_get("/stream", self._stream)
        app.router.add_post("/stream", self._stream)
        app.router.add_route("*", "/{path:.*}", self._echo)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _echo(self, request: web.Request) -> web.Response:
        self.requests += 1
        digest, length = hashlib.sha256(), 0
        async for data in request.content.iter_any():
            digest.update(data)
            length += len(data)
        return web.json_response(
            {
                "port": self.port,
                "headers": [[name.lower(), value] for name, value in request.headers.items()],
                "length": length,
                "sha256": digest.hexdigest(),
            }
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-port": str(self.port)})
        await response.prepare(request)
        for number in range(int(request.query.get("chunks", "3"))):
            try:
                await response.write(b"data: %d\n\n" % number)
            except ConnectionError:  # the client left
                break
            await asyncio.sleep(float(request.query.get("every", "0.05")))
        return response


@dataclass
class Stream:
    """One ext_proc stream as the server saw it."""

    metadata: dict[str, str]
    messages: list[pb.ProcessingRequest] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def kinds(self) -> list[str]:
        return [message.WhichOneof("request") for message in self.messages]

    def one(self, kind: str) -> pb.ProcessingRequest:
        """The only message of its kind."""
        (message,) = [message for message in self.messages if message.WhichOneof("request") == kind]
        return message

    def headers(self, kind: str = "request_headers") -> dict[str, str]:
        entries = getattr(self.one(kind), kind).headers.headers
        return {entry.key: entry.raw_value.decode() for entry in entries}


class ConstantPicker:
    """An ext_proc server that always names `destination`. Fields may be changed between requests."""

    def __init__(self) -> None:
        self.port = 0
        self._server: grpc.Server | None = None
        self._health = health.HealthServicer()
        self.reset()

    def reset(self) -> None:
        self.destination = ""
        self.extra_headers: dict[str, str] = {}
        self.hangs = False
        self.streams: list[Stream] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = grpc.server(
            ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
        )
        method = grpc.stream_stream_rpc_method_handler(
            self._process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXT_PROC, {"Process": method}),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_serving(True)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def set_serving(self, serving: bool) -> None:
        """What the health service says; streams are served in any case."""
        states = health_pb2.HealthCheckResponse
        self._health.set(EXT_PROC, states.SERVING if serving else states.NOT_SERVING)

    def kill(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def _process(
        self, messages: Iterator[pb.ProcessingRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ProcessingResponse]:
        stream = Stream({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        self.streams.append(stream)
        context.add_callback(stream.ended.set)
        config = pb.ProtocolConfiguration()
        body = b""
        for message in _until_reset(messages):
            stream.messages.append(message)
            if message.HasField("protocol_config"):
                config = message.protocol_config
            while self.hangs and context.is_active():
                time.sleep(0.02)
            kind = message.WhichOneof("request")
            side_mode = config.request_body_mode if kind.startswith("request") else config.response_body_mode
            match kind, side_mode:
                case "request_headers", _ if message.request_headers.end_of_stream:
                    yield self._routed(kind)
                case "request_headers", pb.FULL_DUPLEX_STREAMED:
                    pass  # answered once the body is complete
                case "request_body", pb.FULL_DUPLEX_STREAMED:
                    body += message.request_body.body
                    if message.request_body.end_of_stream:
                        yield self._routed("request_headers")
                        yield from _pieces(body, end_of_stream=True)
                case "request_trailers", pb.FULL_DUPLEX_STREAMED:
                    yield self._routed("request_headers")
                    yield from _pieces(body, end_of_stream=False)
                    yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
                case "request_body", _:
                    yield self._routed(kind)
                case "response_body", pb.FULL_DUPLEX_STREAMED:
                    yield _piece(kind, message.response_body.body, message.response_body.end_of_stream)
                case (("request_trailers" | "response_trailers"), _):
                    yield pb.ProcessingResponse(**{kind: pb.TrailersResponse()})
                case _:
                    yield _plain(kind)

    def _routed(self, kind: str) -> pb.ProcessingResponse:
        response = _plain(kind)
        if not self.destination:
            return response
        mutation = getattr(response, kind).response.header_mutation
        for name, value in {DESTINATION: self.destination, **self.extra_headers}.items():
            option = mutation.set_headers.add(append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
            option.header.key, option.header.raw_value = name, value.encode()
        response.dynamic_metadata.update({LB_METADATA: {DESTINATION: self.destination}})
        return response


def _until_reset(messages: Iterator[pb.ProcessingRequest]) -> Iterator[pb.ProcessingRequest]:
    with suppress(grpc.RpcError):  # Envoy ends good streams with a reset
        yield from messages


def _plain(kind: str) -> pb.ProcessingResponse:
    reply = pb.HeadersResponse if kind.endswith("_headers") else pb.BodyResponse
    return pb.ProcessingResponse(**{kind: reply(response=pb.CommonResponse())})


def _piece(kind: str, data: bytes, end_of_stream: bool) -> pb.ProcessingResponse:
    streamed = pb.StreamedBodyResponse(body=data, end_of_stream=end_of_stream)
    reply = pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))
    return pb.ProcessingResponse(**{kind: reply})


def _pieces(body: bytes, end_of_stream: bool) -> Iterator[pb.ProcessingResponse]:
    starts = range(0, len(body), PIECE) or [0]
    for start in starts:
        last = start + PIECE >= len(body)
        yield _piece("request_body", body[start : start + PIECE], end_of_stream and last)


@pytest.fixture(name="send", scope="session")
def send_fixture():
    return send


@pytest.fixture(scope="session")
def connect():
    """Opens a RawClient to a port."""

    return RawClient.connect


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def envoys():
    """Starts Envoys that live until the session ends; the same bootstrap gives the same Envoy."""
    running = {}

    async def start(config):
        key = json.dumps(config, sort_keys=True)
        if key not in running:
            running[key] = await start_envoy(config)
        return running[key]

    yield start
    for envoy in running.values():
        await envoy.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def upstreams():
    """Three upstreams that stay up."""
    started = [Upstream() for _ in range(3)]
    for upstream in started:
        await upstream.start()
    yield started
    for upstream in started:
        await upstream.kill()


@pytest_asyncio.fixture(loop_scope="session")
async def start_upstream():
    """Starts upstreams of this test alone, which it may kill."""
    started = []

    async def start() -> Upstream:
        upstream = Upstream()
        await upstream.start()
        started.append(upstream)
        return upstream

    yield start
    for upstream in started:
        await upstream.kill()


@pytest.fixture
def start_constant_picker():
    """Starts ext_proc servers of this test alone, which it may kill and start again."""
    started = []

    def start() -> ConstantPicker:
        picker = ConstantPicker()
        picker.start()
        started.append(picker)
        return picker

    yield start
    for picker in started:
        picker.kill()


@pytest.fixture(scope="session")
def _constant_picker():
    picker = ConstantPicker()
    picker.start()
    yield picker
    picker.kill()


@pytest.fixture
def constant_picker(_constant_picker):
    """The constant ext_proc server, in its first state."""
    _constant_picker.reset()
    return _constant_picker


@pytest.fixture(scope="session")
def dead_address():
    """An address on which nobody listens, held for the session so that nobody will."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    yield f"127.0.0.1:{held.getsockname()[1]}"
    held.close()
