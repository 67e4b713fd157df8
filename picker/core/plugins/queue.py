"""`queue`: prefer endpoints whose engine queues fewer requests than the others.

Formula: llm-d's `queue-scorer`, with scores 0 to 100.
"""

from __future__ import annotations

import numpy as np

from picker.core.arrays import Floats
from picker.core.plugins.args import NoArgs
from picker.core.plugins.load import NEUTRAL, unknown_as_average
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class QueueScorer:
    """Rates linearly between the longest queue (0) and the shortest one (100); equal queues rate 100."""

    name = "queue"
    producer: str | None = None

    def __init__(self, args: NoArgs) -> None: ...

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        waiting = candidates.table.waiting_now(candidates.slots)
        longest, shortest = np.fmax.reduce(waiting), np.fmin.reduce(waiting)
        rated = 100.0 * ((longest - waiting) / (longest - shortest)) if longest > shortest else waiting * 0.0 + 100.0
        return unknown_as_average(rated, NEUTRAL)
