"""Background work that nobody waits for: what becomes of it is logged, and it begins again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog

logger = structlog.get_logger(__name__)


async def keep(part: str, work: Callable[[], Awaitable[None]], *, pause: float = 1.0, **facts: object) -> NoReturn:
    """Do something until cancelled, again after `pause` seconds should it ever fail or end. Facts go into the log."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("A part has failed; it begins again", part=part, **facts)
        await asyncio.sleep(pause)
