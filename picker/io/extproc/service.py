"""The ext_proc service: one `Exchange` for each stream, the director for its decision, telemetry for the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from picker.core.director import Director, Ticket
from picker.core.exchange.effects import (
    Anomaly,
    Answered,
    Arm,
    Decide,
    Effect,
    Finish,
    FirstChunk,
    Report,
)
from picker.core.exchange.events import BodyMode, RequestBody, StreamEnded, TimerFired
from picker.core.exchange.machine import Exchange
from picker.core.exchange.outcomes import Refused, Routed
from picker.core.headers import FALLBACKS_WANTED
from picker.core.scheduling.api import Request
from picker.core.scheduling.decision import Decision, Reason
from picker.core.telemetry import Telemetry
from picker.io.extproc.codec import MalformedMessageError, UnknownMessageError, decode, encode
from picker.io.rpc import Call, HandlerFactory, Status

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

_REFUSALS = {
    Reason.NO_ENDPOINTS: (503, "no endpoint is known; check discovery"),
    Reason.NONE_IN_SUBSET: (503, "no known endpoint is in the subset that the gateway allows"),
    Reason.FILTERED_OUT: (429, "every endpoint is saturated; try again later"),
}


class ExtProcSettings(Struct, frozen=True):
    """What the service takes from the configuration; may be replaced between two streams."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_buffered_bytes: int = 1024 * 1024 * 1024
    assumed_request_body: BodyMode | None = None
    mode_grace_seconds: float = 0.02
    retry_after_seconds: int = 1


class ExtProcService:
    """Makes a handler for each ext_proc stream. `open_streams` and `buffered_bytes` are there for gauges."""

    def __init__(self, director: Director, telemetry: Telemetry, settings: ExtProcSettings) -> None:
        self.director = director
        self.telemetry = telemetry
        self.settings = settings
        self.open_streams = 0
        self.buffered_bytes = 0

    @property
    def services(self) -> dict[str, HandlerFactory]:
        """The methods to give to a transport."""
        return {METHOD: self._handler}

    def _handler(self, call: Call) -> ExtProcStream:
        return ExtProcStream(self, call)

    def prepare(self, asked: Decide) -> tuple[Request, Awaitable[Mapping[str, Any]]] | None:
        """Read a request that has to be prepared, and return it with what does that; None when nothing does."""
        if self.director.preparation is None:
            return None
        try:
            request = self.director.read(asked)
            preparing = self.director.prepare(asked, request)
        except Exception as error:  # noqa: BLE001  a request never fails because preparing its decision did
            self.telemetry.failed("prepare", error)
            return None
        return None if preparing is None else (request, preparing)

    def decide(self, asked: Decide, fallbacks: int | None, request: Request | None = None) -> Decision:
        """Decide; should anything unexpected go wrong in it, decide again by nothing but in-flight counts."""
        try:
            return self.director.decide(asked, fallbacks, request)
        except Exception as error:  # noqa: BLE001  a request never fails because scoring it did
            self.telemetry.failed("decide", error)
            return self.director.decide_plainly(asked, fallbacks)

    def route(self, decision: Decision) -> Ticket | None:
        """Count a routed request, unless that goes wrong."""
        try:
            return self.director.route(decision)
        except Exception as error:  # noqa: BLE001  a request never fails because learning from it did
            self.telemetry.failed("route", error)
            return None

    def refuse(self, decision: Decision) -> Refused:
        """The answer to a client whose request goes nowhere."""
        status, message = _REFUSALS[decision.reason]
        headers = [("content-type", b"application/json")]
        if status == 429:
            headers.append(("retry-after", b"%d" % self.settings.retry_after_seconds))
        error = {"error": {"message": message, "type": str(decision.reason), "code": status}}
        return Refused(status, msgspec.json.encode(error), tuple(headers), f"picker_{decision.reason}")


