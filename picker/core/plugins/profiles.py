"""Sets of plugins by name: what an empty `scheduler` means, and what peers of the picker do by default."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from picker.core.plugins.prefix_cache import WHOLE_PROMPT
from picker.core.plugins.token_cost import NAME as TOKEN_COST


class ProfileName(StrEnum):
    """Which plugins are used where `plugins` does not say it."""

    TOKEN_COST = "token-cost"  # noqa: S105  not a secret
    """The default: the endpoint where the prompt costs least; no weights, no scraped metrics."""
    KTHENA = "kthena"
    """What Kthena's router does without a configuration."""


class Profile(Struct, frozen=True):
    """Plugins and their arguments, in the terms of the configuration."""

    filters: tuple[str, ...]
    scorers: tuple[tuple[str, float], ...]
    args: Mapping[str, Struct] = {}
    producers: tuple[str, ...] = ()


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
}
