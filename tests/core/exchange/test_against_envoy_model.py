"""A model of Envoy's side of ext_proc, written from its observed behaviour, plays against `Exchange`.

The model knows nothing of the exchange: it sends what Envoy sends, waits for what Envoy waits for, and refuses what Envoy
calls spurious. hypothesis chooses modes, bodies, timing of decisions, local replies, aborts and duplicates.
"""

from __future__ import annotations

from enum import Enum

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from picker.core.exchange import effects, events
from picker.core.exchange.events import BodyMode, ProtocolConfig
from picker.core.exchange.machine import Exchange
from picker.core.exchange.outcomes import Refused, Routed
from picker.core.exchange.settings import ExchangeSettings
from picker.core.headers import CLIENT_FORBIDDEN, DESTINATION

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
PICK = "10.0.0.7:8000"


class Callback(Enum):
    """What the filter waits for on one side."""

    IDLE = 0
    HEADERS = 1
    BUFFERED_BODY = 2
    STREAMED_BODY = 3
    PARTIAL_BODY = 4
    TRAILERS = 5


class Half:
    """One direction of Envoy's filter: holds what may not pass yet, sends messages, applies answers."""

    def __init__(self, mode, send, make, *, limit=60, eager=False, trailers_sent=True, eos_before_trailers=True):
        self.mode = mode
        self.send = send
        self.make_headers, self.make_body, self.make_trailers = make
        self.limit = limit
        self.eager = eager
        self.trailers_sent = trailers_sent
        self.eos_before_trailers = eos_before_trailers
        self.callback = Callback.IDLE
        self.started = self.no_body = self.complete = self.with_trailers = False
        self.held: bytearray | None = None
        self.chunks: list[bytes] = []
        self.body_sent = self.partial_done = self.trailers_pending = False
        self.released = self.ended = False
        self.out = bytearray()
        self.on_release = lambda: None

    # from the peer

    def headers(self, *, end):
        self.started = True
        self.no_body = self.complete = end
        self.callback = Callback.HEADERS
        self.send(self.make_headers(end))

    def data(self, chunk, *, end):
        self.complete = self.complete or end
        waiting = self.callback is Callback.HEADERS
        if self.mode is DUPLEX:
            self.body_sent = True
            if self.callback is Callback.IDLE:
                self.callback = Callback.STREAMED_BODY
            self.send(self.make_body(chunk, end))
        elif self.mode is BodyMode.STREAMED and (self.eager or not waiting):
            self.stream(chunk, end=end)
        elif waiting or self.mode is BodyMode.BUFFERED:
            self.hold(chunk)
            if not waiting and end:
                self.send_held(Callback.BUFFERED_BODY, end=True)
        elif self.mode is BodyMode.NONE or self.partial_done:
            self.forward(chunk, end=end)
        else:
            self.partial(chunk, end=end)

    def partial(self, chunk, *, end):
        if self.callback is Callback.PARTIAL_BODY:
            self.chunks.append(chunk)
            return
        self.hold(chunk)
        if end or len(self.held) > self.limit:
            self.send_held(Callback.PARTIAL_BODY, end=end)

    def trailers(self):
        self.complete = self.with_trailers = True
        if self.mode is DUPLEX:
            self.send_trailers()
        elif self.callback is Callback.IDLE:
            if self.held is not None and self.mode is BodyMode.BUFFERED:
                self.send_held(Callback.BUFFERED_BODY, end=self.eos_before_trailers)
            elif self.held is not None and self.mode is BodyMode.BUFFERED_PARTIAL:
                self.send_held(Callback.PARTIAL_BODY, end=self.eos_before_trailers)
            else:
                self.send_trailers()

    def duplicate_end(self):
        if self.mode is not DUPLEX:
            self.chunks.append(b"")
            self.callback = Callback.STREAMED_BODY
        self.send(self.make_body(b"", True))

    # towards the picker

    def hold(self, chunk):
        self.held = (self.held or bytearray()) + chunk

    def stream(self, chunk, *, end):
        self.chunks.append(bytes(chunk))
        if self.callback is Callback.IDLE:
            self.callback = Callback.STREAMED_BODY
        self.send(self.make_body(bytes(chunk), end))

    def send_held(self, callback, *, end):
        self.callback = callback
        self.send(self.make_body(bytes(self.held), end))

    def send_trailers(self):
        if not self.trailers_sent:
            self.release()
            self.ended = True
            return
        self.trailers_pending = True
        if self.callback is Callback.IDLE:
            self.callback = Callback.TRAILERS
        self.send(self.make_trailers())

    # onwards

    def release(self):
        if not self.released:
            self.released = True
            self.on_release()

    def forward(self, chunk, *, end=False):
        self.release()
        self.out += chunk
        if end:
            self.ended = True

    def after_body(self):
        if self.callback is not Callback.IDLE:
            return
        if self.with_trailers and not self.ended and not self.trailers_pending:
            self.send_trailers()
        elif self.complete and not self.with_trailers:
            self.ended = True

    # answers

    def headers_answered(self):
        assert self.callback is Callback.HEADERS, "spurious headers answer"
        self.callback = Callback.IDLE
        if self.no_body:
            self.release()
            self.ended = True
        elif self.mode is DUPLEX:
            self.release()
            if self.body_sent:
                self.callback = Callback.STREAMED_BODY
            elif self.with_trailers:
                self.callback = Callback.TRAILERS
        elif self.chunks:
            self.release()
            self.callback = Callback.STREAMED_BODY
        elif self.mode is BodyMode.NONE:
            self.forward(self.held or b"")
            self.held = None
            self.after_body()
        elif self.complete and self.held is not None:
            self.send_held(Callback.BUFFERED_BODY, end=not self.with_trailers)
        elif self.complete and self.with_trailers:
            self.send_trailers()
        elif self.mode is BodyMode.STREAMED:
            self.release()
            if self.held is not None:
                held, self.held = self.held, None
                self.stream(held, end=False)
        elif self.mode is BodyMode.BUFFERED_PARTIAL and self.held is not None and len(self.held) > self.limit:
            self.send_held(Callback.PARTIAL_BODY, end=False)

    def body_answered(self):
        assert self.mode is not DUPLEX, "normal body answer in full duplex"
        if self.callback is Callback.STREAMED_BODY:
            self.forward(self.chunks.pop(0))
            if not self.chunks:
                self.callback = Callback.IDLE
        else:
            assert self.callback in (Callback.BUFFERED_BODY, Callback.PARTIAL_BODY), "spurious body answer"
            self.partial_done = self.callback is Callback.PARTIAL_BODY
            self.forward(bytes(self.held) + b"".join(self.chunks))
            self.held, self.chunks = None, []
            self.callback = Callback.IDLE
        self.after_body()

    def piece(self, data, *, end):
        assert self.mode is DUPLEX, "streamed answer outside full duplex"
        assert self.callback is Callback.STREAMED_BODY, "spurious body piece"
        assert len(data) <= 62_000
        assert data or end, "surplus empty piece"
        assert not (end and self.with_trailers), "end of stream before trailers"
        self.forward(data, end=end)
        if end:
            self.callback = Callback.IDLE

    def trailers_answered(self):
        assert self.trailers_pending, "spurious trailers answer"
        assert self.mode is DUPLEX or self.callback is Callback.TRAILERS
        self.trailers_pending = False
        self.callback = Callback.IDLE
        self.release()
        self.ended = True


