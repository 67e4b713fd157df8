"""Sockets, limits and timers around our own HTTP/2 connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc.aio
import pytest

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
SETTINGS_ACK = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
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
    """PING upon PING whose answers nobody reads: the sockets fill up instead of our memory."""
    server, port = await start(ping_seconds=60)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", port))
    raw.setblocking(False)
    raw.send(PREFACE + SETTINGS)
    await eventually(lambda: server.counters.connections_open == 1)
    burst = (PING + bytes(8)) * 200  # more than 1,000 in one read would be refused
    rest = b""
    blocked = 0
    for _ in range(5000):
        try:
            rest = (rest or burst)[raw.send(rest or burst) :]
            blocked = 0
        except BlockingIOError:
            blocked += 1
        if blocked > 100:
            break
        await asyncio.sleep(0.001)
    assert blocked > 100
    assert server.counters.connections_open == 1
    raw.close()
    await eventually(lambda: server.counters.connections_open == 0)


async def test_answers_to_one_read_leave_in_one_write(start):
    """100 messages that arrive together are answered together."""
    _, port = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + SETTINGS)
    await reader.read(1000)
    header_block = bytes.fromhex("8386") + b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in [
            (b":path", b"/test.Test/Echo"),
            (b":authority", b"picker"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        ]
    )
    message = b"\x00\x00\x00\x00\x03abc"
    data = len(message).to_bytes(3, "big") + b"\x00\x00\x00\x00\x00\x01" + message
    writer.write(len(header_block).to_bytes(3, "big") + b"\x01\x04\x00\x00\x00\x01" + header_block + data * 100)
    received = b""
    reads = 0
    while received.count(message) < 100:
        received += await reader.read(1 << 20)
        reads += 1
    assert reads <= 3
    writer.close()
