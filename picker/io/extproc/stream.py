"""One ext_proc stream: an `Exchange`, the decision in the middle of it, and what its response teaches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from picker.core.admission.settings import MARGIN_SECONDS
from picker.core.admission.waiting import Left
from picker.core.exchange.effects import (
    Anomaly,
    Answered,
    Arm,
    BodyReply,
    Decide,
    Effect,
    Finish,
    FirstChunk,
    HeadersReply,
    Report,
    StreamedBody,
)
from picker.core.exchange.events import BodyMode, Event, RequestBody, ResponseBody, StreamEnded, TimerFired
from picker.core.exchange.outcomes import Refused, Routed
from picker.core.headers import FALLBACKS_WANTED
from picker.core.scheduling.api import Request
from picker.core.scheduling.decision import Decision, Reason, Sent
from picker.core.tickets import PrefillSignal, Ticket
from picker.core.usage import Usage
from picker.io.admission import Entry
from picker.io.extproc.codec import MalformedMessageError, UnknownMessageError, decode, encode, more_time
from picker.io.extproc.context import Observed
from picker.io.extproc.model_names import RestoredNames
from picker.io.extproc.observer import Expected, ObserverStream
from picker.io.extproc.usage_tap import UsageTap
from picker.io.extproc.wire import read
from picker.io.rpc import Call, Status

if TYPE_CHECKING:
    from picker.io.extproc.service import ExtProcService


# Members of enumerations are looked up once: in Python 3.11 that takes longer than a call.
_ROUTED: Final = Reason.ROUTED
_RESPONSE_BODY: Final = PrefillSignal.RESPONSE_BODY


class ExtProcStream:
    """One stream: bytes in, bytes out, and at the end everything it counted is counted out again."""

    __slots__ = (
        "_answer",
        "_body",
        "_buffered",
        "_call",
        "_decided_at",
        "_exchange",
        "_expected",
        "_fallbacks",
        "_names",
        "_observer",
        "_preparing",
        "_sent",
        "_service",
        "_tap",
        "_ticket",
        "_timer",
        "_waiting",
    )

    def __init__(self, service: ExtProcService, call: Call) -> None:
        settings = service.settings
        self._service = service
        self._call = call
        self._exchange = settings.exchange(settings)
        self._fallbacks = _fallbacks(call.metadata.get(FALLBACKS_WANTED))
        self._ticket: Ticket | None = None
        self._sent: Sent | None = None
        self._decided_at = 0.0
        self._buffered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._preparing: asyncio.Future[Mapping[str, Any]] | None = None
        self._waiting: Entry | None = None
        self._body: bytes | None = None
        """The request body that goes to the endpoint in the place of the client's."""
        self._names: RestoredNames | None = None
        self._answer: Answered | None = None
        self._tap: UsageTap | None = None
        self._expected: Expected | None = None
        self._observer: ObserverStream | None = None
        service.open_streams += 1

    def message(self, data: bytes) -> None:
        event = read(data) or self._decode(data)
        if event is None:
            return
        kind = type(event)
        if kind is RequestBody:
            self._count(len(event.data))  # type: ignore[union-attr]
        elif kind is Observed:
            self._observe(event)  # type: ignore[arg-type]
            return
        elif kind is ResponseBody and self._answer is not None and event.data:  # type: ignore[union-attr]
            self._read_usage(event.data)  # type: ignore[union-attr]
        effects = self._exchange.receive(event)  # type: ignore[arg-type]
        if self._names is not None:
            effects = self._names.apply(effects, event, self._exchange.response_mode)
        if effects:
            self._run(effects)

    def _decode(self, data: bytes) -> Event | Observed | None:
        """Decode what is not as simple as most; None for what is no event."""
        try:
            return decode(data)
        except UnknownMessageError as unknown:
            self._service.telemetry.anomaly(Anomaly.UNEXPECTED_MESSAGE, str(unknown))
        except MalformedMessageError as malformed:
            # Envoy waits for an answer to each message. None is possible to this one, so that it has to give up.
            self._service.telemetry.anomaly(Anomaly.MALFORMED_MESSAGE, str(malformed))
            self._call.finish(Status.INVALID_ARGUMENT, str(malformed))
        return None

    def half_closed(self) -> None:
        self._prepare_no_more()
        self._run(self._exchange.receive(StreamEnded()))
        self._call.finish()

    def closed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._prepare_no_more()
        self._run(self._exchange.receive(StreamEnded()))
        if self._observer is not None:
            self._service.afterwards.add(self._observer.end)
        self._service.buffered_bytes -= self._buffered
        self._service.open_streams -= 1

    def _count(self, size: int) -> None:
        """Count body bytes that wait for their end; past the limit of all streams, wait no longer."""
        self._buffered += size
        self._service.buffered_bytes += size
        if self._service.buffered_bytes > self._service.settings.max_buffered_bytes:
            self._exchange.limit_body(self._buffered - 1)

    def _run(self, effects: tuple[Effect, ...]) -> None:
        send, afterwards = self._call.send, self._service.afterwards.add
        for effect in effects:
            kind = type(effect)
            if kind is HeadersReply or kind is StreamedBody or kind is BodyReply:
                send(encode(effect))  # type: ignore[arg-type]
            elif kind is Decide:
                self._admit(effect)  # type: ignore[arg-type]
            elif kind is Answered:
                self._answered(effect)  # type: ignore[arg-type]
            elif kind is FirstChunk:
                afterwards(self._prefilled)
            elif kind is Finish:
                afterwards(self._learn, effect)
            elif kind is Report:
                self._service.telemetry.anomaly(effect.anomaly, "")  # type: ignore[union-attr]
            elif kind is Arm:
                self._timer = asyncio.get_running_loop().call_later(effect.seconds, self._later, self._timer_fired)  # type: ignore[union-attr]
            else:
                send(encode(effect))  # type: ignore[arg-type]

    def _later(self, act: Callable[..., None], *args: object) -> None:
        """Go on without a message of Envoy's; what goes wrong ends the RPC as it does in one, lest Envoy waits."""
        try:
            act(*args)
        except Exception as error:  # noqa: BLE001  nobody else would end it
            self._service.telemetry.failed("stream", error)
            self._call.finish(Status.INTERNAL, "internal error")

    def _timer_fired(self) -> None:
        self._timer = None
        self._run(self._exchange.receive(TimerFired()))

    def _admit(self, asked: Decide) -> None:
        gate = self._service.gate
        if gate is None:
            self._prepare_or_decide(asked)
            return
        entry = self._service.enter(gate, asked, partial(self._later, self._left, asked))
        if isinstance(entry, Entry):
            self._waiting = entry
            if asked.body_mode is not BodyMode.FULL_DUPLEX_STREAMED:  # where Envoy waits without end
                self._call.send(more_time(gate.settings.queue.max_seconds + MARGIN_SECONDS))
        else:
            self._left(asked, entry)

    def _left(self, asked: Decide, left: Left) -> None:
        self._waiting = None
        if left is Left.ADMITTED:
            self._prepare_or_decide(asked)
        else:
            self._run(self._carry_out(self._service.turn_away(asked)))

    def _prepare_or_decide(self, asked: Decide) -> None:
        if self._service.director.rewrites:
            asked, self._names = self._service.rewrite(asked)
            if self._names is not None:
                self._body = asked.body
        prepared = self._service.prepare(asked)
        if prepared is None:
            self._run(self._decide(asked))
            return
        request, preparing = prepared
        self._preparing = asyncio.ensure_future(preparing)
        self._preparing.add_done_callback(partial(self._later, self._prepared, asked, request))

    def _prepared(self, asked: Decide, request: Request, preparing: asyncio.Future[Mapping[str, Any]]) -> None:
        if preparing.cancelled():
            return
        self._preparing = None
        error = preparing.exception()
        if error is None:
            request = msgspec.structs.replace(request, prepared=preparing.result())
        else:
            self._service.telemetry.failed("prepare", error)
        self._run(self._decide(asked, request))

    def _prepare_no_more(self) -> None:
        """Nobody waits for the decision any more."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None

    def _decide(self, asked: Decide, request: Request | None = None) -> tuple[Effect, ...]:
        return self._carry_out(self._service.decide(asked, self._fallbacks, request))

    def _carry_out(self, decision: Decision) -> tuple[Effect, ...]:
        service = self._service
        service.buffered_bytes -= self._buffered
        self._buffered = 0
        if decision.reason is _ROUTED:
            sent = self._sent = decision.sent
            self._decided_at = service.director.now()
            self._ticket = service.route(decision)
            if service.observations.seen and service.settings.wants_response_body:
                self._expected = service.observations.expect(
                    sent.request_id, sent.path, self._prefilled, keep_reply=service.director.wants_replies
                )
            outcome: Routed | Refused = Routed(",".join(sent.destinations), decision.headers, self._body)
            self._body = None
        else:
            outcome = service.refuse(decision)
        effects = self._exchange.decided(outcome)
        service.telemetry.decided(decision)
        return effects

    def _answered(self, answered: Answered) -> None:
        service = self._service
        if service.settings.wants_response_body:
            self._answer = answered
        service.afterwards.add(self._tell_answered, answered)

    def _tell_answered(self, answered: Answered) -> None:
        if self._ticket is not None:
            try:
                self._ticket.answered(answered.status, self._service.director.now(), body_follows=answered.body_follows)
            except Exception as error:  # noqa: BLE001  a response never fails because learning from it did
                self._service.telemetry.failed("learn", error)

    def _read_usage(self, data: bytes) -> None:
        service, answer, sent = self._service, self._answer, self._sent
        if self._tap is None and answer is not None and sent is not None:
            outcomes, telemetry = service.usage_outcomes, service.telemetry
            wanted = service.director.wants_replies
            self._tap = UsageTap(answer.headers, sent.path, outcomes, telemetry, keep_reply=wanted)
        if self._tap is not None:
            service.afterwards.add(self._tap.feed, data)

    def _prefilled(self) -> None:
        if self._ticket is not None:
            try:
                self._ticket.prefilled(self._service.director.now(), _RESPONSE_BODY)
            except Exception as error:  # noqa: BLE001  a response never fails because learning from it did
                self._service.telemetry.failed("learn", error)

    def _learn(self, finish: Finish) -> None:
        usage = None if self._tap is None else self._tap.result()
        if self._expected is None or self._sent is None:
            self._learn_usage(finish, usage, None)
        else:
            learn = partial(self._learn_usage, finish, usage)
            self._service.observations.over(self._sent.request_id, self._expected, learn)

    def _learn_usage(self, finish: Finish, read: Usage | None, observed: Usage | None) -> None:
        ticket, sent = self._ticket, self._sent
        self._ticket = self._sent = None
        if ticket is not None:
            try:
                ticket.finish(finish, read or observed)
            except Exception as error:  # noqa: BLE001  a response never fails because learning from it did
                self._service.telemetry.failed("learn", error)
        if sent is not None:
            seconds = self._service.director.now() - self._decided_at
            self._service.telemetry.finished(sent, finish, seconds)
        self._service.room()

    def _observe(self, observed: Observed) -> None:
        if self._observer is None:
            self._observer = ObserverStream(self._service.observations)
        self._service.afterwards.add(self._observer.receive, observed.event)


def _fallbacks(wanted: str | None) -> int | None:
    """How many fallback endpoints this Envoy can use, where it says so."""
    return int(wanted) if wanted is not None and wanted.isdecimal() and len(wanted) < 4 else None
