"""The admin port: health, reflection, and `picker.v1.Scores`, which says how a prompt would be scored.

grpcio serves it, because reflection matters here and speed does not. It runs on the event loop that routes requests,
so everything here is bounded: inputs by size, watchers by number and by their share of the loop's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

# Registers the descriptor of ext_proc, so that reflection can describe the service of the other port, too.
from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2  # noqa: F401
from picker._proto.picker.v1 import scores_pb2
from picker.core.director import Director
from picker.core.exchange.effects import BodyState, Decide
from picker.core.headers import SUBSET
from picker.core.scheduling.decision import Decision
from picker.io.keep import keep
from picker.io.preparing import together
from picker.io.telemetry import Hub, TooManyWatchersError, without_prompt
from picker.io.transport.health import HealthState

SCORES_SERVICE = scores_pb2.DESCRIPTOR.services_by_name["Scores"].full_name
MAX_INPUT_BYTES = 16 * 1024 * 1024
"""Longest prompt or body that is explained: the longest that is routed by its prompt, unless configured otherwise."""
MAX_HEADERS = 64
MAX_HEADER_BYTES = 8192

_FRAME_BYTES = 256 * 1024
_WATCH_SHARE = 0.05
_COMPLETIONS = "/v1/completions"
_CHAT_COMPLETIONS = "/v1/chat/completions"

_Message = TypeVar("_Message", scores_pb2.ExplainRequest, scores_pb2.WatchRequest)
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ExplainError(ValueError):
    """A prompt that cannot be explained: `field` of the request is wrong, the message says how."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


async def explain(
    director: Director,
    *,
    prompt: str | None = None,
    body: bytes | None = None,
    path: str = "",
    model: str = "",
    headers: Mapping[str, str] | None = None,
) -> Decision:
    """Decide as for a request, without side effects; the decision comes back without the prompt.

    What would be routed by load alone is decided by load here, too, and `prompt.unused` says why.

    `prompt` is scored as POST /v1/completions for `model`; `body` as POST to `path` (default
    /v1/chat/completions), and names its own model. Raises ExplainError.
    """
    if (prompt is None) == (body is None):
        raise ExplainError("input", "set either prompt or body")
    field = "prompt" if body is None else "body"
    if body is None:
        if path:
            raise ExplainError("path", "belongs to body; a prompt is scored as POST /v1/completions")
        path, body = _COMPLETIONS, msgspec.json.encode({"model": model, "prompt": prompt})
    elif model:
        raise ExplainError("model", "belongs to prompt; a body names its own model")
    if len(body) > MAX_INPUT_BYTES:
        raise ExplainError(field, f"has {len(body)} bytes, at most {MAX_INPUT_BYTES} are explained; send a shorter one")
    path = path or _CHAT_COMPLETIONS
    if not path.startswith("/") or not path.isascii() or len(path) > MAX_HEADER_BYTES:
        raise ExplainError("path", f"is no request path of at most {MAX_HEADER_BYTES} ASCII characters")
    asked = {**_read_headers(headers or {}), ":path": path.encode()}
    subset = asked.get(SUBSET)
    allowed = tuple(part.strip() for part in subset.decode().split(",")) if subset is not None else None
    decide = Decide(asked, body, BodyState.COMPLETE, None, allowed)
    decide, _ = director.rewrite(decide)
    request = director.read(decide)
    preparing = director.prepare(decide, request)
    if preparing:
        request = msgspec.structs.replace(request, prepared=await together(preparing))
    decision = director.decide(decide, request=request)
    return without_prompt(decision)


def to_proto(decision: Decision, seconds: float) -> scores_pb2.Decision:
    """The message for a decision made at a Unix time; its fields are those of `Decision.view()`."""
    moment = Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    return scores_pb2.Decision(time=moment, **decision.view())


