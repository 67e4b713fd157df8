"""`random`: rate endpoints by chance, as a baseline to compare with."""

from __future__ import annotations

import numpy as np

from picker.core.arrays import Floats
from picker.core.plugins.args import NoArgs
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class RandomScorer:
    """Rates with whole numbers from 0 to 100, both included."""

    name = "random"
    producer: str | None = None

    def __init__(self, args: NoArgs) -> None: ...

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        return np.array([float(int(rng.random() * 101)) for _ in range(len(candidates.slots))])
