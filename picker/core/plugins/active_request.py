"""`active-request`: prefer endpoints with few of our own requests in flight.

Formula: llm-d's `active-request-scorer`, with scores 0 to 100.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from picker.core.arrays import Floats
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class ActiveRequestArgs(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Arguments of `active-request`."""

    idle_threshold: Annotated[int, Meta(ge=0)] = 0
    """Endpoints with so many requests in flight, or fewer, are idle and rate 100."""
    max_busy_score: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of 100 that the others can reach at most."""


class ActiveRequestScorer:
    """Rates idle endpoints 100, the busiest one 0, and the others linearly between."""

    name = "active-request"
    producer: str | None = None

    def __init__(self, args: ActiveRequestArgs) -> None:
        self._idle = args.idle_threshold
        self._most = 100.0 * args.max_busy_score

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        count = candidates.table.in_flight.take(candidates.slots)
        busiest = max(int(count.max()), 1)
        return np.where(count <= self._idle, 100.0, (busiest - count) * (self._most / busiest))
