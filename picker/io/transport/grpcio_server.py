"""Serves RPCs on a TCP port with grpcio: slower than our own HTTP/2, and independent of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
import structlog

from picker.io.rpc import Handler, HandlerFactory, Services, Status
from picker.io.transport.counters import TransportCounters
from picker.io.transport.limits import Limits
from picker.io.transport.tls import CertificateSource

logger = structlog.get_logger(__name__)

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_TURNS_TO_CANCEL = 3
_DRAIN_SECONDS = 24 * 3600.0


class GrpcioServer:
    """Serves `services` with grpcio's asyncio server; the interface is that of `Http2Server`.

    grpcio does the HTTP/2, so of the counters only those of streams and handlers move.
    """

    def __init__(
        self,
        services: Services,
        *,
        limits: Limits | None = None,
        certificates: CertificateSource | None = None,
        counters: TransportCounters | None = None,
    ) -> None:
        self.counters = counters or TransportCounters()
        self._limits = limits or Limits()
        self._certificates = certificates
        self._services = services
        self._server: grpc.aio.Server | None = None
        self._draining: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port: the one that was free if `port` is 0. OSError if it cannot be had."""
        self._server = grpc.aio.server(
            handlers=[_Methods(self._services, self._limits, self.counters)],
            options=[
                ("grpc.max_receive_message_length", self._limits.max_message),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", self._limits.max_concurrent_streams),
                ("grpc.so_reuseport", 0),
                # Envoy may ping as often as every second, with no stream open.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
                # It would ping all the time while bodies pass; Envoy takes pings it cannot answer at once for a flood, and
                # closes the connection with every request on it.
                ("grpc.http2.bdp_probe", 0),
            ],
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._certificates is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, _credentials(self._certificates))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        return bound

    def begin_drain(self) -> None:
        """Accept no more connections and ask peers to open no more streams; those that are open go on."""
        if self._draining is None and self._server is not None:
            self._draining = asyncio.get_running_loop().create_task(self._server.stop(_DRAIN_SECONDS))

    async def close(self, grace: float) -> None:
        """Drain for up to `grace` seconds, then end what is left."""
        self.begin_drain()
        if self._server is not None:
            await self._server.stop(grace)
        if self._draining is not None:
            await self._draining


def _credentials(certificates: CertificateSource) -> grpc.ServerCredentials:
    def configuration() -> grpc.ServerCertificateConfiguration:
        certificate = certificates.certificate()
        return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.chain)])

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration)


class _Methods(grpc.GenericRpcHandler):
    """Finds the method of an RPC. Unary methods are the special case of streams that carry one message."""

    def __init__(self, services: Services, limits: Limits, counters: TransportCounters) -> None:
        self._methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            path: grpc.stream_stream_rpc_method_handler(_Method(path, make, limits, counters).run)
            for path, make in services.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._methods.get(handler_call_details.method)


class _Method:
    """Runs the RPCs of one method."""

    def __init__(self, path: str, make: HandlerFactory, limits: Limits, counters: TransportCounters) -> None:
        self._path = path
        self._make = make
        self._limits = limits
        self._counters = counters

    async def run(self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        counters = self._counters
        counters.streams_opened += 1
        counters.streams_open += 1
        call = _Call(context, self._limits.stream_queue)
        handler: Handler | None = None
        try:
            handler = self._make(call)
            # The reader ends by itself when the RPC does: a read that is cancelled leaks inside grpcio.
            call.reader = asyncio.get_running_loop().create_task(self._read(context, call, handler))
            await call.write()
        except Exception as error:  # noqa: BLE001 - a service's fault ends its own RPC, whatever it is
            self._failed(call, error)
        finally:
            call.over = True
            call.room.set()
            counters.streams_open -= 1
            if handler is not None:
                try:
                    handler.closed()
                except Exception:
                    counters.handler_errors += 1
                    logger.exception("An RPC handler failed to close")
        context.set_code(_STATUS_CODES[call.status])
        context.set_details(call.text)

    async def _read(self, context: grpc.aio.ServicerContext[bytes, bytes], call: _Call, handler: Handler) -> None:
        while not call.over:
            try:
                message: Any = await context.read()
            except Exception:  # noqa: BLE001 - grpcio has several ways to say that the RPC is over
                return
            if message is grpc.aio.EOF:
                # A cancelled RPC looks like this too, until grpcio has got to cancelling its task.
                for _ in range(_TURNS_TO_CANCEL):
                    await asyncio.sleep(0)
            if call.over:
                return
            try:
                if message is grpc.aio.EOF:
                    handler.half_closed()
                    return
                handler.message(message)
            except Exception as error:  # noqa: BLE001
                self._failed(call, error)
                return
            await call.room.wait()

    def _failed(self, call: _Call, error: Exception) -> None:
        """End the RPC of a handler that raised. The peer learns no details."""
        self._counters.handler_errors += 1
        logger.error("An RPC handler failed", path=self._path, exc_info=error)
        call.finish(Status.INTERNAL, "internal error")


class _Call:
    """The `Call` of one RPC: a queue between its handler and grpcio."""

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes], queue_limit: int) -> None:
        self.over = False
        self.status = Status.OK
        self.text = ""
        self.reader: asyncio.Task[None] | None = None
        self.room = asyncio.Event()
        self.room.set()
        self._context = context
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._queue_limit = queue_limit
        self._ready = asyncio.Event()
        self._metadata: dict[str, str] | None = None

    @property
    def metadata(self) -> Mapping[str, str]:
        if self._metadata is None:
            self._metadata = {}
            for name, value in self._context.invocation_metadata() or ():
                if isinstance(value, str):
                    known = self._metadata.get(name)
                    self._metadata[name] = value if known is None else f"{known},{value}"
        return self._metadata

    def send(self, message: bytes) -> None:
        if self.over:
            return
        self._queue.append(message)
        self._queued += len(message)
        if self._queued > self._queue_limit:
            self.room.clear()
        self._ready.set()

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        if self.over:
            return
        self.over = True
        self.status = status
        self.text = message
        self._ready.set()

    async def write(self) -> None:
        """Pass on what the handler sends, until it finishes."""
        queue = self._queue
        while True:
            while queue:
                message = queue.popleft()
                await self._context.write(message)
                self._queued -= len(message)
                if self._queued <= self._queue_limit:
                    self.room.set()
            if self.over:
                return
            self._ready.clear()
            await self._ready.wait()
