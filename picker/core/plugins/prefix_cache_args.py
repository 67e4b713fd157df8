"""The arguments of `prefix-cache`."""

from __future__ import annotations

from msgspec import Struct


class PrefixCacheArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `prefix-cache`. Zero or less means the default."""

    blockSizeToHash: int = 64  # noqa: N815  the configuration's name
    """Bytes in a block."""
    maxBlocksToMatch: int = 128  # noqa: N815
    """Blocks of a prompt that are hashed; text after them is ignored."""
    maxHashCacheSize: int = 50_000  # noqa: N815
    """Blocks kept for each endpoint, over all models; the least recently recorded are dropped."""
    topKMatches: int = 5  # noqa: N815
    """Endpoints that get a score; those with the longest match first, by chance among equals."""

    recordAtPick: bool = True  # noqa: N815
    """Whether a request's blocks count from its pick on. False: only when it has succeeded, as in Kthena's router; until
    then, requests with the same new beginning do not find each other."""
    sizeFromEngine: bool = False  # noqa: N815
    """Keep as many blocks for an endpoint as its engine's KV cache has room for, where it says how large that is."""
    sizeMargin: float = 1.25  # noqa: N815
    """How many times as many. An index that is too large loses little, one that is too small a lot."""

    def effective(self) -> PrefixCacheArgs:
        """The same with defaults in the place of values that are zero or less."""
        chosen = {name: getattr(self, name) for name in self.__struct_fields__}
        return PrefixCacheArgs(**{name: value for name, value in chosen.items() if value > 0 or value is False})


WHOLE_PROMPT = PrefixCacheArgs(
    blockSizeToHash=512, maxBlocksToMatch=100_000, maxHashCacheSize=16_384, topKMatches=100_000, sizeFromEngine=True
)
"""Arguments for matching prompts to their ends, as `token-cost` needs it. A prompt of 1 MiB has 2,048 blocks."""
