"""Background work that nobody waits for: its failures are seen, and it begins again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import structlog

logger = structlog.get_logger(__name__)

Failed = Callable[[str, BaseException], None]
"""Told which part has survived an unexpected error, as `Hub.failed`, which counts it and logs it now and then."""


def log_failure(part: str, error: BaseException, **facts: object) -> None:
    """The `Failed` of those who have no counter."""
    logger.error("A part has failed; it begins again", part=part, exc_info=error, **facts)


async def keep(
    part: str,
    work: Callable[[], Awaitable[None]],
    *,
    pause: float = 1.0,
    failed: Failed | None = None,
    **facts: object,
) -> NoReturn:
    """Do something until cancelled, again after `pause` seconds should it ever fail or end.

    `failed` is told of failures, the facts in a note; without it they are logged.
    """
    while True:
        try:
            await work()
        except Exception as error:  # noqa: BLE001  one part that fails must not stop the others
            if failed is None:
                log_failure(part, error, **facts)
            else:
                if facts:
                    error.add_note(", ".join(f"{name}: {fact}" for name, fact in facts.items()))
                failed(part, error)
        await asyncio.sleep(pause)


def tell_unseen(loop: asyncio.AbstractEventLoop, failed: Failed) -> None:
    """Have `failed` told of what callbacks and forgotten tasks raise, as `event_loop`.

    Errors of connections, which peers can cause, are logged by the loop as ever.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            loop.default_exception_handler(context)
        else:
            failed("event_loop", error)

    loop.set_exception_handler(handle)
