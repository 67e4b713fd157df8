"""What a transport has seen, as plain integers for a metrics collector to read."""

from __future__ import annotations

from collections import Counter


class TransportCounters:
    """Counts of one server, over all its connections.

    Monotonic: `connections_opened`, `streams_opened`, `resets_received` (RST_STREAM frames from peers; Envoy ends every
    ext_proc stream with one), `resets_sent`, `handler_errors`, `deadlines_exceeded`, and the
    entries of `rejected`.
    Current: `connections_open`, `streams_open`.

    `rejected` maps a reason to how often it turned something away.
    Connections: `too_many_connections`, `tls_handshake`, `http1`, `tls_on_plaintext`, `bad_preface`, `protocol_error`,
    `abuse` (a limit of the HTTP/2 engine), `unresponsive` (no bytes from the peer, not even an answer to a PING).
    Streams: `method_not_allowed`, `content_type`, `unknown_method`, `bad_timeout`, `compressed`, `bad_frame`,
    `message_too_large`, `receive_buffer_full`, `send_queue_full`.
    """

    __slots__ = (
        "connections_open",
        "connections_opened",
        "deadlines_exceeded",
        "handler_errors",
        "rejected",
        "resets_received",
        "resets_sent",
        "streams_open",
        "streams_opened",
    )

    def __init__(self) -> None:
        self.connections_opened = 0
        self.connections_open = 0
        self.streams_opened = 0
        self.streams_open = 0
        self.resets_received = 0
        self.resets_sent = 0
        self.handler_errors = 0
        self.deadlines_exceeded = 0
        self.rejected: Counter[str] = Counter()
