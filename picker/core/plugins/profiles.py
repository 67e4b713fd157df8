"""Sets of plugins by name: what an empty `scheduler` means, and what peers of the picker do by default."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from picker.core.plugins.prefix_cache_args import WHOLE_PROMPT, PrefixCacheArgs
from picker.core.plugins.token_cost import NAME as TOKEN_COST


class ProfileName(StrEnum):
    """Which plugins are used where `plugins` does not say it."""

    TOKEN_COST = "token-cost"  # noqa: S105  not a secret
    """The default: the endpoint where the prompt costs least; no weights, no scraped metrics."""
    KTHENA = "kthena"
    """What Kthena's router does without a configuration."""
    LLM_D = "llm-d"
    """What llm-d's endpoint picker does without a configuration, and by its chart."""
    LLM_D_GUIDE = "llm-d-guide"
    """What llm-d's guides configure since mid-2026: stay with the cache, and there with the fewest queued tokens."""


class Profile(Struct, frozen=True):
    """Plugins and their arguments, in the terms of the configuration."""

    filters: tuple[str, ...]
    scorers: tuple[tuple[str, float], ...]
    args: Mapping[str, Struct] = {}
    producers: tuple[str, ...] = ()


_APPROXIMATE = PrefixCacheArgs(
    blockSizeToHash=256,
    maxBlocksToMatch=2048,
    maxHashCacheSize=31_250,
    topKMatches=100_000,
    sizeFromEngine=True,
    sizeMargin=4.0,
)
"""llm-d's approximate prefix cache: blocks of 64 tokens of 4 bytes, and at most 131,072 tokens. Where an engine says how
many blocks it has room for, so many are kept; as engine's blocks have 16 tokens, they are four times as large."""

PROFILES: Mapping[ProfileName, Profile] = {
    ProfileName.TOKEN_COST: Profile(
        filters=("endpoint-health",),
        scorers=((TOKEN_COST, 1.0),),
        args={"prefix-cache": WHOLE_PROMPT},
        producers=("prefix-cache",),
    ),
    ProfileName.KTHENA: Profile(
        filters=("least-request",),
        scorers=(("least-request", 1.0), ("least-latency", 1.0), ("prefix-cache", 1.0)),
    ),
    ProfileName.LLM_D: Profile(
        filters=(),
        scorers=(("queue", 2.0), ("kv-cache-utilization", 2.0), ("prefix-cache", 3.0)),
        args={"prefix-cache": _APPROXIMATE},
    ),
    ProfileName.LLM_D_GUIDE: Profile(
        filters=("prefix-cache-affinity-filter",),
        scorers=(("token-load", 1.0),),
        args={"prefix-cache": _APPROXIMATE},
        producers=("prefix-cache",),
    ),
}
