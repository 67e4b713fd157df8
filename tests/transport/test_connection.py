"""The HTTP/2 connection without I/O, against `h2`: an independent implementation of the protocol."""

from __future__ import annotations

import struct
from itertools import pairwise

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.io.rpc import Status
from picker.io.transport.connection import Http2Connection
from picker.io.transport.counters import TransportCounters
from picker.io.transport.limits import Limits

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Test/Echo"),
    (":authority", "picker"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
ENVOY_RESET_CODES = [2, 8]


def frame(message, flags=0):
    """A gRPC message frame, as PROTOCOL-HTTP2.md of grpc has it."""
    return bytes([flags]) + len(message).to_bytes(4, "big") + message


def request(**changes):
    return [(name, changes.get(name.strip(":").replace("-", "_"), value)) for name, value in REQUEST]


class Peer:
    """A server connection and a client of `h2`, joined in memory."""

    def __init__(self, services, *, limits=None, initial_window=None):
        self.now = 1000.0
        self.woken = 0
        self.counters = TransportCounters()
        self.server = Http2Connection(
            services,
            limits=limits or Limits(),
            counters=self.counters,
            clock=lambda: self.now,
            wake=self._wake,
        )
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        if initial_window is not None:
            self.client.local_settings = h2.settings.Settings(
                client=True,
                initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: initial_window},
            )
        self.client.initiate_connection()
        self.events = []
        self.exchange()

    def _wake(self):
        self.woken += 1

    def exchange(self):
        """Pass bytes both ways until there are no more; return what the client sees."""
        seen = []
        while True:
            to_server = self.client.data_to_send()
            if to_server:
                self.server.receive_data(to_server)
            to_client = self.server.data_to_send(1 << 20)
            if to_client:
                seen += self.client.receive_data(to_client)
            if not to_server and not to_client:
                self.events += seen
                return seen

    def open(self, headers=None, *, end_stream=False):
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, headers or REQUEST, end_stream=end_stream)
        return stream_id

    def answer(self, stream_id):
        """(headers, body, trailers, reset code) that came back on a stream."""
        headers, body, trailers, reset = {}, b"", {}, None
        for event in self.events:
            if getattr(event, "stream_id", None) != stream_id:
                continue
            if isinstance(event, h2.events.ResponseReceived):
                headers = dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                body += event.data
            elif isinstance(event, h2.events.TrailersReceived):
                trailers = dict(event.headers)
            elif isinstance(event, h2.events.StreamReset):
                reset = event.error_code
        return headers, body, trailers, reset


@pytest.fixture
def peer(recorder):
    return Peer(recorder.services())


def test_a_conversation(peer, recorder):
    stream = peer.open()
    peer.client.send_data(stream, frame(b"one") + frame(b""))
    peer.exchange()
    peer.client.send_data(stream, frame(b"two"), end_stream=True)
    peer.exchange()
    assert peer.answer(stream) == (
        {":status": "200", "content-type": "application/grpc"},
        frame(b"one") + frame(b"") + frame(b"two"),
        {"grpc-status": "0"},
        None,
    )
    assert recorder.handlers[0].calls == [b"one", b"", b"two", "half_closed", "closed"]
    assert peer.counters.streams_open == 0


