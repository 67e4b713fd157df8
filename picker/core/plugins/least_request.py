"""`least-request`: keep requests away from endpoints that queue, and prefer those with the fewest.

Formulas and vectors: Kthena's router, `least-request`.
"""

from __future__ import annotations

from math import isnan

import numpy as np

from picker.core.arrays import Flags, Floats
from picker.core.plugins.args import NoArgs
from picker.core.plugins.least_request_args import LeastRequestArgs
from picker.core.plugins.load import unknown_as_average
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class LeastRequestFilter:
    """Keeps endpoints whose engine queues fewer than `maxWaitingRequests`; one that is unknown stays."""

    name = "least-request"

    def __init__(self, args: LeastRequestArgs) -> None:
        self._limit = args.maxWaitingRequests if args.maxWaitingRequests > 0 else 10

    def keep(self, request: Request, candidates: Candidates) -> Flags | None:  # noqa: ARG002
        table = candidates.table
        if table.most_waiting < self._limit:
            return None
        full = table.waiting[candidates.slots] >= self._limit
        return ~full if np.count_nonzero(full) else None


class LeastRequestScorer:
    """Rates by our own in-flight requests; those beyond what the engine runs are queued and count a hundredfold."""

    name = "least-request"
    producer: str | None = None

    def __init__(self, args: NoArgs | LeastRequestArgs) -> None: ...

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        table, slots = candidates.table, candidates.slots
        in_flight = table.in_flight.take(slots).astype(np.float64)  # sums of one type take half the time
        base = _load(in_flight - table.running.take(slots), in_flight)
        most = base.item(base.argmax())
        if isnan(most):
            queued = unknown_as_average(np.maximum(in_flight - table.running.take(slots), 0.0), 0.0)
            base = _load(queued, in_flight)
            most = base.item(base.argmax())
        if most == 0:
            base.fill(100.0)
            return base
        rated: Floats = np.subtract(most, base, out=base)
        rated /= most
        rated *= 100.0
        return np.trunc(rated, out=rated)


def _load(queued: Floats, in_flight: Floats) -> Floats:
    np.maximum(queued, 0.0, out=queued)
    queued *= 100.0
    queued += in_flight
    return queued
