"""`gpu-usage`: prefer endpoints with free KV cache."""

from __future__ import annotations

import numpy as np

from picker.core.arrays import Floats
from picker.core.plugins.args import NoArgs
from picker.core.plugins.load import NEUTRAL, unknown_as_average
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class GpuUsageScorer:
    """Rates by the free share of the KV cache: `int((1 - usage) * 100)`."""

    name = "gpu-usage"
    producer: str | None = None

    def __init__(self, args: NoArgs) -> None: ...

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        usage = candidates.table.kv_usage[candidates.slots]
        return unknown_as_average(np.trunc((1.0 - usage) * 100.0), NEUTRAL)
