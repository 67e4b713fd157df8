"""`token-load`: prefer endpoints with few uncached prompt tokens still to be computed.

Formula: llm-d's `token-load-scorer`, with scores 0 to 100. The tokens are our own count, less what is cached there.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from picker.core.arrays import Floats
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class TokenLoadArgs(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Arguments of `token-load`."""

    queue_threshold_tokens: Annotated[int, Meta(le=10**12)] = 4_194_304
    """Endpoints with so many tokens queued, or more, rate 0. Zero or less means the default."""


class TokenLoadScorer:
    """Rates linearly between no token queued (100) and the threshold (0)."""

    name = "token-load"
    producer: str | None = None

    def __init__(self, args: TokenLoadArgs) -> None:
        self._threshold = float(args.queue_threshold_tokens)

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats:  # noqa: ARG002
        full = np.minimum(candidates.table.queued_tokens.take(candidates.slots) / self._threshold, 1.0)
        rated: Floats = 100.0 * (1.0 - full)
        return rated