def test_rpc_that_ends_without_a_message_has_trailers_only(peer):
    stream = peer.open(end_stream=True)
    peer.exchange()
    headers, body, trailers, _ = peer.answer(stream)
    assert headers == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}
    assert (body, trailers) == (b"", {})


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"method": "GET"}, "405", "method_not_allowed"),
        ({"content_type": "application/json"}, "415", "content_type"),
        ({"content_type": "application/grpc-web"}, "415", "content_type"),
    ],
)
def test_what_is_not_grpc_is_refused_by_http_status(peer, recorder, changes, status, reason):
    stream = peer.open(request(**changes))
    peer.exchange()
    headers, _, _, reset = peer.answer(stream)
    assert (headers, reset) == ({":status": status}, h2.errors.ErrorCodes.NO_ERROR)
    assert peer.counters.rejected == {reason: 1}
    assert recorder.handlers == []
    assert peer.counters.streams_open == 0


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_grpc_content_types(peer, content_type):
    stream = peer.open(request(content_type=content_type), end_stream=True)
    peer.exchange()
    assert peer.answer(stream)[0]["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("data", "status", "text", "reason"),
    [
        (frame(b"x", flags=1), Status.UNIMPLEMENTED, "compressed", "compressed"),
        (frame(b"x", flags=2), Status.INTERNAL, "flags", "bad_frame"),
        (
            frame(bytes(101)),
            Status.RESOURCE_EXHAUSTED,
            "a message of 101 bytes exceeds the limit of 100 bytes; to allow it raise listen.maxMessageBytes",
            "message_too_large",
        ),
    ],
)
def test_bad_message_ends_its_rpc(recorder, data, status, text, reason):
    peer = Peer(recorder.services(), limits=Limits(max_message=100))
    stream = peer.open()
    peer.client.send_data(stream, frame(b"good") + data + frame(b"ignored"))
    peer.exchange()
    _, body, trailers, reset = peer.answer(stream)
    assert body == frame(b"good")
    assert trailers["grpc-status"] == str(int(status))
    assert text in trailers["grpc-message"]
    assert trailers.get("grpc-accept-encoding") == ("identity" if reason == "compressed" else None)
    assert reset == h2.errors.ErrorCodes.NO_ERROR
    assert peer.counters.rejected == {reason: 1}
    assert recorder.handlers[0].calls == [b"good", "closed"]


def test_stream_that_ends_inside_a_message(peer, recorder):
    stream = peer.open()
    peer.client.send_data(stream, frame(b"whole") + frame(b"cut")[:-1], end_stream=True)
    peer.exchange()
    assert peer.answer(stream)[2]["grpc-status"] == str(int(Status.INTERNAL))
    assert recorder.handlers[0].calls == [b"whole", "closed"]


def test_status_text_is_percent_encoded_utf8(peer):
    stream = peer.open(request(path="/test.Test/NotFound"))
    peer.client.send_data(stream, frame(b"x"))
    peer.exchange()
    assert peer.answer(stream)[0]["grpc-message"] == "100 %25 caf%C3%A9%0Ano such thing"


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [("2H", 7200), ("3M", 180), ("10S", 10), ("1500m", 1.5), ("250000u", 0.25), ("99999999n", 0.099999999)],
)
def test_deadline(peer, recorder, timeout, seconds):
    stream = peer.open([*REQUEST, ("grpc-timeout", timeout)])
    peer.exchange()
    assert peer.server.next_deadline == pytest.approx(1000 + seconds)
    peer.server.expire(1000 + seconds * 0.99)
    peer.exchange()
    assert recorder.handlers[0].calls == []
    peer.server.expire(1000 + seconds * 1.01)
    assert peer.woken == 1
    peer.exchange()
    headers, _, _, reset = peer.answer(stream)
    assert headers["grpc-status"] == str(int(Status.DEADLINE_EXCEEDED))
    assert reset == h2.errors.ErrorCodes.NO_ERROR
    assert recorder.handlers[0].calls == ["closed"]
    assert peer.counters.deadlines_exceeded == 1
    assert peer.server.next_deadline is None


@pytest.mark.parametrize("timeout", ["", "5", "S", "123456789S", "-1S", "1x", "1.5S", "²S"])
def test_malformed_timeout(peer, recorder, timeout):
    stream = peer.open([*REQUEST, ("grpc-timeout", timeout)])
    peer.exchange()
    headers = peer.answer(stream)[0]
    assert headers["grpc-status"] == str(int(Status.INTERNAL))
    assert "grpc-timeout" in headers["grpc-message"]
    assert recorder.handlers == []


def test_deadlines_of_rpcs_that_ended_in_time_are_forgotten(peer):
    for _ in range(1000):
        stream = peer.open([*REQUEST, ("grpc-timeout", "1H")], end_stream=True)
        peer.exchange()
        assert peer.answer(stream)[0]["grpc-status"] == "0"
        peer.events.clear()
    assert len(peer.server._deadlines) <= 66


