"""Serves RPCs on a TCP port with our own HTTP/2: sockets, TLS handshakes, timers and shutdown around the connections.

Works on uvloop and on plain asyncio. All state is touched from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import cast

import structlog

from picker.io.rpc import Services
from picker.io.transport.connection import Http2Connection
from picker.io.transport.counters import TransportCounters
from picker.io.transport.limits import KIB, Limits
from picker.io.transport.tls import CertificateSource, listening_context

logger = structlog.get_logger(__name__)

_WRITE_SIZE = 256 * KIB
_HANDSHAKE_SECONDS = 10.0
_LINGER_SECONDS = 2.0
_MAX_NAMED_PEERS = 256

_REMEDIES = {
    "http1": "The peer speaks HTTP/1; speak HTTP/2 (h2c) to this port",
    "tls_on_plaintext": "The peer speaks TLS; configure TLS for this port, or speak HTTP/2 (h2c) to it",
    "bad_preface": "The peer does not speak HTTP/2; speak HTTP/2 (h2c) to this port",
    "protocol_error": "The peer broke the HTTP/2 protocol",
    "abuse": "The peer exceeded a limit of HTTP/2",
    "tls_handshake": "A TLS handshake failed",
    "too_many_connections": "The limit of connections is reached",
    "unresponsive": "The peer neither sends, nor reads, nor answers a PING",
    "message_too_large": "A message is larger than listen.maxMessageBytes: its request passes without a pick, or fails "
    "in full duplex; raise the limit above Envoy's buffer limit",
    "receive_buffer_full": "Too many unfinished messages wait on one connection: requests pass without a pick, or fail",
    "send_queue_full": "The peer reads too slowly, and a stream had to be reset",
}


class Http2Server:
    """Serves `services` over HTTP/2, in plain text (h2c) or with TLS if there is a source of certificates.

    A connection from which nothing arrives for `ping_seconds` is pinged, and given up after as long again: a peer that
    vanished must not hold streams open.
    """

    def __init__(
        self,
        services: Services,
        *,
        limits: Limits | None = None,
        certificates: CertificateSource | None = None,
        counters: TransportCounters | None = None,
        max_connections: int = 1024,
        ping_seconds: float = 30.0,
    ) -> None:
        self.counters = counters or TransportCounters()
        self._services = services
        self._limits = limits or Limits()
        self._certificates = certificates
        self._max_connections = max_connections
        self.ping_seconds = ping_seconds
        self._listener: asyncio.Server | None = None
        self._connections: set[_Http2Protocol] = set()
        self._named_peers: set[tuple[str, str]] = set()
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port: the one that was free if `port` is 0. OSError if it cannot be had."""
        loop = asyncio.get_running_loop()
        context = None
        if self._certificates is not None:
            context = listening_context(self._certificates, self._handshake_failed)
        self._listener = await loop.create_server(
            self._protocol,
            host,
            port,
            backlog=1024,
            ssl=context,
            ssl_handshake_timeout=None if context is None else _HANDSHAKE_SECONDS,
        )
        return cast("int", self._listener.sockets[0].getsockname()[1])

    def begin_drain(self) -> None:
        """Accept no more connections and ask peers to open no more streams; those that are open go on."""
        if self.draining:
            return
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.begin_drain()

    async def close(self, grace: float) -> None:
        """Drain for up to `grace` seconds, then end what is left."""
        self.begin_drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        for connection in list(self._connections):
            connection.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), 2 * _LINGER_SECONDS)

    def admit(self, protocol: _Http2Protocol, peer: str) -> bool:
        """Count a new connection in, or say that there are too many."""
        if len(self._connections) >= self._max_connections:
            self.counters.rejected["too_many_connections"] += 1
            self.name_peer("too_many_connections", peer)
            return False
        self._connections.add(protocol)
        self._idle.clear()
        self.counters.connections_opened += 1
        self.counters.connections_open += 1
        return True

    def forget(self, protocol: _Http2Protocol) -> None:
        """Count a connection out."""
        self._connections.discard(protocol)
        self.counters.connections_open -= 1
        if not self._connections:
            self._idle.set()

    def name_peer(self, reason: str, peer: str) -> None:
        """Log why a peer is turned away: once for each peer and reason, and only of the first 256.

        A peer whose TLS handshake failed has no name; what went wrong with it stands for it.
        """
        key = (reason, peer)
        if key not in self._named_peers and len(self._named_peers) < _MAX_NAMED_PEERS:
            self._named_peers.add(key)
            logger.warning(_REMEDIES[reason], reason=reason, peer=peer)

    def _protocol(self) -> _Http2Protocol:
        return _Http2Protocol(self, self._services, self._limits)

    def _handshake_failed(self, error: ssl.SSLError) -> None:
        self.counters.rejected["tls_handshake"] += 1
        self.name_peer("tls_handshake", error.reason or "unknown")


class _Http2Protocol(asyncio.Protocol):
    """One connection: moves bytes between a socket and an `Http2Connection`, one write for each read."""

    def __init__(self, server: Http2Server, services: Services, limits: Limits) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._connection = Http2Connection(
            services,
            limits=limits,
            counters=server.counters,
            clock=self._loop.time,
            wake=self._wake,
        )
        self._flush_due = False
        self._paused = False
        self._heard = True
        self._watch: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        self._peer = _peer_name(transport)
        if not self._server.admit(self, self._peer):
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(_WRITE_SIZE)
        self._watch = self._loop.call_later(self._server.ping_seconds, self._check_peer)
        if self._server.draining:
            self._connection.begin_drain()  # its TLS handshake took until now
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._connection.receive_data(data)
        self._flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._transport is None:
            return
        self._transport = None
        for timer in (self._watch, self._expiry):
            if timer is not None:
                timer.cancel()
        self._connection.lost()
        self._server.forget(self)

    def pause_writing(self) -> None:
        # A peer that does not read is not read from: what it could make us queue is bounded.
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._flush()

    def begin_drain(self) -> None:
        self._connection.begin_drain()
        self._flush()

    def terminate(self) -> None:
        self._connection.terminate()
        self._flush()

    def _wake(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush_soon)

    def _flush_soon(self) -> None:
        self._flush_due = False
        self._flush()

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:
            return
        connection = self._connection
        while not self._paused:
            out = connection.data_to_send(_WRITE_SIZE)
            if out:
                transport.write(out)
            if len(out) < _WRITE_SIZE:
                break
        if connection.refusals:
            for reason in connection.refusals & _REMEDIES.keys():
                self._server.name_peer(reason, self._peer)
            connection.refusals.clear()
        if connection.closed:
            self._close(transport)
        elif (due := connection.next_deadline) is not None and (self._expiry is None or due < self._expiry.when()):
            self._arm(due)

    def _arm(self, due: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._connection.expire(self._loop.time())
        self._flush()

    def _check_peer(self) -> None:
        if not self._heard:
            self._server.counters.rejected["unresponsive"] += 1
            self._server.name_peer("unresponsive", self._peer)
            if self._transport is not None:
                self._transport.abort()
            return
        self._heard = False
        self._watch = self._loop.call_later(self._server.ping_seconds, self._check_peer)
        self._connection.ping()
        self._flush()

    def _close(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        if self._connection.rejection is not None:
            self._server.name_peer(self._connection.rejection, self._peer)
        transport.close()
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_later(_LINGER_SECONDS, transport.abort)


def _peer_name(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else "unknown"
