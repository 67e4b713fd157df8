"""What one HTTP/2 connection may cost."""

from __future__ import annotations

from msgspec import Struct

KIB = 1024
MIB = 1024 * KIB


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds on one connection, in bytes unless said otherwise. The defaults suit an Envoy with buffered bodies."""

    max_message: int = 16 * MIB
    """Largest message accepted (`listen.maxMessageBytes`); a larger one ends its RPC with RESOURCE_EXHAUSTED."""
    max_concurrent_streams: int = 100_000
    """Streams, advertised to the peer: Envoy holds one open for every LLM request in flight."""
    receive_buffer: int = 256 * MIB
    """Incomplete messages held for all streams; the stream that goes beyond ends with RESOURCE_EXHAUSTED."""
    stream_window: int = MIB
    """Receive window of a stream: what a peer may send before we grant more."""
    connection_window: int = 16 * MIB
    """Receive window of the connection."""
    stream_queue: int = 256 * KIB
    """Unsent bytes on a stream from which on we grant its peer no more window."""
    connection_queue: int = 16 * MIB
    """Unsent bytes on all streams from which on we grant no stream more window."""
    send_queue: int = 256 * MIB
    """Unsent bytes on all streams; a stream that sends beyond this is reset."""
