"""What a gRPC client sees is the same, whichever transport serves it and on whichever event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from picker.io.transport.limits import Limits

CHUNK = 64 * 1024
SIZES = [0, 1, 62_000, 64 * 1024, 1024 * 1024, 10 * 1024 * 1024]


@pytest.fixture(params=["http2", "grpcio"])
def transport(request):
    return request.param


async def test_unary_call(start, dial):
    _, port = await start()
    assert await dial(port).unary_unary("/test.Test/Unary")(b"abc") == b"cba"


async def test_messages_of_every_size_pass_both_ways(start, dial):
    _, port = await start()
    stream = dial(port).stream_stream("/test.Test/Echo")()
    for size in SIZES:
        sent = bytes(range(256)) * (size // 256) + bytes(size % 256)
        await stream.write(sent)
        assert await stream.read() == sent
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_handler_sees_messages_then_half_close_then_close(start, dial, recorder, eventually):
    _, port = await start()
    stream = dial(port).stream_stream("/test.Test/Echo")()
    for text in (b"one", b"", b"three"):
        await stream.write(text)
    await stream.done_writing()
    assert [message async for message in stream] == [b"one", b"", b"three"]
    (handler,) = recorder.handlers
    await eventually(lambda: handler.is_closed)
    assert handler.calls == [b"one", b"", b"three", "half_closed", "closed"]


async def test_many_streams_at_once(start, dial, eventually):
    server, port = await start()
    echo = dial(port).stream_stream("/test.Test/Echo")

    async def converse(index):
        stream = echo()
        for turn in range(5):
            await stream.write(b"%d.%d" % (index, turn))
            assert await stream.read() == b"%d.%d" % (index, turn)
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK

    await asyncio.gather(*(converse(index) for index in range(100)))
    await eventually(lambda: server.counters.streams_open == 0)
    assert server.counters.streams_opened == 100


async def test_cancelled_streams_leave_no_task(start, dial, recorder, eventually):
    server, port = await start()
    await dial(port).unary_unary("/test.Test/Unary")(b"warm up")
    tasks = len(asyncio.all_tasks())
    hold = dial(port).stream_stream("/test.Test/Hold")
    streams = [hold() for _ in range(50)]
    for stream in streams:
        await stream.write(b"x")
    await eventually(lambda: server.counters.streams_open == 50)
    for stream in streams:
        stream.cancel()
    await eventually(lambda: all(handler.is_closed for handler in recorder.handlers))
    del stream, streams
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_messages_sent_outside_of_a_callback_arrive(start, dial, recorder, eventually):
    _, port = await start()
    stream = dial(port).stream_stream("/test.Test/Hold")()
    await stream.write(b"x")
    await eventually(lambda: recorder.handlers and recorder.handlers[0].calls == [b"x"])
    call = recorder.handlers[0].call
    for text in (b"a", b"b"):
        call.send(text)
        assert await stream.read() == text
    call.finish()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    await eventually(lambda: recorder.handlers[0].is_closed)
    call.send(b"after the end")
    call.finish()


async def test_cancelled_stream_closes_its_handler(start, dial, recorder, eventually):
    server, port = await start()
    stream = dial(port).stream_stream("/test.Test/Hold")()
    await stream.write(b"x")
    await eventually(lambda: recorder.handlers and recorder.handlers[0].calls == [b"x"])
    stream.cancel()
    await eventually(lambda: recorder.handlers[0].is_closed)
    assert recorder.handlers[0].calls == [b"x", "closed"]
    await eventually(lambda: server.counters.streams_open == 0)


async def test_lost_connection_closes_its_handlers(start, dial, recorder, eventually):
    _, port = await start()
    channel = dial(port)
    streams = [channel.stream_stream("/test.Test/Hold")() for _ in range(3)]
    for stream in streams:
        await stream.write(b"x")
    await eventually(lambda: len(recorder.handlers) == 3)
    await channel.close()
    await eventually(lambda: all(handler.is_closed for handler in recorder.handlers))


async def test_status_and_its_text_arrive(start, dial):
    _, port = await start()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await dial(port).unary_unary("/test.Test/NotFound")(b"x")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert error.value.details() == "100 % café\nno such thing"


async def test_metadata(start, dial):
    _, port = await start()
    method = dial(port).unary_unary("/test.Test/Metadata")
    metadata = [("x-one", "1"), ("x-two", "a"), ("x-two", "b"), ("x-data-bin", b"\x00\xff")]
    assert await method(b"x-one", metadata=metadata) == b"1"
    assert await method(b"x-two", metadata=metadata) == b"a,b"
    assert await method(b"x-data-bin", metadata=metadata) == b"<none>"
    assert await method(b":path", metadata=metadata) == b"<none>"


async def test_unknown_method(start, dial):
    _, port = await start()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await dial(port).unary_unary("/test.Test/Missing")(b"x")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_oversized_message_ends_its_rpc_only(start, dial, recorder):
    _, port = await start(limits=Limits(max_message=1000))
    channel = dial(port)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_unary("/test.Test/Unary")(bytes(1001))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await channel.unary_unary("/test.Test/Unary")(bytes(1000)) == bytes(1000)
    assert all(not call for call in recorder.handlers[0].calls if isinstance(call, bytes))


async def test_deadline(start, dial, recorder, eventually):
    _, port = await start()
    stream = dial(port).stream_stream("/test.Test/Hold")(timeout=0.3)
    await stream.write(b"x")
    assert await stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: recorder.handlers[0].is_closed)


@pytest.mark.parametrize("method", ["FailToOpen", "FailOnMessage", "FailOnHalfClose"])
async def test_failing_handler_ends_its_rpc_only(start, dial, method):
    server, port = await start()
    channel = dial(port)
    other = channel.stream_stream("/test.Test/Echo")()
    await other.write(b"1")
    assert await other.read() == b"1"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_unary(f"/test.Test/{method}")(b"x")
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert error.value.details() == "internal error"
    assert server.counters.handler_errors == 1
    await other.write(b"2")
    assert await other.read() == b"2"
    other.cancel()


async def test_handler_that_fails_to_close_harms_nobody(start, dial, eventually):
    server, port = await start()
    channel = dial(port)
    assert await channel.unary_unary("/test.Test/FailOnClose")(b"x") == b"x"
    await eventually(lambda: server.counters.handler_errors == 1)
    assert await channel.unary_unary("/test.Test/Unary")(b"ab") == b"ba"


async def test_slow_reader_holds_back_its_sender_and_memory_stays_bounded(start, dial):
    """A client that writes 256 MiB to an echo and reads nothing is stopped by the windows long before."""
    _, port = await start()
    stream = dial(port).stream_stream("/test.Test/Echo")()
    sent = 0

    async def write():
        nonlocal sent
        for _ in range(4096):
            await stream.write(bytes(CHUNK))
            sent += 1
        await stream.done_writing()

    before = resident_bytes()
    writing = asyncio.create_task(write())
    last = -1
    while last != sent:
        last = sent
        await asyncio.sleep(0.3)
    assert sent < 512
    assert resident_bytes() - before < 100 * 1024 * 1024
    received = 0
    for _ in range(400):
        message = await stream.read()
        assert message == bytes(CHUNK)
        received += 1
    writing.cancel()
    stream.cancel()
    assert received == 400


async def test_other_streams_move_while_one_is_stuck(start, dial):
    _, port = await start()
    channel = dial(port)
    stuck = channel.stream_stream("/test.Test/Flood")()
    await stuck.write(b"200")
    await asyncio.sleep(0.2)
    for _ in range(20):
        assert await channel.unary_unary("/test.Test/Unary")(b"ab" * 10_000) == b"ba" * 10_000
    await stuck.done_writing()
    assert sum([len(message) async for message in stuck]) == 200 * CHUNK


async def test_drain_lets_open_streams_finish(start, dial, recorder):
    server, port = await start()
    channel = dial(port)
    stream = channel.stream_stream("/test.Test/Echo")()
    await stream.write(b"before")
    assert await stream.read() == b"before"
    server.begin_drain()
    await asyncio.sleep(0.2)
    await stream.write(b"after")
    assert await stream.read() == b"after"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_unary("/test.Test/Unary")(b"x")
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    closing = asyncio.create_task(server.close(10))
    await asyncio.sleep(0.1)
    assert not closing.done()
    await stream.done_writing()
    assert await stream.code() is grpc.StatusCode.OK
    await asyncio.wait_for(closing, 5)
    assert recorder.handlers[0].calls == [b"before", b"after", "half_closed", "closed"]


async def test_close_ends_streams_after_the_grace(start, dial, recorder, eventually):
    server, port = await start()
    stream = dial(port).stream_stream("/test.Test/Hold")()
    await stream.write(b"x")
    await eventually(lambda: recorder.handlers and recorder.handlers[0].calls == [b"x"])
    await asyncio.wait_for(server.close(0.1), 5)
    assert await stream.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    await eventually(lambda: recorder.handlers[0].is_closed)


async def test_frequent_pings_without_a_stream_are_welcome(start, dial):
    _, port = await start()
    keepalive = {
        "grpc.keepalive_time_ms": 1000,
        "grpc.keepalive_timeout_ms": 1000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.http2.min_time_between_pings_ms": 1000,
    }
    channel = dial(port, **keepalive)
    assert await channel.unary_unary("/test.Test/Unary")(b"ab") == b"ba"
    await asyncio.sleep(2.5)
    assert channel.get_state() is grpc.ChannelConnectivity.READY
    assert await channel.unary_unary("/test.Test/Unary")(b"ab") == b"ba"


async def test_port_in_use_is_an_error(start):
    _, port = await start()
    server, _ = await start()
    with pytest.raises(OSError, match=str(port)):
        await type(server)({}).start("127.0.0.1", port)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