@pytest.mark.parametrize("code", ENVOY_RESET_CODES)
def test_reset_behind_a_message_in_the_same_read(peer, recorder, code):
    stream = peer.open()
    peer.client.send_data(stream, frame(b"x"))
    peer.client.reset_stream(stream, code)
    peer.exchange()
    assert recorder.handlers[0].calls == [b"x", "closed"]
    assert (peer.counters.resets_received, peer.counters.streams_open) == (1, 0)


@pytest.mark.parametrize("finished_first", [False, True])
def test_every_stream_may_be_reset_by_the_peer(recorder, finished_first):
    """Envoy ends every ext_proc stream by RST_STREAM, whether or not the server has sent trailers."""
    peer = Peer(recorder.services())
    for number in range(3000):
        stream = peer.open(request(path="/test.Test/Unary") if finished_first else REQUEST)
        peer.client.send_data(stream, frame(b"x"))
        peer.server.receive_data(peer.client.data_to_send())
        crossing = peer.server.data_to_send(1 << 20)
        peer.client.reset_stream(stream, ENVOY_RESET_CODES[number % 2])
        peer.client.receive_data(crossing)
        peer.exchange()
        peer.events.clear()
    assert not peer.server.closed
    assert peer.counters.resets_received >= 3000  # h2 also answers what crosses its resets by RST_STREAM
    assert all(handler.calls == [b"x", "closed"] for handler in recorder.handlers)
    stream = peer.open(end_stream=True)
    peer.exchange()
    assert peer.answer(stream)[0]["grpc-status"] == "0"


def test_graceful_close_of_envoy(peer, recorder):
    """With `ext_proc_graceful_grpc_close` Envoy half-closes instead of resetting."""
    stream = peer.open()
    peer.client.send_data(stream, frame(b"x"))
    peer.exchange()
    peer.client.end_stream(stream)
    peer.exchange()
    assert peer.answer(stream)[2:] == ({"grpc-status": "0"}, None)
    assert recorder.handlers[0].calls == [b"x", "half_closed", "closed"]


def test_trailers_wait_for_an_exhausted_window_before_the_reset(recorder):
    """With nothing queued but trailers, a window of zero still holds them back; a reset must not overtake them."""
    peer = Peer(recorder.services(), initial_window=len(frame(b"12345")))
    stream = peer.open(request(path="/test.Test/Hold"))
    peer.exchange()
    call = recorder.handlers[0].call
    call.send(b"12345")
    peer.exchange()
    call.finish()
    peer.exchange()
    assert peer.answer(stream)[1:] == (frame(b"12345"), {}, None)
    peer.client.increment_flow_control_window(1000, stream)
    peer.exchange()
    assert peer.answer(stream)[2:] == ({"grpc-status": "0"}, h2.errors.ErrorCodes.NO_ERROR)


def test_sending_later_wakes_the_caller_once_for_each_send(peer, recorder):
    stream = peer.open(request(path="/test.Test/Hold"))
    peer.exchange()
    assert peer.woken == 0
    recorder.handlers[0].call.send(b"later")
    assert peer.woken == 1
    peer.exchange()
    assert peer.answer(stream)[1] == frame(b"later")


def test_peer_that_does_not_read_gets_no_more_window_until_it_does(recorder):
    limits = Limits(stream_queue=1000)
    peer = Peer(recorder.services(), limits=limits, initial_window=100)
    stuck, free = peer.open(), peer.open()
    before = peer.client.remote_flow_control_window(stuck)
    rounds = 0
    while peer.client.local_flow_control_window(stuck) >= 10_005 and rounds < 500:
        peer.client.send_data(stuck, frame(bytes(10_000)))
        peer.exchange()
        rounds += 1
    assert before == 100  # what it granted us
    assert rounds < 120  # 1 MiB of window, and never more
    assert len(peer.server._withheld) == 1
    peer.client.send_data(free, frame(b"free"))
    peer.exchange()
    assert peer.answer(free)[1] == frame(b"free")
    peer.client.increment_flow_control_window(2**30, stuck)
    peer.client.increment_flow_control_window(2**30)
    peer.exchange()
    assert peer.server._withheld == {}
    assert peer.client.local_flow_control_window(stuck) > 500_000
    assert len(peer.answer(stuck)[1]) == rounds * 10_005


