"""The state machine of one ext_proc stream; `states` has the theory of operation and the table it carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from picker.core.exchange.effects import (
    Anomaly,
    Arm,
    BodyReply,
    BodyState,
    Decide,
    Effect,
    HeadersReply,
    Immediate,
    LearnedOn,
    Report,
    Side,
    TrailersReply,
)
from picker.core.exchange.events import (
    BodyMode,
    Event,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamEnded,
    TimerFired,
)
from picker.core.exchange.outcomes import Refused, Routed
from picker.core.exchange.response import Effects, ResponseHalf, informational, pieces
from picker.core.exchange.settings import DEFAULTS, ExchangeSettings
from picker.core.exchange.states import DECIDED, TRANSITIONS, State
from picker.core.headers import DESTINATION

_NOTHING: Final[Effects] = ()
_HEADERS: Final = HeadersReply(Side.REQUEST)
_BODY: Final = BodyReply(Side.REQUEST)
_TRAILERS: Final = TrailersReply(Side.REQUEST)
_ANSWER_BODY: Final[Effects] = (_BODY,)
_ANSWER_TRAILERS: Final[Effects] = (_TRAILERS,)
_ANSWER_RESPONSE_HEADERS: Final[Effects] = (HeadersReply(Side.RESPONSE),)
_UNEXPECTED: Final[Effects] = (Report(Anomaly.UNEXPECTED_MESSAGE),)
_DUPLICATE: Final[Effects] = (Report(Anomaly.DUPLICATE_END_OF_STREAM),)
_CONTROL_HEADER: Final[Effects] = (Report(Anomaly.CONTROL_HEADER),)
_STREAMED: Final[Effects] = (Report(Anomaly.STREAMED_REQUEST_BODY),)
_TOO_LARGE: Final[Effects] = (Report(Anomaly.BODY_TOO_LARGE),)
_MODE_UNKNOWN: Final = Report(Anomaly.MODE_UNKNOWN)
# Members of enumerations are looked up once: in Python 3.11 that takes longer than a call.
(
    _START,
    _PROBING,
    _BUFFERING,
    _COLLECTING,
    _DECIDING,
    _DECIDING_DUPLEX,
    _PASSING,
    _ECHOING,
    _SETTLED,
    _MOOT,
    _SILENT,
) = State
_MODE_NONE, _MODE_STREAMED, _MODE_BUFFERED, _, _DUPLEX = BodyMode
_REQUEST: Final = Side.REQUEST
_COMPLETE: Final = BodyState.COMPLETE
_STREAM_END: Final = LearnedOn.STREAM_END
_NO_TUNNEL: Final = Immediate(405, b"", details="picker_no_tunnel")
"""The answer to CONNECT: no engine serves it, and Envoy would wait for the end of a body that a tunnel never has."""
_NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})


class Exchange:
    """One ext_proc stream: `receive` takes what happened, `decided` the outcome of a `Decide`; both return effects.

    Effects are to be carried out in order; `Decide` is always the last. Neither method raises on any order of events.
    """

    __slots__ = (
        "_body_over",
        "_chunks",
        "_control",
        "_destination_sent",
        "_headers",
        "_max_body_bytes",
        "_mode",
        "_mode_guessed",
        "_modes_wanted",
        "_owed",
        "_pending",
        "_response",
        "_settings",
        "_size",
        "_subset",
        "_trailers_seen",
        "state",
    )

    def __init__(self, settings: ExchangeSettings = DEFAULTS) -> None:
        self._settings = settings
        self._max_body_bytes = settings.max_body_bytes
        self.state = _START
        self._headers = _NO_HEADERS
        self._control: tuple[str, ...] = ()
        self._subset: tuple[str, ...] | None = None
        self._mode: BodyMode | None = None
        self._mode_guessed = False
        self._modes_wanted: ProtocolConfig | None = None
        self._owed: list[Effect] = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._body_over = False
        self._trailers_seen = False
        self._pending = False
        self._destination_sent = False
        self._response = ResponseHalf()

    def receive(self, event: Event) -> Effects:
        """Take in one event."""
        action = _ROWS[self.state].get(type(event))
        return action(self, event) if action is not None else _NOTHING

    @property
    def response_mode(self) -> BodyMode | None:
        """How Envoy sends the response body, where it says so."""
        return self._response.mode

    def limit_body(self, most_bytes: int) -> None:
        """Lower the bound on what is kept of the request body; it acts with the next piece."""
        self._max_body_bytes = min(self._max_body_bytes, most_bytes)

    def decided(self, outcome: Routed | Refused) -> Effects:
        """Take in the outcome of the `Decide` effect, at once or later. RuntimeError if none is pending."""
        if not self._pending:
            raise RuntimeError("decided() was called without a pending Decide; call it once for each Decide effect")
        self._pending = False
        state = self.state
        if state not in DECIDED:
            if isinstance(outcome, Refused):
                return _NOTHING
            return self._response.fail()
        if isinstance(outcome, Refused):
            self._fall_silent()
            return (Immediate(outcome.status, outcome.body, outcome.headers, outcome.details),)
        self._response.routed = self._destination_sent = True
        if state is _DECIDING:
            return self._answer_owed(outcome)
        return self._flush(outcome)

    def _fall_silent(self) -> None:
        self._owed = []
        self._chunks = []
        self.state = _SILENT

    # Request headers

    def _control_in(self, headers: Mapping[str, bytes]) -> tuple[str, ...]:
        names = self._settings.control_headers
        return () if headers.keys().isdisjoint(names) else tuple(name for name in headers if name in names)

    def _open(self, event: RequestHeaders) -> Effects:
        self._headers = event.headers
        self._control = self._control_in(event.headers)
        self._subset = event.subset
        mode = self._agree(event.protocol)
        if self._settings.wants_response_body and not event.end_of_stream:
            self._want_response_body()
        reports = _CONTROL_HEADER if self._control else _NOTHING
        if event.headers.get(":method") == b"CONNECT":
            self._fall_silent()
            return (*reports, _NO_TUNNEL)
        if event.end_of_stream or mode is _MODE_NONE:
            self._body_over = event.end_of_stream
            return reports + self._decide(BodyState.NONE, self._headers_answer())
        if mode is _DUPLEX:
            self.state = _COLLECTING
            return reports
        if mode is _MODE_STREAMED:
            return reports + _STREAMED + self._decide(BodyState.STREAMED, self._headers_answer())
        if mode is None:
            self._owed = list(self._headers_answer())
            self.state = _PROBING
            return (*reports, _MODE_UNKNOWN, Arm(self._settings.mode_grace_seconds))
        self.state = _BUFFERING
        return reports + self._headers_answer()

    def _agree(self, protocol: ProtocolConfig | None) -> BodyMode | None:
        if protocol is not None:
            self._mode = protocol.request_body
            self._response.mode = protocol.response_body
        else:
            self._mode = self._settings.assumed_request_body
            self._response.mode = _DUPLEX if self._mode is _DUPLEX else None
        return self._mode

    def _want_response_body(self) -> None:
        mode = self._mode
        # In full duplex Envoy heeds no wish. Whether it does elsewhere is seen when a body comes, or none.
        if self._response.mode is _MODE_NONE and mode is not None and mode is not _DUPLEX:
            self._modes_wanted = ProtocolConfig(mode, _MODE_STREAMED)
            self._response.mode = None

    def _headers_answer(self) -> Effects:
        if self._control or self._modes_wanted:
            return (HeadersReply(_REQUEST, self._control, modes=self._modes_wanted),)
        return (_HEADERS,)

    def _headers_while_withheld(self, _event: RequestHeaders) -> Effects:
        return _UNEXPECTED

    def _headers_again(self, event: RequestHeaders) -> Effects:
        control = self._control_in(event.headers)
        if self._destination_sent:
            control = tuple(name for name in control if name != DESTINATION)
        return (*_UNEXPECTED, HeadersReply(_REQUEST, control))

    # The mode, by evidence

    def _duplex_by_evidence(self, event: RequestBody | RequestTrailers) -> Effects:
        self._mode = self._response.mode = _DUPLEX
        self._owed = []
        self.state = _COLLECTING
        return self.receive(event)

    def _buffered_by_silence(self, _event: TimerFired | None = None) -> Effects:
        self._mode = _MODE_BUFFERED
        self._mode_guessed = True
        answers, self._owed = self._owed, []
        self.state = _BUFFERING
        return tuple(answers)

    def _body_without_headers(self, event: RequestBody) -> Effects:
        mode = self._agree(event.protocol)
        if mode is _DUPLEX:
            # A body piece cannot carry a destination, so there is nothing to decide.
            self.state = _ECHOING
        elif mode is _MODE_NONE or mode is _MODE_STREAMED:
            self.state = _PASSING
        elif mode is None:
            self._buffered_by_silence()
        else:
            self.state = _BUFFERING
        return _UNEXPECTED + self.receive(event)

    # The decision

    def _decide(self, body_state: BodyState, owed: Effects, body: bytes = b"") -> Effects:
        self._owed = list(owed)
        self.state = _DECIDING
        return self._ask(body_state, body)

    def _ask(self, body_state: BodyState, body: bytes) -> Effects:
        self._pending = True
        headers, self._headers = self._headers, _NO_HEADERS
        if self._control:
            headers = {name: value for name, value in headers.items() if name not in self._settings.control_headers}
        return (Decide(headers, body, body_state, self._mode, self._subset),)

    def _answer_owed(self, routed: Routed) -> Effects:
        (first, *rest), self._owed = self._owed, []
        self.state = _SETTLED if self._mode is _DUPLEX else _PASSING
        if type(first) is HeadersReply:
            return (self._headers_with(routed), *rest)
        if type(first) is BodyReply:
            return (BodyReply(_REQUEST, (), routed.destination, routed.set_headers, routed.body), *rest)
        return (TrailersReply(_REQUEST, routed.destination), *rest)

    def _headers_with(self, routed: Routed) -> HeadersReply:
        control = self._control
        if control:
            ours = {DESTINATION, *(name for name, _ in routed.set_headers)}
            control = tuple(name for name in control if name not in ours)
        return HeadersReply(_REQUEST, control, routed.destination, self._modes_wanted, routed.set_headers)

    def _owe_body(self, event: RequestBody) -> Effects:
        if self._mode is not _DUPLEX:
            self._owed += _ANSWER_BODY
        return self._judge_body(event)

    def _owe_trailers(self, _event: RequestTrailers) -> Effects:
        self._body_over = True
        self._owed += _ANSWER_TRAILERS
        return _NOTHING

    def _overtaken(self, event: ResponseHeaders | ResponseBody | ResponseTrailers) -> Effects:
        if type(event) is ResponseHeaders and informational(event.status):
            return _ANSWER_RESPONSE_HEADERS
        if self.state is _START:
            self._agree(event.protocol)
        answers, self._owed = self._owed, []
        self._chunks = []
        # After PROBING the mode is still unknown: any answer to a body might be of the wrong shape.
        silent = self._mode is _DUPLEX or self.state is _PROBING
        self.state = _MOOT if silent else _PASSING
        return (*answers, *self.receive(event))

    # Request body and trailers outside full duplex

    def _whole_body(self, event: RequestBody) -> Effects:
        if event.subset is not None:
            self._subset = event.subset
        # BUFFERED without end_of_stream: trailers follow. Elsewhere: the rest is not sent to us.
        whole = event.end_of_stream or (self._mode is _MODE_BUFFERED and not self._mode_guessed)
        self._body_over = whole
        return self._decide(_COMPLETE if whole else BodyState.TRUNCATED, _ANSWER_BODY, event.data)

    def _trailers_for_body(self, _event: RequestTrailers) -> Effects:
        self._body_over = True
        return self._decide(BodyState.NONE, _ANSWER_TRAILERS)

    def _pass_body(self, event: RequestBody) -> Effects:
        return self._judge_body(event) + _ANSWER_BODY

    def _judge_body(self, event: RequestBody) -> Effects:
        if self._body_over:
            return _DUPLICATE
        if event.end_of_stream:
            self._body_over = True
        return _NOTHING if self._mode is _MODE_STREAMED else _UNEXPECTED

    def _pass_trailers(self, _event: RequestTrailers) -> Effects:
        self._body_over = True
        return _ANSWER_TRAILERS

    def _unexpected_trailers(self, event: RequestTrailers) -> Effects:
        self._body_over = True
        if self.state is _START:
            self._agree(event.protocol)
            self.state = _PASSING
        return _UNEXPECTED + _ANSWER_TRAILERS

    # Request body and trailers in full duplex

    def _collect(self, event: RequestBody) -> Effects:
        self._keep(event)
        if self._size > self._max_body_bytes:
            return _TOO_LARGE + self._decide_collected(BodyState.TRUNCATED)
        if self._body_over:
            return self._decide_collected(_COMPLETE)
        return _NOTHING

    def _collected_by_trailers(self, _event: RequestTrailers) -> Effects:
        self._trailers_seen = True
        return self._decide_collected(_COMPLETE)

    def _decide_collected(self, body_state: BodyState) -> Effects:
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        self.state = _DECIDING_DUPLEX
        return self._ask(body_state, self._chunks[0] if self._chunks else b"")

    def _keep(self, event: RequestBody) -> Effects:
        if event.subset is not None:
            self._subset = event.subset
        if self._body_over or self._trailers_seen:
            return _DUPLICATE
        if event.data:
            self._chunks.append(event.data)
            self._size += len(event.data)
        self._body_over = event.end_of_stream
        return _NOTHING

    def _keep_trailers(self, _event: RequestTrailers) -> Effects:
        self._trailers_seen = True
        return _NOTHING

    def _flush(self, routed: Routed) -> Effects:
        """The headers answer, everything kept of the body, and trailers if they ended it."""
        over = self._body_over and not self._trailers_seen
        effects: list[Effect] = [self._headers_with(routed)]
        chunks, self._chunks = self._chunks, []
        if routed.body is not None and self._body_over:
            chunks = [routed.body]
        if over and not chunks:
            chunks = [b""]
        last = len(chunks) - 1
        for index, chunk in enumerate(chunks):
            effects += pieces(_REQUEST, chunk, end_of_stream=over and index == last)
        if self._trailers_seen:
            effects.append(_TRAILERS)
        self.state = _SETTLED if self._body_over or self._trailers_seen else _ECHOING
        return tuple(effects)

    def _echo(self, event: RequestBody) -> Effects:
        if event.end_of_stream:
            self._body_over = True
            self.state = _SETTLED
        return pieces(_REQUEST, event.data, end_of_stream=event.end_of_stream)

    def _echoed_by_trailers(self, _event: RequestTrailers) -> Effects:
        self._body_over = True
        self.state = _SETTLED
        return _ANSWER_TRAILERS

    def _settled_body(self, _event: RequestBody) -> Effects:
        return _DUPLICATE

    # The response

    def _response_headers(self, event: ResponseHeaders) -> Effects:
        return self._response.headers(event)

    def _response_body(self, event: ResponseBody) -> Effects:
        return self._response.body(event)

    def _response_trailers(self, event: ResponseTrailers) -> Effects:
        return self._response.trailers(event)

    def _end(self, _event: StreamEnded) -> Effects:
        self._fall_silent()
        return self._response.finish(_STREAM_END)


_ROWS: Final[Mapping[State, Mapping[type, Callable[[Exchange, Any], Effects]]]] = {
    state: {event: getattr(Exchange, f"_{action}") for event, (action, _) in actions.items()}
    for state, actions in TRANSITIONS.items()
}