data_chunks = st.one_of(st.binary(max_size=40), st.sampled_from([61_999, 62_000, 62_001, 130_000]).map(bytes))
statuses = st.sampled_from([200, 204, 299, 300, 400, 429, 500, 503, None])


class EnvoyAndExchange(RuleBasedStateMachine):
    @initialize(
        request_mode=st.sampled_from(BodyMode),
        response_mode=st.sampled_from(BodyMode),
        knowledge=st.sampled_from(["announced", "announced", "assumed", "evidence"]),
        immediate=st.booleans(),
        outcome=st.sampled_from([Routed(PICK), Routed(PICK), Refused(429, b"busy", (("retry-after", b"1"),), "full")]),
        max_body=st.sampled_from([20, 100_000, 1 << 24]),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        wants_response_body=st.booleans(),
        grants_modes=st.booleans(),
        control=st.sets(st.sampled_from(sorted(CLIENT_FORBIDDEN))),
        bodyless=st.sampled_from([True, False, False, False]),
    )
    def client_sends_headers(
        self,
        *,
        request_mode,
        response_mode,
        knowledge,
        immediate,
        outcome,
        max_body,
        flags,
        wants_response_body,
        grants_modes,
        control,
        bodyless,
    ):
        if knowledge != "announced" and (request_mode is DUPLEX) != (response_mode is DUPLEX):
            response_mode = DUPLEX if request_mode is DUPLEX else BodyMode.NONE
        if knowledge == "evidence" and request_mode is DUPLEX and bodyless:
            response_mode = BodyMode.NONE  # nothing could tell the exchange otherwise
        protocol = ProtocolConfig(request_mode, response_mode) if knowledge == "announced" else None
        self.exchange = Exchange(
            ExchangeSettings(
                max_body_bytes=max_body,
                assumed_request_body=request_mode if knowledge == "assumed" else None,
                wants_response_body=wants_response_body,
            )
        )
        self.grants_modes = grants_modes
        self.body_must_be_wanted = (
            wants_response_body
            and knowledge == "announced"
            and not bodyless
            and request_mode is not DUPLEX
            and response_mode is BodyMode.NONE
        )
        self.evidence_only = knowledge == "evidence"
        self.immediate, self.outcome, self.max_body = immediate, outcome, max_body
        self.headers = {":path": b"/v1/completions", **dict.fromkeys(control, b"6.6.6.6:1")}
        self.decides: list[effects.Decide] = []
        self.finishes: list[effects.Finish] = []
        self.answered: list[int | None] = []
        self.first_chunks = 0
        self.body_came = False
        self.body_wanted = False
        self.destinations: list[str] = []
        self.refusals = 0
        self.timer = self.pending = self.decided = self.local_reply = self.over = self.stream_open = False
        self.overtaken_while_probing = self.too_late = False
        self.status_seen: list[int | None] = []
        self.inbox: list[events.Event] = []
        self.working = False
        self.client_body = b""
        self.client_chunks = 0
        eager, trailers_sent, eos_before_trailers = flags
        self.request = Half(
            request_mode,
            self.deliver,
            (
                lambda end: events.RequestHeaders(dict(self.headers), end, None, protocol),
                events.RequestBody,
                events.RequestTrailers,
            ),
            eager=eager and knowledge == "announced",
            trailers_sent=trailers_sent or request_mode is DUPLEX,
            eos_before_trailers=eos_before_trailers or knowledge != "announced",
        )
        self.request.on_release = self.request_leaves
        self.response = Half(
            response_mode,
            self.deliver,
            (
                lambda end: events.ResponseHeaders(self.status_seen[-1], end, PICK),
                events.ResponseBody,
                events.ResponseTrailers,
            ),
            trailers_sent=trailers_sent or response_mode is DUPLEX,
        )
        self.stream_open = True
        self.request.headers(end=bodyless)

    # the wire

    def deliver(self, event):
        self.inbox.append(event)
        if self.working:
            return
        self.working = True
        while self.inbox:
            message = self.inbox.pop(0)
            if isinstance(message, events.ResponseBody) and message.data:
                self.body_came = True
            answers = self.exchange.receive(message)
            if self.over:
                assert all(type(answer) is effects.Finish for answer in answers), "nothing is answered any more"
            self.apply(answers)
        self.working = False

    def apply(self, answers):
        for index, answer in enumerate(answers):
            side = getattr(answer, "side", None)
            half = self.request if side is effects.Side.REQUEST else self.response
            destination = getattr(answer, "destination", None)
            if destination is not None:
                assert side is effects.Side.REQUEST
                self.destinations.append(destination)
                assert self.evidence_only or not self.request.released, "the request left before its destination came"
                self.headers[DESTINATION] = destination.encode()
            if isinstance(answer, effects.HeadersReply):
                if side is effects.Side.REQUEST:
                    assert DESTINATION not in answer.remove_headers or destination is None
                    for name in answer.remove_headers:
                        self.headers.pop(name, None)
                    if answer.modes is not None:
                        self.change_modes(answer.modes)
                half.headers_answered()
            elif isinstance(answer, effects.BodyReply):
                half.body_answered()
            elif isinstance(answer, effects.StreamedBody):
                half.piece(answer.data, end=answer.end_of_stream)
            elif isinstance(answer, effects.TrailersReply):
                half.trailers_answered()
            elif isinstance(answer, effects.Immediate):
                assert not self.response.started
                self.refusals += 1
                self.over = True
            elif isinstance(answer, effects.Decide):
                assert index == len(answers) - 1
                self.decides.append(answer)
                self.pending = True
                self.check_decide(answer)
                if self.immediate:
                    self.decide()
            elif isinstance(answer, effects.Answered):
                assert not self.finishes
                self.answered.append(answer.status)
            elif isinstance(answer, effects.FirstChunk):
                assert not self.finishes
                self.first_chunks += 1
            elif isinstance(answer, effects.Finish):
                self.finishes.append(answer)
            elif isinstance(answer, effects.Arm):
                self.timer = True

    def change_modes(self, modes):
        """All body modes are replaced, so those of the request have to be repeated; full duplex hears no wish."""
        self.body_wanted = True
        assert modes.request_body is self.request.mode
        assert self.request.mode is not DUPLEX
        if self.grants_modes:
            self.response.mode = modes.response_body

    def decide(self):
        self.pending = False
        self.too_late = self.response.started or not self.stream_open
        self.decided = True
        answers = self.exchange.decided(self.outcome)
        if self.too_late:
            assert [type(answer) for answer in answers] == [effects.Finish] * isinstance(self.outcome, Routed)
        self.apply(answers)

    def check_decide(self, decide):
        assert not self.response.started
        assert CLIENT_FORBIDDEN.isdisjoint(decide.headers)
        assert self.client_body.startswith(decide.body)
        if decide.body_state is effects.BodyState.COMPLETE:
            assert decide.body == self.client_body
            assert self.request.complete
        elif decide.body_state is not effects.BodyState.TRUNCATED:
            assert decide.body == b""

    def request_leaves(self):
        """What the endpoint sees at the moment the request passes the filter."""
        forged = {name for name in self.headers if name in CLIENT_FORBIDDEN and name != DESTINATION}
        assert not forged
        assert self.headers.get(DESTINATION, PICK.encode()) == PICK.encode()
        if not self.local_reply and self.decidable():
            assert self.headers[DESTINATION] == PICK.encode()

    def decidable(self):
        """Not when a guess at the mode may be wrong, or when only trailers follow which Envoy is told to keep."""
        half = self.request
        kept = half.with_trailers and not half.trailers_sent and not self.client_chunks
        return not self.evidence_only and not (kept and half.mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL))

    # what clients, endpoints and Envoy itself do

    client_sending = precondition(lambda self: self.stream_open and not self.request.complete)

    @client_sending
    @rule(chunk=data_chunks, end=st.booleans())
    def client_sends_body(self, chunk, end):
        self.client_body += chunk
        self.client_chunks += 1
        self.request.data(chunk, end=end)

    @client_sending
    @rule()
    def client_sends_trailers(self):
        self.request.trailers()

    @precondition(
        lambda self: (
            self.stream_open
            and self.request.complete
            and not self.request.no_body
            and not self.request.with_trailers
            and self.request.mode is not BodyMode.NONE
            and (self.request.mode is DUPLEX or (self.request.callback is Callback.IDLE and not self.over))
        )
    )
    @rule()
    def envoy_repeats_the_end(self):
        if not self.overtaken_while_probing:
            self.request.duplicate_end()

    @precondition(lambda self: self.pending)
    @rule()
    def decision_comes(self):
        self.decide()

    @precondition(
        lambda self: self.stream_open and self.timer and (self.request.mode is not DUPLEX or self.request.body_sent)
    )
    @rule()
    def timer_fires(self):
        self.timer = False
        self.deliver(events.TimerFired())

    @precondition(lambda self: self.stream_open and not self.response.started and not self.over)
    @precondition(lambda self: not self.request.released and not self.response_mode_unknowable())
    @rule(status=statuses, end=st.booleans())
    def envoy_answers_locally(self, status, end):
        self.local_reply = True
        self.overtaken_while_probing = self.evidence_only and self.timer
        self.status_seen.append(status)
        self.response.headers(end=end)

    @precondition(lambda self: self.stream_open and self.request.released and not self.response.started)
    @rule(status=statuses, end=st.booleans())
    def endpoint_answers(self, status, end):
        self.status_seen.append(status)
        self.response.headers(end=end)

    def response_mode_unknowable(self):
        return self.evidence_only and self.timer and self.response.mode is DUPLEX

    responding = precondition(lambda self: self.stream_open and self.response.started and not self.response.complete)

    @responding
    @rule(chunk=data_chunks, end=st.booleans())
    def endpoint_sends_body(self, chunk, end):
        self.response.data(chunk, end=end)

    @responding
    @rule()
    def endpoint_sends_trailers(self):
        self.response.trailers()

    @precondition(lambda self: self.stream_open)
    @rule()
    def stream_ends(self):
        self.stream_open = False
        self.deliver(events.StreamEnded())

    @precondition(lambda self: not self.stream_open)
    @rule(event=st.sampled_from([events.RequestBody(b"late"), events.ResponseTrailers(), events.StreamEnded()]))
    def something_comes_after_the_end(self, event):
        assert self.exchange.receive(event) == ()

    # the end

    def teardown(self):
        if not hasattr(self, "exchange"):
            return
        undisturbed = self.stream_open
        if undisturbed:
            self.play_to_the_end()
        if self.pending:
            self.decide()
        self.check_learning()

    def play_to_the_end(self):
        if not self.request.complete:
            self.request.data(b"", end=True)
        if self.timer:
            self.timer = False
            self.deliver(events.TimerFired())
        if self.pending:
            self.decide()
        if not self.over and not self.local_reply:
            self.check_request_arrived()
            if not self.response.started:
                self.status_seen.append(200)
                self.response.headers(end=False)
        if self.response.started and not self.response.complete:
            self.response.data(b"end", end=True)
        if not self.over:
            assert self.response.callback is Callback.IDLE, "Envoy waits for an answer to the response"
            assert self.response.ended
            if self.request.mode is not DUPLEX and not self.overtaken_while_probing:
                assert self.request.callback is Callback.IDLE, "Envoy waits for an answer to the request"
        self.stream_open = False
        self.deliver(events.StreamEnded())

    def check_request_arrived(self):
        half = self.request
        assert half.released, "Envoy still holds the request"
        assert half.ended, "the request has no end"
        assert half.callback is Callback.IDLE
        assert bytes(half.out) == self.client_body
        if self.decidable():
            assert len(self.decides) == 1

    def check_learning(self):
        assert len(self.decides) <= 1
        routed = self.decided and isinstance(self.outcome, Routed)
        assert self.destinations == ([PICK] if routed and not self.too_late else [])
        assert len(self.finishes) == (1 if routed else 0)
        assert self.refusals == (1 if self.decided and not routed and not self.too_late else 0)
        if routed:
            status = self.status_seen[0] if self.status_seen else None
            served = status is not None and 200 <= status < 300 and not self.too_late
            assert self.finishes[0].success is served
            assert self.finishes[0].status == status
            heard = self.response.started and not self.too_late
            assert self.answered == ([status] if heard else [])
            assert self.first_chunks == (1 if self.body_came and heard else 0)
            if self.body_must_be_wanted and heard and self.response.mode is BodyMode.NONE:
                assert self.body_wanted
        else:
            assert (self.answered, self.first_chunks) == ([], 0)


TestEnvoyAndExchange = EnvoyAndExchange.TestCase
TestEnvoyAndExchange.settings = settings(max_examples=200, stateful_step_count=16, deadline=None)
