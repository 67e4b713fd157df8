"""`kv-cache-utilization`: prefer endpoints with free KV cache, in fractions.

Formula: llm-d's `kv-cache-utilization-scorer`, with scores 0 to 100. What requests sent since the last scrape take of a
cache cannot be told, so that its usage stays as it was scraped.
"""

from __future__ import annotations

from picker.core.arrays import Floats
from picker.core.plugins.args import NoArgs
from picker.core.plugins.load import NEUTRAL, unknown_as_average
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class KvCacheUtilizationScorer:
    """Rates by the free share of the KV cache: `(1 - usage) * 100`."""

    name = "kv-cache-utilization"
    producer: str | None = None

    def __init__(self, args: NoArgs) -> None: ...

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        return unknown_as_average((1.0 - candidates.table.kv_usage.take(candidates.slots)) * 100.0, NEUTRAL)
