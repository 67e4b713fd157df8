"""Tells what a peer speaks whose first bytes are not those of HTTP/2, and what to answer it."""

from __future__ import annotations

_TLS_HANDSHAKE_RECORD = 0x16
_HTTP1_BODY = b"This port speaks gRPC over HTTP/2 (h2c), not HTTP/1.\n"
_HTTP1_ANSWER = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_HTTP1_BODY), _HTTP1_BODY)
)


def recognise(data: bytes) -> tuple[str, bytes]:
    """Return the reason to turn the peer away, one of `TransportCounters.rejected`, and the last words for it.

    `data` is the read with the first byte that HTTP/2 could not begin with.
    """
    if data[0] == _TLS_HANDSHAKE_RECORD:
        return "tls_on_plaintext", b""
    if data[:1].isalpha():
        return "http1", _HTTP1_ANSWER
    return "bad_preface", b""
