"""Several preparations of one decision at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any


def together(preparing: Sequence[Awaitable[Mapping[str, Any]]]) -> Awaitable[Mapping[str, Any]]:
    """Return what gives all that they find. They begin at once, so that none is left alone if nobody waits for them."""
    return preparing[0] if len(preparing) == 1 else _merged(asyncio.gather(*preparing))


async def _merged(found: Awaitable[list[Mapping[str, Any]]]) -> Mapping[str, Any]:
    return {name: value for each in await found for name, value in each.items()}
