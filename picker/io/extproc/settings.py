"""What the ext_proc service takes from the configuration."""

from __future__ import annotations

from collections.abc import Callable

from picker.core.exchange.machine import Exchange
from picker.core.exchange.settings import ExchangeSettings


class ExtProcSettings(ExchangeSettings, frozen=True):
    """Settings of all streams; may be replaced between two of them.

    Where response bodies are wanted, they are read for what engines say of tokens. `exchange` makes the state machine
    of a stream.
    """

    max_buffered_bytes: int = 1024 * 1024 * 1024
    retry_after_seconds: int = 1
    exchange: Callable[[ExchangeSettings], Exchange] = Exchange
