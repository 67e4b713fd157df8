"""`least-latency`: prefer endpoints whose recent time to first token and time per token are short.

Formula: Kthena's router, `least-latency`; an endpoint without traffic yet rates 100, so that it gets some.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from picker.core.arrays import Floats
from picker.core.plugins.load import NEUTRAL, unknown_as_average
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class LeastLatencyArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `least-latency`."""

    TTFTTPOTWeightFactor: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the time to first token in the score, 0..1; the time per further token has the rest."""


class LeastLatencyScorer:
    """Rates each of the two times linearly between the slowest (0) and the fastest (100) candidate."""

    name = "least-latency"
    producer: str | None = None

    def __init__(self, args: LeastLatencyArgs) -> None:
        self._factor = args.TTFTTPOTWeightFactor

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        table, slots = candidates.table, candidates.slots
        ttft, tpot = table.ttft[slots], table.tpot[slots]
        busy = (ttft > 0) & (tpot > 0)
        scores = np.where(np.isnan(ttft) | np.isnan(tpot), np.nan, 100.0)
        if busy.any():
            rated = _linear(ttft[busy]) * self._factor + _linear(tpot[busy]) * (1 - self._factor)
            scores[busy] = np.trunc(rated)
        return unknown_as_average(scores, NEUTRAL)


def _linear(values: Floats) -> Floats:
    slowest, fastest = values.max(), values.min()
    if slowest == fastest:
        return np.full(len(values), 100.0)
    rated: Floats = 100.0 * (slowest - values) / (slowest - fastest)
    return rated
