"""What the state machine of a stream takes from the configuration."""

from __future__ import annotations

from msgspec import Struct

from picker.core.exchange.events import BodyMode
from picker.core.headers import CLIENT_FORBIDDEN


class ExchangeSettings(Struct, frozen=True):
    """Settings of an `Exchange`.

    `max_body_bytes` bounds what full duplex keeps of a request body before the decision is made without the rest (until
    it is made, more may come: the caller's deadline for decisions bounds that). `assumed_request_body` is the mode where
    Envoy does not say it; None tells it by evidence within `mode_grace_seconds`. `wants_response_body` asks an Envoy that
    would send no response body to send it in pieces. `control_headers` are those that are taken from clients.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    assumed_request_body: BodyMode | None = None
    mode_grace_seconds: float = 0.02
    wants_response_body: bool = False
    control_headers: frozenset[str] = CLIENT_FORBIDDEN


DEFAULTS = ExchangeSettings()
