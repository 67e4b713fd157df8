"""`prefix-cache-affinity-filter`: keep endpoints that hold most of the prompt, unless they are too busy.

Formula: llm-d's `prefix-cache-affinity-filter`. It goes by the producer that knows most of the prompt.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from picker.core.arrays import Flags
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class PrefixCacheAffinityArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `prefix-cache-affinity-filter`."""

    affinityThreshold: Annotated[float, Meta(ge=0, le=1)] = 0.8  # noqa: N815  the configuration's name
    """Share of the prompt that an endpoint has to hold to be kept."""
    explorationProbability: Annotated[float, Meta(ge=0, le=1)] = 0.0  # noqa: N815
    """Share of requests for which all endpoints are kept."""
    maxTTFTPenaltyMs: Annotated[float, Meta(ge=0)] = 18_000.0  # noqa: N815
    """All endpoints are kept when the first token would come so many milliseconds later at the best of those that hold
    the prompt than at the best of the others. 0: never."""
    peakPrefillThroughput: Annotated[float, Meta(gt=0)] = 15_928.0  # noqa: N815
    """Prompt tokens that an engine computes in a second; the tokens queued over it are the time to the first token."""


class PrefixCacheAffinityFilter:
    """Keeps endpoints at or above the threshold; all when there is none, or when waiting for them costs too much."""

    name = "prefix-cache-affinity-filter"
    producer: str | None = None

    def __init__(self, args: PrefixCacheAffinityArgs) -> None:
        self._share = args.affinityThreshold
        self._exploration = args.explorationProbability
        # The penalty in tokens of prefill, as the load is counted.
        self._penalty = args.maxTTFTPenaltyMs / 1000.0 * args.peakPrefillThroughput

    def keep_matched(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Flags | None:  # noqa: ARG002
        """None when the prompt could not be matched, too."""
        if match is None or not match.total:
            return None
        holding: Flags = match.matched >= self._share * match.total
        if holding.all() or not holding.any() or (self._exploration and rng.random() < self._exploration):
            return None
        queued = candidates.table.queued_tokens.take(candidates.slots)
        if self._penalty and queued[holding].min() - queued[~holding].min() > self._penalty:
            return None
        return holding
