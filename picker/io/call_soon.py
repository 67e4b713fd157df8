"""Calls from other threads into a loop that may have ended before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> None:
    """Have a loop make a call, unless it is closed. For any thread."""
    with suppress(RuntimeError):  # which a closed loop raises
        loop.call_soon_threadsafe(call, *arguments)
