"""`load-aware`: rate endpoints by the length of their engine's queue, whatever that of the others is.

Formula: llm-d's `load-aware-scorer`, with scores 0 to 100.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from picker.core.arrays import Floats
from picker.core.plugins.load import unknown_as_average
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng

_NO_QUEUE = 50.0


class LoadAwareArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `load-aware`."""

    threshold: Annotated[int, Meta(le=10**9)] = 128
    """Endpoints that queue so many requests, or more, rate 0. Zero or less means the default."""


class LoadAwareScorer:
    """Rates linearly between no queue (50) and one as long as the threshold (0)."""

    name = "load-aware"
    producer: str | None = None

    def __init__(self, args: LoadAwareArgs) -> None:
        self._threshold = float(args.threshold)

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        full = np.minimum(candidates.table.waiting_now(candidates.slots) / self._threshold, 1.0)
        return unknown_as_average(_NO_QUEUE * (1.0 - full), _NO_QUEUE / 2)
