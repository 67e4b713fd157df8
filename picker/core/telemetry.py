"""What the request path tells the rest of the process, as a protocol: metrics, logs and watchers stand behind it."""

from __future__ import annotations

from typing import Protocol

from picker.core.exchange.effects import Anomaly, Finish
from picker.core.scheduling.decision import Decision, Sent


class Telemetry(Protocol):
    """Told on the event loop, between two messages of a stream: calls must be short and never raise."""

    def decided(self, decision: Decision) -> None:
        """A request was routed, or refused for the decision's reason."""

    def finished(self, sent: Sent, finish: Finish, seconds: float) -> None:
        """A routed request is over, `seconds` after its decision."""

    def anomaly(self, anomaly: Anomaly, detail: str) -> None:
        """An ext_proc stream did something that a well-behaved Envoy does not."""

    def failed(self, where: str, error: BaseException) -> None:
        """An unexpected exception was survived in this part of the request path."""
