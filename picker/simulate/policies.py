"""Policies to compare with that are no plugins: yardsticks, and two from research."""

from __future__ import annotations

from itertools import count

import numpy as np

from picker.core.arrays import Floats
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class RoundRobin:
    """One endpoint after the other."""

    name = "round-robin"
    producer: str | None = None

    def __init__(self) -> None:
        self._turns = count()

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        rated = np.zeros(len(candidates.slots))
        rated[next(self._turns) % len(rated)] = 100.0
        return rated


class Product:
    """Work times requests: the tokens that a prompt lacks on an endpoint times the requests that would be there.

    That is LMetric. With `queued`, tokens that wait there for their prefill are added to those of the prompt.
    """

    name = "product"
    producer: str | None = None

    def __init__(self, *, queued: bool) -> None:
        self._queued = queued

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats | None:  # noqa: ARG002
        work, table, slots = candidates.work, candidates.table, candidates.slots
        if work is None:
            return None
        tokens = work.uncached + table.queued_tokens.take(slots) if self._queued else work.uncached
        rated: Floats = -tokens * (table.in_flight.take(slots) + 1)
        return rated
