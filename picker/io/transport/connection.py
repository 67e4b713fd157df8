"""A gRPC server connection over HTTP/2, without I/O: bytes in, handler calls and bytes out.

The only file that touches `ngh2`, which does framing, HPACK, flow control and validation. Theory of operation:

- `receive_data` turns bytes into handler calls; what handlers send is queued. `data_to_send` takes it out. The caller
  sends after every `receive_data`, and when `wake` asks for it because a handler sent at another time.
- A stream has one `_Rpc`, from its request headers until HTTP/2 closes the stream. The RPC may be over before that
  (finished, expired): then its handler is released at the next `data_to_send` and the stream only drains.
- Receive windows are ours to grant: data is acknowledged once its handler has seen it, unless too much waits to be
  sent. So a peer that does not read is, in the end, not read from.
- A stream that we finish before the peer has half-closed it is reset with NO_ERROR once all of it is sent
  (RFC 9113, section 8.1). Peers may reset as well, and Envoy resets every ext_proc stream, whatever we sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ngh2
import structlog
from ngh2 import DataReceived, ErrorCode, NGH2Error, RequestReceived, Setting, StreamClosed, StreamReset

from picker.io.rpc import Handler, HandlerFactory, Services, Status
from picker.io.transport.counters import TransportCounters
from picker.io.transport.deadlines import Deadlines
from picker.io.transport.limits import Limits
from picker.io.transport.preface import recognise
from picker.io.transport.wire import PREFIX, PREFIX_SIZE, Unframer, encode_status, parse_timeout, read_metadata

logger = structlog.get_logger(__name__)

_RESPONSE_HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_OK_TRAILERS = encode_status(Status.OK, "")
_ACCEPT_ENCODING = (b"grpc-accept-encoding", b"identity")
_DRAIN_PING = b"draining"
_MAX_ENDING = 1024

# Resets are how Envoy ends a stream, so their rate is not limited. Reads that end inside the header of a CONTINUATION
# frame count as one more frame in this version of libnghttp2, so that limit has room for the slowest peer.
_CONFIGURATION = ngh2.Configuration(
    auto_window_update=False,
    stream_reset_rate_limit=(1 << 32, 1 << 32),
    max_continuations=256,
)


class _Rpc:
    """One stream: the `Call` that its handler holds, and the connection's own record of it."""

    __slots__ = (
        "_connection",
        "_headers",
        "_metadata",
        "half_closed",
        "handler",
        "over",
        "responded",
        "stream_id",
        "unframer",
    )

    def __init__(self, connection: Http2Connection, stream_id: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self._connection = connection
        self._headers = headers
        self._metadata: Mapping[str, str] | None = None
        self.stream_id = stream_id
        self.handler: Handler | None = None
        self.unframer: Unframer | None = None
        self.responded = False
        self.half_closed = False
        self.over = False

    @property
    def path(self) -> str:
        return dict(self._headers).get(b":path", b"").decode("latin-1")

    @property
    def metadata(self) -> Mapping[str, str]:
        if self._metadata is None:
            self._metadata = read_metadata(self._headers)
        return self._metadata

    def send(self, message: bytes) -> None:
        if not self.over:
            self._connection._send(self, message)  # noqa: SLF001 - two halves of one thing

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        if not self.over:
            self._connection._finish(self, status, message)  # noqa: SLF001


class Http2Connection:
    """The server side of one HTTP/2 connection that carries gRPC.

    `clock` gives seconds for deadlines. `wake` is called when bytes wait to be sent outside of `receive_data`.
    Once `closed`, send what `data_to_send` still gives and close the transport; `rejection` then says why, as a
    reason of `TransportCounters.rejected`, if it was not an ordinary end.
    """

    def __init__(
        self,
        services: Services,
        *,
        limits: Limits,
        counters: TransportCounters,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.closed = False
        self.rejection: str | None = None
        self.refusals: set[str] = set()
        self._services: dict[bytes, HandlerFactory] = {path.encode(): make for path, make in services.items()}
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._wake = wake
        self._receiving = False
        self._greeted = False
        self._draining = False
        self._last_words = b""
        self._buffered = 0
        self._rpcs: dict[int, _Rpc] = {}
        self._over: list[_Rpc] = []
        self._ending: dict[int, bool] = {}
        self._withheld: dict[int, int] = {}
        self._deadlines = Deadlines()
        self._last_headers: tuple[tuple[bytes, bytes], ...] = ()
        self._last_fields: dict[bytes, bytes] = {}
        self._http2 = ngh2.Connection(ngh2.Role.SERVER, _CONFIGURATION)
        self._http2.initiate_connection(
            {
                Setting.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
                Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
                Setting.NO_RFC7540_PRIORITIES: 1,
            },
        )
        self._http2.set_local_window_size(limits.connection_window)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is due, on the clock; an RPC that ended early may still be counted in."""
        return self._deadlines.next

    def receive_data(self, data: bytes) -> None:
        """Process bytes from the peer. What to answer is in `data_to_send`, also if this closed the connection."""
        if self.closed:
            return
        http2 = self._http2
        self._receiving = True
        try:
            http2.receive_data(data)
            if events := http2.events():
                self._greeted = True
                self._process(events)
        except NGH2Error as error:
            self._fail(data, error)
        finally:
            self._receiving = False

    def data_to_send(self, amount: int) -> bytes:
        """Return up to about `amount` bytes for the peer; fewer mean that there are no more for now."""
        if self._over:
            self._release()
        if self.closed:
            last_words, self._last_words = self._last_words, b""
            return last_words
        http2 = self._http2
        try:
            out = http2.data_to_send(amount)
        except NGH2Error:
            self._reject("protocol_error")
            self.lost()
            return b""
        if events := http2.events():
            self._process(events)
        if (self._ending or self._withheld) and len(out) < amount and not self.closed and self._settle():
            out += http2.data_to_send()
            self._process(http2.events())
        return out

    def expire(self, now: float) -> None:
        """End every RPC whose deadline has passed with DEADLINE_EXCEEDED."""
        for stream_id in self._deadlines.pop_due(now):
            rpc = self._rpcs.get(stream_id)
            if rpc is not None and not rpc.over:
                self._counters.deadlines_exceeded += 1
                self._finish(rpc, Status.DEADLINE_EXCEEDED, "the deadline of the RPC passed")

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        if not self.closed:
            self._http2.ping()

    def begin_drain(self) -> None:
        """Ask the peer to open no more streams; the connection closes when those it has are done.

        Two GOAWAY frames (RFC 9113, section 6.8): the second follows once a PING shows that the peer has seen the
        first, so that no stream that was under way is refused.
        """
        if not (self.closed or self._draining):
            self._draining = True
            self._http2.send_shutdown_notice()
            self._http2.ping(_DRAIN_PING)

    def terminate(self) -> None:
        """End the connection now: a last GOAWAY is left to send, and every handler is released."""
        if not self.closed:
            self._http2.terminate_connection(ErrorCode.NO_ERROR)
            self._last_words = self._http2.data_to_send()
            self.lost()

    def lost(self) -> None:
        """Release every handler: the connection is gone."""
        self.closed = True
        rpcs = list(self._rpcs.values())
        self._rpcs.clear()
        self._ending.clear()
        self._withheld.clear()
        self._deadlines.clear()
        self._over.clear()
        self._buffered = 0
        self._counters.streams_open -= len(rpcs)
        for rpc in rpcs:
            rpc.over = True
        for rpc in rpcs:
            self._close_handler(rpc)

    def _process(self, events: list[ngh2.Event]) -> None:
        rpcs = self._rpcs
        for event in events:
            if isinstance(event, DataReceived):
                stream_id = event.stream_id
                data = event.data
                rpc = rpcs.get(stream_id)
                if rpc is not None and not rpc.over and rpc.handler is not None:
                    if data:
                        self._receive_message(rpc, rpc.handler, data)
                    if event.end_stream:
                        self._half_close(rpc)
                elif event.end_stream:
                    self._ending.pop(stream_id, None)
                if data:
                    self._acknowledge(stream_id, len(data))
            elif isinstance(event, RequestReceived):
                self._open(event)
            elif isinstance(event, StreamClosed):
                self._close_stream(event.stream_id)
            elif isinstance(event, StreamReset):
                self._counters.resets_received += 1
            elif isinstance(event, ngh2.TrailersReceived):
                rpc = rpcs.get(event.stream_id)
                if rpc is not None and not rpc.over:
                    self._half_close(rpc)
                else:
                    self._ending.pop(event.stream_id, None)
            elif isinstance(event, ngh2.PingAcknowledged):
                if event.opaque_data == _DRAIN_PING and self._draining:
                    self._http2.send_goaway()
            elif isinstance(event, ngh2.ConnectionClosed):
                if event.error_code != ErrorCode.NO_ERROR:
                    self._reject("protocol_error")
                self.lost()

    def _open(self, event: RequestReceived) -> None:
        stream_id, headers = event.stream_id, event.headers
        if headers == self._last_headers:
            # Envoy opens every stream with the same headers: keep and look through them once.
            headers, fields = self._last_headers, self._last_fields
        else:
            self._last_headers, self._last_fields = headers, (fields := dict(headers))
        self._counters.streams_opened += 1
        self._counters.streams_open += 1
        self._rpcs[stream_id] = rpc = _Rpc(self, stream_id, headers)
        rpc.half_closed = event.end_stream
        if fields.get(b":method") != b"POST":
            self._refuse_http(rpc, "method_not_allowed", b"405")
            return
        content_type = fields.get(b"content-type", b"")
        if content_type != b"application/grpc" and not content_type.startswith(
            (b"application/grpc+", b"application/grpc;")
        ):
            self._refuse_http(rpc, "content_type", b"415")
            return
        path = fields.get(b":path", b"")
        make_handler = self._services.get(path)
        if make_handler is None:
            self._refuse(rpc, "unknown_method", Status.UNIMPLEMENTED, f"unknown method {path[:200].decode('latin-1')}")
            return
        timeout = fields.get(b"grpc-timeout")
        if timeout is not None:
            try:
                due = self._clock() + parse_timeout(timeout)
            except ValueError as unreadable:
                self._refuse(rpc, "bad_timeout", Status.INTERNAL, str(unreadable))
                return
            self._deadlines.add(due, stream_id, self._rpcs)
        try:
            rpc.handler = make_handler(rpc)
        except Exception as error:  # noqa: BLE001 - a service's fault ends its own RPC, whatever it is
            self._handler_failed(rpc, error)
            return
        if rpc.half_closed:
            self._half_close(rpc)

    def _receive_message(self, rpc: _Rpc, handler: Handler, data: bytes) -> None:
        unframer = rpc.unframer
        if unframer is None:
            size = len(data) - PREFIX_SIZE
            if 0 <= size <= self._limits.max_message and PREFIX.unpack_from(data) == (0, size):
                try:
                    handler.message(data[PREFIX_SIZE:])
                except Exception as error:  # noqa: BLE001
                    self._handler_failed(rpc, error)
                return
            unframer = rpc.unframer = Unframer(self._limits.max_message)
        self._buffered -= unframer.size
        messages = unframer.feed(data)
        self._buffered += unframer.size
        try:
            for message in messages:
                handler.message(message)
                if rpc.over:
                    return
        except Exception as error:  # noqa: BLE001
            self._handler_failed(rpc, error)
            return
        if unframer.violation is not None:
            self._refuse(rpc, *unframer.violation)
        elif self._buffered > self._limits.receive_buffer:
            text = f"incomplete messages on this connection exceed {self._limits.receive_buffer} bytes"
            self._refuse(rpc, "receive_buffer_full", Status.RESOURCE_EXHAUSTED, text)
        elif not unframer.size:
            rpc.unframer = None

    def _half_close(self, rpc: _Rpc) -> None:
        rpc.half_closed = True
        self._ending.pop(rpc.stream_id, None)
        if rpc.over or rpc.handler is None:
            return
        if rpc.unframer is not None:
            self._refuse(rpc, "bad_frame", Status.INTERNAL, "the stream ended inside a message")
            return
        try:
            rpc.handler.half_closed()
        except Exception as error:  # noqa: BLE001
            self._handler_failed(rpc, error)

    def _send(self, rpc: _Rpc, message: bytes) -> None:
        http2 = self._http2
        stream_id = rpc.stream_id
        try:
            if not rpc.responded:
                http2.send_response(stream_id, _RESPONSE_HEADERS)
                rpc.responded = True
            http2.send_data(stream_id, PREFIX.pack(0, len(message)) + message)
        except ngh2.StreamProtocolError:
            return  # the peer has reset the stream; its StreamClosed is about to be processed
        if http2.queued_body_size() > self._limits.send_queue:
            self._reject("send_queue_full", connection=False)
            self._reset(stream_id, ErrorCode.ENHANCE_YOUR_CALM)
            self._end(rpc)
        if not self._receiving:
            self._wake()

    def _finish(self, rpc: _Rpc, status: Status, message: str) -> None:
        trailers = encode_status(status, message) if status or message else _OK_TRAILERS
        if rpc.responded:
            self._end_stream(rpc, trailers, trailers_only=False)
        else:
            self._end_stream(rpc, _RESPONSE_HEADERS + trailers, trailers_only=True)

    def _refuse(self, rpc: _Rpc, reason: str, status: Status, message: str) -> None:
        self._reject(reason, connection=False)
        trailers = encode_status(status, message)
        if reason == "compressed":
            trailers.append(_ACCEPT_ENCODING)
        if rpc.responded:
            self._end_stream(rpc, trailers, trailers_only=False)
        else:
            self._end_stream(rpc, _RESPONSE_HEADERS + trailers, trailers_only=True)

    def _refuse_http(self, rpc: _Rpc, reason: str, code: bytes) -> None:
        self._reject(reason, connection=False)
        self._end_stream(rpc, [(b":status", code)], trailers_only=True)

    def _end_stream(self, rpc: _Rpc, headers: list[tuple[bytes, bytes]], *, trailers_only: bool) -> None:
        try:
            if trailers_only:
                self._http2.send_response(rpc.stream_id, headers, end_stream=True)
            else:
                self._http2.send_trailers(rpc.stream_id, headers)
        except ngh2.StreamProtocolError:
            pass  # the peer has reset the stream
        else:
            if not rpc.half_closed:
                self._ending[rpc.stream_id] = trailers_only
        self._end(rpc)
        if not self._receiving:
            self._wake()

    def _end(self, rpc: _Rpc) -> None:
        rpc.over = True
        self._over.append(rpc)

    def _release(self) -> None:
        over, self._over = self._over, []
        for rpc in over:
            self._drop_buffer(rpc)
            self._close_handler(rpc)

    def _close_stream(self, stream_id: int) -> None:
        self._ending.pop(stream_id, None)
        unacknowledged = self._withheld.pop(stream_id, None)
        if unacknowledged:
            self._http2.acknowledge_received_data(unacknowledged, stream_id)
        rpc = self._rpcs.pop(stream_id, None)
        if rpc is not None:
            self._counters.streams_open -= 1
            rpc.over = True
            self._drop_buffer(rpc)
            self._close_handler(rpc)

    def _drop_buffer(self, rpc: _Rpc) -> None:
        if rpc.unframer is not None:
            self._buffered -= rpc.unframer.size
            rpc.unframer = None

    def _close_handler(self, rpc: _Rpc) -> None:
        handler, rpc.handler = rpc.handler, None
        if handler is not None:
            try:
                handler.closed()
            except Exception:
                self._counters.handler_errors += 1
                logger.exception("An RPC handler failed to close")

    def _handler_failed(self, rpc: _Rpc, error: Exception) -> None:
        """End the RPC of a handler that raised. The peer learns no details."""
        self._counters.handler_errors += 1
        logger.error("An RPC handler failed", path=rpc.path, exc_info=error)
        if not rpc.over:
            self._finish(rpc, Status.INTERNAL, "internal error")

    def _acknowledge(self, stream_id: int, size: int) -> None:
        http2 = self._http2
        queued = http2.queued_body_size()
        if queued > self._limits.stream_queue and (
            queued > self._limits.connection_queue or http2.queued_body_size(stream_id) > self._limits.stream_queue
        ):
            self._withheld[stream_id] = self._withheld.get(stream_id, 0) + size
        else:
            http2.acknowledge_received_data(size, stream_id)

    def _settle(self) -> bool:
        """After all that could be sent was: grant windows again, reset finished streams. Say if there is more to send."""
        http2 = self._http2
        if self._withheld and http2.queued_body_size() <= self._limits.connection_queue:
            for stream_id, size in list(self._withheld.items()):
                if http2.queued_body_size(stream_id) <= self._limits.stream_queue:
                    del self._withheld[stream_id]
                    http2.acknowledge_received_data(size, stream_id)
        for stream_id, trailers_only in list(self._ending.items()):
            # Trailers wait behind an exhausted window even when no body does.
            if trailers_only or (
                not http2.queued_body_size(stream_id)
                and http2.remote_window_size > 0
                and http2.stream_remote_window_size(stream_id) > 0
            ):
                del self._ending[stream_id]
                self._reset(stream_id, ErrorCode.NO_ERROR)
        while len(self._ending) > _MAX_ENDING:
            # A courtesy only: these streams end when the peer, which has yet to read, ends them.
            del self._ending[next(iter(self._ending))]
        return http2.want_write

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self._counters.resets_sent += 1
        self._http2.reset_stream(stream_id, code)

    def _reject(self, reason: str, *, connection: bool = True) -> None:
        self._counters.rejected[reason] += 1
        if connection:
            self.rejection = reason
        else:
            self.refusals.add(reason)

    def _fail(self, data: bytes, error: NGH2Error) -> None:
        """Give the connection up: `data` broke the protocol so badly that HTTP/2 cannot even say so."""
        if self._greeted:
            self._reject("abuse" if isinstance(error, ngh2.DenialOfServiceError) else "protocol_error")
        else:
            reason, self._last_words = recognise(data)
            self._reject(reason)
        self.lost()