class ExtProcStream:
    """One stream: bytes in, bytes out, and at the end everything it counted is counted out again."""

    __slots__ = (
        "_buffered",
        "_call",
        "_decided_at",
        "_decision",
        "_exchange",
        "_fallbacks",
        "_preparing",
        "_service",
        "_ticket",
        "_timer",
    )

    def __init__(self, service: ExtProcService, call: Call) -> None:
        settings = service.settings
        self._service = service
        self._call = call
        self._exchange = Exchange(
            max_body_bytes=settings.max_body_bytes,
            assumed_request_body=settings.assumed_request_body,
            mode_grace_seconds=settings.mode_grace_seconds,
        )
        self._fallbacks = _fallbacks(call.metadata.get(FALLBACKS_WANTED))
        self._ticket: Ticket | None = None
        self._decision: Decision | None = None
        self._decided_at = 0.0
        self._buffered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._preparing: asyncio.Future[Mapping[str, Any]] | None = None
        service.open_streams += 1

    def message(self, data: bytes) -> None:
        try:
            event = decode(data)
        except UnknownMessageError as error:
            self._service.telemetry.anomaly(Anomaly.UNEXPECTED_MESSAGE, str(error))
            return
        except MalformedMessageError as error:
            # Envoy waits for an answer to each message. None is possible to this one, so that it has to give up.
            self._service.telemetry.anomaly(Anomaly.MALFORMED_MESSAGE, str(error))
            self._call.finish(Status.INVALID_ARGUMENT, str(error))
            return
        if type(event) is RequestBody:
            self._count(len(event.data))
        self._run(self._exchange.receive(event))

    def half_closed(self) -> None:
        self._prepare_no_more()
        self._run(self._exchange.receive(StreamEnded()))
        self._call.finish()

    def closed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._prepare_no_more()
        self._run(self._exchange.receive(StreamEnded()))
        self._service.buffered_bytes -= self._buffered
        self._service.open_streams -= 1

    def _count(self, size: int) -> None:
        """Count body bytes that wait for their end; past the limit of all streams, wait no longer."""
        self._buffered += size
        self._service.buffered_bytes += size
        if self._service.buffered_bytes > self._service.settings.max_buffered_bytes:
            self._exchange.limit_body(self._buffered - 1)

    def _run(self, effects: tuple[Effect, ...]) -> None:
        send = self._call.send
        for effect in effects:
            kind = type(effect)
            if kind is Decide:
                self._prepare_or_decide(effect)  # type: ignore[arg-type]
            elif kind is Finish:
                self._finish(effect)  # type: ignore[arg-type]
            elif kind is Report:
                self._service.telemetry.anomaly(effect.anomaly, "")  # type: ignore[union-attr]
            elif kind is Arm:
                self._timer = asyncio.get_running_loop().call_later(effect.seconds, self._timer_fired)  # type: ignore[union-attr]
            elif kind is not Answered and kind is not FirstChunk:
                send(encode(effect))  # type: ignore[arg-type]

    def _timer_fired(self) -> None:
        self._timer = None
        self._run(self._exchange.receive(TimerFired()))

    def _prepare_or_decide(self, asked: Decide) -> None:
        prepared = self._service.prepare(asked)
        if prepared is None:
            self._run(self._decide(asked))
            return
        request, preparing = prepared
        self._preparing = asyncio.ensure_future(preparing)
        self._preparing.add_done_callback(partial(self._prepared, asked, request))

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
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None

    def _decide(self, asked: Decide, request: Request | None = None) -> tuple[Effect, ...]:
        service = self._service
        decision = service.decide(asked, self._fallbacks, request)
        service.buffered_bytes -= self._buffered
        self._buffered = 0
        if decision.reason is Reason.ROUTED:
            self._decision = decision
            self._decided_at = time.monotonic()
            self._ticket = service.route(decision)
            outcome: Routed | Refused = Routed(",".join(decision.destinations))
        else:
            outcome = service.refuse(decision)
        effects = self._exchange.decided(outcome)
        service.telemetry.decided(decision)
        return effects

    def _finish(self, finish: Finish) -> None:
        ticket, decision = self._ticket, self._decision
        self._ticket = self._decision = None
        if ticket is not None:
            try:
                ticket.finish(finish)
            except Exception as error:  # noqa: BLE001  a response never fails because learning from it did
                self._service.telemetry.failed("learn", error)
        if decision is not None:
            self._service.telemetry.finished(decision, finish, time.monotonic() - self._decided_at)


def _fallbacks(wanted: str | None) -> int | None:
    """How many fallback endpoints this Envoy can use, where it says so."""
    return int(wanted) if wanted is not None and wanted.isdecimal() and len(wanted) < 4 else None