def _read_headers(headers: Mapping[str, str]) -> dict[str, bytes]:
    size = sum(len(name) + len(value) for name, value in headers.items())
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise ExplainError("headers", f"at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} characters together")
    for name, value in headers.items():
        if name.startswith(":") or name != name.lower() or not (name + value).isascii():
            raise ExplainError("headers", "names are lower case and not pseudo-headers; names and values are ASCII")
    return {name: value.encode() for name, value in headers.items()}


class AdminServer:
    """Serves the admin port. `health` is shared with the ext_proc port; `clock` gives Unix seconds."""

    def __init__(
        self, director: Director, hub: Hub, state: HealthState, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._state = state
        self._hub = hub
        self._scores = _Scores(director, hub, clock)
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._health_changed = asyncio.Event()
        self._publishing: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port: the one that was free if `port` is 0. OSError if it cannot be had."""
        # Room for a body that is too long to get here, so that `explain` can say what to do about it.
        limit = 2 * MAX_INPUT_BYTES + _FRAME_BYTES
        options = [("grpc.max_receive_message_length", limit), ("grpc.so_reuseport", 0)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._scores.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SCORES_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self._publish()
        await server.start()
        self._server = server
        self._publishing = asyncio.create_task(keep("admin_health", self._follow_health, failed=self._hub.failed))
        return bound

    async def close(self, grace: float) -> None:
        """Take no more calls, and end those that last longer than `grace` seconds."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait([self._publishing])
        if self._server is not None:
            await self._server.stop(grace)

    async def _follow_health(self) -> None:
        unsubscribe = self._state.subscribe(self._health_changed.set)
        try:
            while True:
                self._health_changed.clear()
                await self._publish()
                await self._health_changed.wait()
        finally:
            unsubscribe()

    async def _publish(self) -> None:
        for service in (*self._state.services, SCORES_SERVICE):
            serving = self._state.ready if service == SCORES_SERVICE else self._state.is_serving(service)
            status = health_pb2.HealthCheckResponse
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)


async def _read(kind: type[_Message], data: bytes, context: _Context) -> _Message:
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message is no {kind.DESCRIPTOR.full_name}")


class _Scores:
    def __init__(self, director: Director, hub: Hub, clock: Callable[[], float]) -> None:
        self._director = director
        self._hub = hub
        self._clock = clock

    def handlers(self) -> grpc.GenericRpcHandler:
        """The methods with messages as bytes: a deserializer of grpcio's that fails is logged as an error of ours."""
        return grpc.method_handlers_generic_handler(
            SCORES_SERVICE,
            {
                "Explain": grpc.unary_unary_rpc_method_handler(
                    self._explain, response_serializer=scores_pb2.Decision.SerializeToString
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self._watch, response_serializer=scores_pb2.Decision.SerializeToString
                ),
            },
        )

    async def _explain(self, data: bytes, context: _Context) -> scores_pb2.Decision:
        request = await _read(scores_pb2.ExplainRequest, data, context)
        kind = request.WhichOneof("input")
        try:
            decision = await explain(
                self._director,
                prompt=request.prompt if kind == "prompt" else None,
                body=request.body if kind == "body" else None,
                path=request.path,
                model=request.model,
                headers=request.headers,
            )
        except ExplainError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return to_proto(decision, self._clock())

    async def _watch(self, data: bytes, context: _Context) -> AsyncIterator[scores_pb2.Decision]:
        request = await _read(scores_pb2.WatchRequest, data, context)
        try:
            with self._hub.watch(request.model) as watcher:
                # Tells the client that from now on no decision is missed.
                await context.send_initial_metadata(())
                async for record in watcher:
                    started = time.perf_counter()
                    message = to_proto(record.decision, record.time)
                    spent = time.perf_counter() - started
                    yield message
                    # However many endpoints there are, a watcher takes a small share of the time for requests.
                    await asyncio.sleep(spent / _WATCH_SHARE)
        except TooManyWatchersError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
