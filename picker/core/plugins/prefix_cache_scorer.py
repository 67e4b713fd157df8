"""`prefix-cache-scorer`: prefer endpoints that hold more of the prompt, by whichever producer is named.

Source: seed 004; `prefixMatchInfoProducerName` as in llm-d's router.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from picker.core.arrays import Floats
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng

NAME: Final = "prefix-cache-scorer"


class ProducerName(StrEnum):
    """A producer that tells who holds how much of a prompt."""

    PREFIX_CACHE = "prefix-cache"
    KVCACHE_AWARE = "kvcache-aware"
    SESSION = "session-prefix-cache-producer"


class PrefixCacheScorerArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `prefix-cache-scorer`."""

    prefixMatchInfoProducerName: ProducerName = ProducerName.PREFIX_CACHE  # noqa: N815  the configuration's name
    """The producer whose matches count."""


class PrefixCacheScorer:
    """Rates by the share of the prompt that matches: 100 for all of it."""

    name = NAME

    def __init__(self, args: PrefixCacheScorerArgs) -> None:
        self.producer: str | None = str(args.prefixMatchInfoProducerName)

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats | None:  # noqa: ARG002
        if match is None or not match.total:
            return None
        scores: Floats = match.matched / match.total
        scores *= 100.0
        return scores
