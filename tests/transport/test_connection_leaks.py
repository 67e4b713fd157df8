"""A connection that lives for days: hundreds of thousands of streams leave nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path

import ngh2

from picker.io.transport.connection import Http2Connection
from picker.io.transport.counters import TransportCounters
from picker.io.transport.limits import Limits

STREAMS = 200_000
BATCH = 50
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/test.Test/Process"),
    (b":authority", b"picker"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
MESSAGE = b"\x00\x00\x00\x00\x40" + bytes(64)


class Answer:
    """Answers every message; finishes when the peer does."""

    opened = 0
    finished = 0

    def __init__(self, call):
        self.call = call
        Answer.opened += 1

    def message(self, data):
        self.call.send(data)

    def half_closed(self):
        self.call.finish()

    def closed(self):
        Answer.finished += 1


class Client:
    """Drives a server connection in memory with the other role of `ngh2`."""

    def __init__(self):
        self.counters = TransportCounters()
        self.server = Http2Connection(
            {"/test.Test/Process": Answer},
            limits=Limits(),
            counters=self.counters,
            clock=float,
            wake=lambda: None,
        )
        self.http2 = ngh2.Connection(ngh2.Role.CLIENT)
        self.http2.initiate_connection()
        self.exchange()

    def exchange(self):
        while True:
            to_server = self.http2.data_to_send()
            if to_server:
                self.server.receive_data(to_server)
            to_client = self.server.data_to_send(1 << 20)
            if to_client:
                self.http2.receive_data(to_client)
                self.http2.events()
            if not to_server and not to_client:
                return

    def converse(self, streams):
        """One third each: half-closed, reset in the middle of an RPC, reset with a message cut in two."""
        for start in range(0, streams, BATCH):
            batch = [self.http2.send_request(REQUEST) for _ in range(min(BATCH, streams - start))]
            for number, stream in enumerate(batch):
                cut = MESSAGE if number % 3 else MESSAGE[:-1]
                self.http2.send_data(stream, cut, end_stream=number % 3 == 1)
            self.exchange()
            for number, stream in enumerate(batch):
                if number % 3 != 1:
                    self.http2.reset_stream(stream, 2 if number % 2 else 8)
            self.exchange()


def test_two_hundred_thousand_streams_leave_nothing_behind():
    client = Client()
    client.converse(20_000)
    objects, memory = census()
    client.converse(STREAMS - 20_000)
    after_objects, after_memory = census()
    assert client.counters.streams_opened == STREAMS
    assert client.counters.streams_open == 0
    assert (Answer.opened, Answer.finished) == (STREAMS, STREAMS)
    assert after_objects - objects < 50
    assert after_memory - memory < 4 * 1024 * 1024
    server = client.server
    assert [len(held) for held in (server._rpcs, server._over, server._ending, server._withheld)] == [0, 0, 0, 0]
    assert server._buffered == 0
    assert not server.closed


def test_many_streams_stay_open_at_once():
    """One ext_proc stream stays open for every LLM request in flight."""
    client = Client()
    streams = [client.http2.send_request(REQUEST) for _ in range(20_000)]
    for stream in streams:
        client.http2.send_data(stream, MESSAGE)
    client.exchange()
    assert client.counters.streams_open == 20_000
    for stream in streams:
        client.http2.end_stream(stream)
    client.exchange()
    assert client.counters.streams_open == 0


def census():
    gc.collect()
    return len(gc.get_objects()), int(Path("/proc/self/statm").read_text().split()[1]) * 4096
