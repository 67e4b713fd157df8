"""Whatever a handler sends, in a read or at any other time, reaches a peer that reads: no byte waits for another event.

The real protocol glue around a connection, with a transport and a loop in the hands of hypothesis, against a client of
`h2` that grants windows when it pleases.
"""

from __future__ import annotations

import asyncio

import h2.config
import h2.connection
import h2.events
import h2.settings
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.io.transport.server import Http2Server
from tests.transport.test_connection import REQUEST, frame

SIZES = st.sampled_from([0, 1, 100, 4_000, 16_384, 62_000, 300_000])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.just(0)),
        st.tuples(st.just("ask"), st.sampled_from([1, 9_000])),
        st.tuples(st.just("send"), SIZES),
        st.tuples(st.just("answer"), SIZES),
        st.tuples(st.just("grant"), st.sampled_from([1, 5_000, 70_000])),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.sampled_from(["turn", "pause", "resume", "finish"]), st.just(0)),
    ),
    max_size=40,
)


class Asked:
    """Answers a message at once with as many bytes as it was told to, and sends more when the test says so."""

    def __init__(self, call, sizes, opened):
        self.call, self.sizes, self.sent, self.over = call, sizes, b"", False
        opened.append(self)

    def message(self, _):
        if self.sizes:
            self.send(self.sizes.pop())

    def send(self, size):
        message = bytes([size % 251]) * size
        if not self.over:
            self.sent += frame(message)
        self.call.send(message)

    def finish(self):
        self.over = True
        self.call.finish()

    def half_closed(self):
        pass

    def closed(self):
        pass


class Wire(asyncio.Transport):
    """A transport whose peer reads when it is told to: until then it is full after the first write."""

    def __init__(self):
        super().__init__()
        self.written = bytearray()
        self.reading = True

    def get_extra_info(self, _name, default=None):
        return default

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def is_closing(self):
        return False

    def write(self, data):
        self.written += data

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def abort(self):
        raise AssertionError("the server gave the connection up")


async def play(steps, window):
    opened, sizes = [], []
    server = Http2Server({"/test.Test/Echo": lambda call: Asked(call, sizes, opened)})
    protocol = server._protocol()
    wire = Wire()
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.local_settings = h2.settings.Settings(
        client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
    )
    client.initiate_connection()
    received = {}
    streams = []
    paused = False

    def deliver():
        for event in client.receive_data(bytes(wire.written)):
            if isinstance(event, h2.events.DataReceived):
                received[event.stream_id] = received.get(event.stream_id, b"") + event.data
                unread[event.stream_id] = unread.get(event.stream_id, 0) + event.flow_controlled_length
        wire.written.clear()
        talk()

    def talk():
        if wire.reading and (data := client.data_to_send()):
            protocol.data_received(data)

    unread = {}
    protocol.connection_made(wire)
    talk()
    for step, value in steps:
        live = [number for number, stream in enumerate(streams) if stream is not None]
        if step == "open" and wire.reading:
            streams.append(client.get_next_available_stream_id())
            client.send_headers(streams[-1], REQUEST)
            talk()
        elif step == "ask" and live and client.local_flow_control_window(streams[live[-1]]) > value + 5:
            client.send_data(streams[live[-1]], frame(bytes(value)))
            talk()
        elif step == "answer":
            sizes.append(value)
        elif step == "send" and opened:
            opened[-1].send(value)
        elif step == "finish" and opened:
            opened[-1].finish()
        elif step == "reset" and live:
            client.reset_stream(streams[live[-1]])
            streams[live[-1]] = None
            talk()
        elif step == "grant":
            grant(client, unread, value)
            talk()
        elif step == "turn":
            await asyncio.sleep(0)
            deliver()
        elif step == "pause" and not paused:
            paused = True
            protocol.pause_writing()
        elif step == "resume" and paused:
            paused = False
            protocol.resume_writing()
            talk()
    if paused:
        protocol.resume_writing()
    # From here on the peer reads and grants; no handler does anything any more.
    idle = 0
    while idle < 3:
        await asyncio.sleep(0)
        idle = 0 if wire.written or unread else idle + 1
        deliver()
        grant(client, unread, 1 << 30)
        talk()
    for number, stream in enumerate(streams):
        if stream is not None and number < len(opened):
            assert received.get(stream, b"") == opened[number].sent
    protocol.connection_lost(None)


def grant(client, unread, most):
    for stream_id, size in list(unread.items()):
        granted = min(size, most)
        client.acknowledge_received_data(granted, stream_id)
        unread[stream_id] -= granted
        if not unread[stream_id]:
            del unread[stream_id]


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([100, 65_535, 1 << 20]))
def test_no_byte_waits_for_another_event(steps, window):
    asyncio.run(play(steps, window))