def test_all_streams_wait_when_too_much_is_queued_on_the_connection(recorder):
    peer = Peer(recorder.services(), limits=Limits(stream_queue=100, connection_queue=5000), initial_window=0)
    streams = [peer.open() for _ in range(10)]
    for stream in streams:
        peer.client.send_data(stream, frame(bytes(995)))
    quiet = peer.open(request(path="/test.Test/Hold"))
    peer.client.send_data(quiet, frame(b"x"))
    peer.exchange()
    assert quiet in peer.server._withheld
    for stream in streams:
        peer.client.reset_stream(stream, 8)
    peer.exchange()
    assert peer.server._withheld == {}


def test_queue_that_exceeds_its_cap_costs_its_stream(recorder):
    peer = Peer(recorder.services(), limits=Limits(send_queue=300_000), initial_window=0)
    stream = peer.open(request(path="/test.Test/Flood"))
    peer.client.send_data(stream, frame(b"10"))
    peer.exchange()
    assert peer.answer(stream)[3] == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert peer.counters.rejected == {"send_queue_full": 1}
    assert recorder.handlers[0].calls == [b"10", "closed"]
    assert peer.counters.streams_open == 0


def test_incomplete_messages_are_capped(recorder):
    peer = Peer(recorder.services(), limits=Limits(receive_buffer=50_000))
    peer.client.increment_flow_control_window(1_000_000)
    streams = [peer.open() for _ in range(6)]
    for stream in streams:
        peer.client.send_data(stream, frame(bytes(20_000))[:10_000])
    peer.exchange()
    statuses = [peer.answer(stream)[0].get("grpc-status") for stream in streams]
    assert statuses == [None] * 5 + [str(int(Status.RESOURCE_EXHAUSTED))]
    assert peer.counters.rejected == {"receive_buffer_full": 1}
    for stream in streams[:5]:
        peer.client.send_data(stream, frame(bytes(20_000))[10_000:], end_stream=True)
    peer.exchange()
    assert [len(peer.answer(stream)[1]) for stream in streams[:5]] == [20_005] * 5
    assert peer.server._buffered == 0


def test_data_behind_the_end_of_an_rpc_costs_no_window(recorder):
    """40 MiB on streams that are over, through a connection window of 16 MiB."""
    peer = Peer(recorder.services())
    for _ in range(650):
        stream = peer.open(request(path="/test.Test/Missing"))
        for _ in range(4):
            peer.client.send_data(stream, bytes(16_000))
        peer.exchange()
        peer.events.clear()
    assert peer.client.outbound_flow_control_window > 7 * 1024 * 1024


def test_drain(peer, recorder):
    early = peer.open()
    peer.exchange()
    peer.server.begin_drain()
    notice = peer.server.data_to_send(1 << 20)
    racing = peer.open()
    crossed = peer.client.data_to_send()
    assert (
        b"\x00\x00\x08\x07\x00\x00\x00\x00\x00\x7f\xff\xff\xff\x00\x00\x00\x00" in notice
    )  # GOAWAY, last stream 2^31-1
    ping = notice[notice.index(b"\x00\x00\x08\x06\x00\x00\x00\x00\x00") + 9 :][:8]
    peer.server.receive_data(crossed)
    assert b"\x07" not in peer.server.data_to_send(1 << 20)[3:4]
    peer.server.receive_data(b"\x00\x00\x08\x06\x01\x00\x00\x00\x00" + ping)
    final = peer.server.data_to_send(1 << 20)
    assert final == b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + struct.pack(">II", racing, 0)
    for stream in (early, racing):
        assert not peer.server.closed
        peer.server.receive_data(
            b"\x00\x00\x06\x00\x01" + struct.pack(">I", stream) + frame(b"x"),
        )
        answer = peer.server.data_to_send(1 << 20)
        assert frame(b"x") in answer
    assert peer.server.closed
    assert peer.server.rejection is None
    assert [handler.calls for handler in recorder.handlers] == [[b"x", "half_closed", "closed"]] * 2


