"""The ext_proc service: what all its streams share, from the director's decisions to the counts for gauges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec

from picker.core.director import Director
from picker.core.exchange.effects import Decide
from picker.core.exchange.outcomes import Refused
from picker.core.scheduling.api import Request
from picker.core.scheduling.decision import Decision, Reason
from picker.core.telemetry import Telemetry
from picker.core.tickets import Ticket
from picker.io.admission import Gate
from picker.io.afterwards import Afterwards, Later
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
        self.afterwards = Afterwards(soon)
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
