"""What the ext_proc service takes from the configuration."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from picker.core.exchange.events import BodyMode
from picker.core.exchange.machine import Exchange
from picker.core.headers import CLIENT_FORBIDDEN


class ExtProcSettings(Struct, frozen=True):
    """What the service takes from the configuration; may be replaced between two streams.

    `learn_usage` asks Envoy for response bodies and reads in them what engines say of tokens. `exchange` makes the state
    machine of a stream, which takes the `control_headers` from clients.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    max_buffered_bytes: int = 1024 * 1024 * 1024
    assumed_request_body: BodyMode | None = None
    mode_grace_seconds: float = 0.02
    retry_after_seconds: int = 1
    learn_usage: bool = False
    control_headers: frozenset[str] = CLIENT_FORBIDDEN
    exchange: Callable[..., Exchange] = Exchange
