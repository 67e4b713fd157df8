"""The ext_proc service: what all its streams share, from the director's decisions to the counts for gauges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from picker.core.admission.waiting import Left
from picker.core.director import Director
from picker.core.exchange.effects import Decide
from picker.core.exchange.outcomes import Refused
from picker.core.scheduling.api import Request
from picker.core.scheduling.decision import Decision, Reason
from picker.core.telemetry import Telemetry
from picker.core.tickets import Ticket
from picker.io.admission import Entry, Gate
from picker.io.afterwards import Afterwards, Later
from picker.io.extproc.model_names import RestoredNames
from picker.io.extproc.observer import Observations
from picker.io.extproc.settings import ExtProcSettings
from picker.io.extproc.stream import ExtProcStream
from picker.io.preparing import together
from picker.io.rpc import Call, HandlerFactory

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

_REFUSALS = {
    Reason.NO_ENDPOINTS: (503, "no endpoint is known; check discovery"),
    Reason.NONE_IN_SUBSET: (503, "no known endpoint is in the subset that the gateway allows"),
    Reason.NO_DECODE_ENDPOINT: (503, "every endpoint only computes prompts; add endpoints that generate"),
    Reason.SATURATED: (429, "the pool is saturated and the request may not wait any longer; try again later"),
    Reason.FILTERED_OUT: (429, "every endpoint is saturated; try again later"),
}


class ExtProcService:
    """Makes a handler for each ext_proc stream. `open_streams` and `buffered_bytes` are there for gauges.

    What no answer waits for is done `soon`, as `Afterwards` describes it.
    """

    def __init__(
        self,
        director: Director,
        telemetry: Telemetry,
        settings: ExtProcSettings,
        soon: Later | None = None,
    ) -> None:
        self.director = director
        self.telemetry = telemetry
        self.settings = settings
        self.afterwards = Afterwards(partial(telemetry.failed, "learn"), soon)
        self.observations = Observations(telemetry)
        self.model_names: Counter[str] = Counter()
        """What became of requests for names of other models, and of the names in their responses."""
        self.gate: Gate | None = None
        """There while requests may be turned away or have to wait."""
        self.open_streams = 0
        self.buffered_bytes = 0

    @property
    def usage_outcomes(self) -> Counter[str]:
        """What came of reading usage out of responses."""
        return self.observations.outcomes

    @property
    def services(self) -> dict[str, HandlerFactory]:
        """The methods to give to a transport."""
        return {METHOD: self._handler}

    def _handler(self, call: Call) -> ExtProcStream:
        return ExtProcStream(self, call)

    def enter(self, gate: Gate, asked: Decide, left: Callable[[Left], None]) -> Entry | Left:
        """Have a request admitted, see `Gate.enter`; should that go wrong, it does not wait."""
        try:
            return gate.enter(asked, left)
        except Exception as error:  # noqa: BLE001  a request never fails because asking for room did
            self.telemetry.failed("admission", error)
            return Left.ADMITTED

    def room(self) -> None:
        """Tell the gate that something has ended, if there is one."""
        if self.gate is not None:
            try:
                self.gate.room()
            except Exception as error:  # noqa: BLE001  it looks again by itself
                self.telemetry.failed("admission", error)

    def turn_away(self, asked: Decide) -> Decision:
        """Refuse a request that the gate does not admit; should reading it go wrong, without that."""
        try:
            return self.director.refuse(asked, Reason.SATURATED)
        except Exception as error:  # noqa: BLE001  an answer never fails because its telling did
            self.telemetry.failed("refuse", error)
            return self.director.refuse_plainly(Reason.SATURATED)

    def rewrite(self, asked: Decide) -> tuple[Decide, RestoredNames | None]:
        """Have a request ask for the model that its name stands for; returns what restores the name in its response.

        Should that go wrong, it asks for what it says.
        """
        try:
            changed, rewritten = self.director.rewrite(asked)
            if rewritten is None:
                return asked, None
            names = RestoredNames(rewritten, self.model_names)
        except Exception as error:  # noqa: BLE001  a request never fails because renaming its model did
            self.telemetry.failed("rewrite", error)
            return asked, None
        self.model_names["rewritten"] += 1
        return changed, names

    def prepare(self, asked: Decide) -> tuple[Request, Awaitable[Mapping[str, Any]]] | None:
        """Read a request that has to be prepared, and return it with what does that; None when nothing does."""
        if not self.director.prepares:
            return None
        try:
            request = self.director.read(asked)
            preparing = self.director.prepare(asked, request)
        except Exception as error:  # noqa: BLE001  a request never fails because preparing its decision did
            self.telemetry.failed("prepare", error)
            return None
        return (request, together(preparing)) if preparing else None

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
