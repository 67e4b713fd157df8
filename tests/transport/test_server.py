"""Sockets, limits and timers around our own HTTP/2 connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc.aio
import pytest

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
WIDE_SETTINGS = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\x00\x04\x7f\xff\xff\xff"
WIDE_WINDOW = b"\x00\x00\x04\x08\x00\x00\x00\x00\x00" + (2**31 - 1 - 65535).to_bytes(4, "big")
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00"


@pytest.fixture
def transport():
    return "http2"


async def test_http1_client_is_told_and_named_once(start, logs, eventually):
    server, port = await start()
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.read()
        # The server speaks first in HTTP/2: its SETTINGS may come before it knows better.
        assert b"HTTP/1.1 505 " in answer
        assert b"h2c" in answer
        writer.close()
    await eventually(lambda: server.counters.connections_open == 0)
    assert server.counters.rejected == {"http1": 3}
    assert [line["peer"] for line in logs if "h2c" in line["event"]] == ["127.0.0.1"]


async def test_tls_client_on_a_plain_text_port(start, logs):
    server, port = await start()
    with pytest.raises(OSError):  # noqa: PT011 - the error depends on the event loop
        await asyncio.open_connection("127.0.0.1", port, ssl=True)
    assert server.counters.rejected == {"tls_on_plaintext": 1}
    assert "TLS" in logs[0]["event"]


async def test_connections_above_the_limit_are_closed(start, eventually):
    server, port = await start(max_connections=2)
    kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    await eventually(lambda: server.counters.connections_open == 2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    assert server.counters.rejected == {"too_many_connections": 1}
    for _, open_writer in kept:
        open_writer.close()
    await eventually(lambda: server.counters.connections_open == 0)
    assert server.counters.connections_opened == 2


async def test_peer_that_vanished_is_given_up(start, eventually):
    """A silent peer is pinged; without an answer its connection ends, and with it its streams."""
    server, port = await start(ping_seconds=0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + SETTINGS)
    received = b""
    while PING not in received:
        received += await reader.read(1000)
    await eventually(lambda: server.counters.connections_open == 0)
    assert server.counters.rejected == {"unresponsive": 1}
    writer.close()


async def test_peer_that_answers_pings_stays(start, dial):
    server, port = await start(ping_seconds=0.1)
    channel = dial(port)
    stream = channel.stream_stream("/test.Test/Echo")()
    await stream.write(b"1")
    assert await stream.read() == b"1"
    await asyncio.sleep(0.5)
    await stream.write(b"2")
    assert await stream.read() == b"2"
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert server.counters.connections_opened == 1


async def test_peer_that_never_reads_its_socket_is_not_read_from(start, eventually):
    """Its HTTP/2 windows are wide open, so that only the sockets can fill up; then the server stops reading as well."""
    server, port = await start(ping_seconds=60)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", port))
    raw.setblocking(False)
    raw.send(PREFACE + WIDE_SETTINGS + WIDE_WINDOW)
    sent = blocked = 0
    stream = 1
    rest = b""
    while blocked < 100 and sent < 12 * 1024 * 1024:
        if not rest:
            rest = request(stream, bytes(10_000))
            stream += 2
        try:
            count = raw.send(rest)
        except BlockingIOError:
            blocked += 1
            await asyncio.sleep(0.002)
        else:
            blocked = 0
            sent += count
            rest = rest[count:]
            await asyncio.sleep(0)
    assert blocked == 100
    assert server.counters.rejected == {}
    assert server.counters.connections_open == 1
    raw.close()
    await eventually(lambda: server.counters.connections_open == 0)


async def test_answers_to_one_read_leave_in_one_write(start):
    """100 streams that arrive together are answered together."""
    _, port = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + SETTINGS)
    await reader.read(1000)
    writer.write(b"".join(request(2 * number + 1, b"abc") for number in range(100)))
    received = b""
    reads = 0
    while received.count(b"\x00\x00\x00\x00\x03abc") < 100:
        received += await reader.read(1 << 20)
        reads += 1
    assert reads <= 3
    writer.close()


def request(stream, message):
    """One RPC to the echo, in bytes: literal headers (RFC 7541, section 6.2.2) and one DATA frame that ends the stream."""
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/test.Test/Echo",
        b":authority": b"picker",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in headers.items()
    )
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    identifier = stream.to_bytes(4, "big")
    return (
        len(block).to_bytes(3, "big")
        + b"\x01\x04"
        + identifier
        + block
        + len(body).to_bytes(3, "big")
        + b"\x00\x01"
        + identifier
        + body
    )