def test_drain_of_an_idle_connection(peer):
    peer.server.begin_drain()
    events = peer.exchange()
    assert [event.last_stream_id for event in events if isinstance(event, h2.events.ConnectionTerminated)] == [
        2**31 - 1
    ]


def test_terminate_and_lost_release_every_handler_once(peer, recorder):
    for _ in range(3):
        peer.open()
    peer.exchange()
    peer.server.terminate()
    peer.server.lost()
    assert b"\x07" in peer.server.data_to_send(1 << 20)
    assert [handler.calls for handler in recorder.handlers] == [["closed"]] * 3
    recorder.handlers[0].call.send(b"late")
    recorder.handlers[0].call.finish()
    peer.server.receive_data(b"late")
    assert peer.server.data_to_send(1 << 20) == b""
    assert peer.counters.streams_open == 0


def test_handlers_may_talk_to_each_other_while_the_connection_is_lost():
    calls = []

    class Gossip:
        def __init__(self, call):
            calls.append(call)

        def closed(self):
            for call in calls:
                call.send(b"x")
                call.finish()

    peer = Peer({"/test.Test/Echo": Gossip})
    for _ in range(3):
        peer.open()
    peer.exchange()
    peer.server.receive_data(b"\xff" * 100)
    peer.server.data_to_send(1 << 20)
    assert peer.server.closed


@pytest.mark.parametrize(
    ("start", "reason", "answer"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", "http1", b"HTTP/1.1 505 "),
        (b"POST / HTTP/1.1\r\n\r\n", "http1", b"HTTP/1.1 505 "),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "tls_on_plaintext", b""),
        (b"\x00\x01\x02", "bad_preface", b""),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_other_protocols_are_told_apart(recorder, start, reason, answer, step):
    counters = TransportCounters()
    server = Http2Connection(recorder.services(), limits=Limits(), counters=counters, clock=float, wake=lambda: None)
    for offset in range(0, len(start), step):
        server.receive_data(start[offset : offset + step])
    assert server.closed
    assert server.rejection == reason
    assert counters.rejected == {reason: 1}
    assert server.data_to_send(1 << 20).startswith(answer)
    assert server.data_to_send(1 << 20) == b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 100,
        b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00",
        b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x01\x00\x00\x00\x00\x00\x01x",
        b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x05\x01\x04\x00\x00\x00\x01\xff\xff\xff\xff\xff",
        b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x01\x09\x04\x00\x00\x00\x01x",
    ],
    ids=["noise", "window update of zero", "data on an idle stream", "hpack", "continuation of nothing"],
)
def test_garbage_behind_the_preface_closes_the_connection(recorder, garbage):
    counters = TransportCounters()
    server = Http2Connection(recorder.services(), limits=Limits(), counters=counters, clock=float, wake=lambda: None)
    server.receive_data(PREFACE + garbage)
    assert server.data_to_send(1 << 20)[-8:] != b""
    assert server.closed
    assert counters.rejected == {"protocol_error": 1}


@pytest.mark.parametrize(
    "flood",
    [b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8), b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"],
    ids=["ping", "settings"],
)
def test_acknowledgements_that_nobody_reads_are_bounded(peer, flood):
    peer.server.receive_data(flood * 2000)
    assert peer.server.closed
    assert peer.counters.rejected == {"abuse": 1}


def test_endless_headers_are_bounded(peer):
    """Headers of more than 64 KiB, or more than 256 CONTINUATION frames."""
    peer.server.receive_data(b"\x00\x00\x00\x01\x00\x00\x00\x00\x01" + b"\x00\x00\x00\x09\x00\x00\x00\x00\x01" * 1000)
    assert peer.server.closed
    assert peer.counters.rejected == {"abuse": 1}


def test_headers_over_continuation_frames_one_byte_at_a_time(recorder):
    encoder = hpack.Encoder()
    block = encoder.encode([*REQUEST, *((f"x-{number}", "v" * 50) for number in range(20))])
    pieces = [block[offset : offset + 200] for offset in range(0, len(block), 200)]
    stream = PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for index, piece in enumerate(pieces):
        kind, last = (1 if index == 0 else 9), index == len(pieces) - 1
        stream += len(piece).to_bytes(3, "big") + bytes([kind, 4 if last else 0]) + b"\x00\x00\x00\x01" + piece
    message = frame(b"hello")
    stream += len(message).to_bytes(3, "big") + b"\x00\x01\x00\x00\x00\x01" + message
    counters = TransportCounters()
    server = Http2Connection(recorder.services(), limits=Limits(), counters=counters, clock=float, wake=lambda: None)
    out = b""
    for offset in range(len(stream)):
        server.receive_data(stream[offset : offset + 1])
        out += server.data_to_send(1 << 20)
    assert message in out
    assert recorder.handlers[0].calls == [b"hello", "half_closed", "closed"]
    assert recorder.handlers[0].call.metadata["x-19"] == "v" * 50


SCRIPT = st.lists(
    st.tuples(
        st.sampled_from(["Echo", "Unary", "Hold", "NotFound", "Missing", "FailOnMessage", "FailOnClose"]),
        st.lists(st.binary(max_size=60), max_size=4),
        st.sampled_from(["half-close", "reset", "leave open", "trailing garbage"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(script=SCRIPT, chunk=st.integers(1, 40), cuts=st.lists(st.integers(1, 200), max_size=60))
def test_handlers_see_the_same_however_the_bytes_are_split(new_recorder, script, chunk, cuts):
    client = h2.connection.H2Connection()
    client.initiate_connection()
    for method, messages, ending in script:
        stream = client.get_next_available_stream_id()
        client.send_headers(stream, request(path=f"/test.Test/{method}"))
        body = b"".join(frame(message) for message in messages)
        if ending == "trailing garbage":
            body += frame(b"", flags=7)
        for offset in range(0, len(body), chunk):
            client.send_data(stream, body[offset : offset + chunk])
        if ending == "half-close":
            client.end_stream(stream)
        elif ending == "reset":
            client.reset_stream(stream, 2)
    data = client.data_to_send()
    whole = run(new_recorder(), [data])
    positions = sorted({0, len(data), *(sum(cuts[: index + 1]) % len(data) for index in range(len(cuts)))})
    pieces = [data[start:end] for start, end in pairwise(positions)]
    assert run(new_recorder(), pieces) == whole
    assert run(new_recorder(), [bytes([byte]) for byte in data]) == whole


def run(recorder, pieces):
    server = Http2Connection(
        recorder.services(),
        limits=Limits(),
        counters=TransportCounters(),
        clock=float,
        wake=lambda: None,
    )
    for piece in pieces:
        server.receive_data(piece)
        server.data_to_send(1 << 20)
    seen = [list(handler.calls) for handler in recorder.handlers]
    server.lost()
    assert all(handler.calls.count("closed") == 1 for handler in recorder.handlers)
    return seen, [handler.calls for handler in recorder.handlers]


@settings(max_examples=300, deadline=None)
@given(
    damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.integers(1, 400),
)
def test_damaged_input_never_escapes_as_an_exception(new_recorder, damage, cut):
    client = h2.connection.H2Connection()
    client.initiate_connection()
    for method in ("Echo", "Unary", "Hold", "FailOnMessage"):
        stream = client.get_next_available_stream_id()
        client.send_headers(stream, [*request(path=f"/test.Test/{method}"), ("grpc-timeout", "5S")])
        client.send_data(stream, frame(b"some text") * 3)
        client.ping(b"12345678")
        client.end_stream(stream)
    data = bytearray(client.data_to_send())
    for position, value in damage:
        data[len(PREFACE) + position % (len(data) - len(PREFACE))] = value
    run(new_recorder(), [bytes(data[start : start + cut]) for start in range(0, len(data), cut)])
