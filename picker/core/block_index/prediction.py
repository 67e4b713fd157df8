"""What engines will report as cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from picker.core.block_index.source import Source


class Prediction(NamedTuple):
    """What an engine will report as cached, in tokens; `complete` is False where it may hold more than we know."""

    cached_tokens: int
    complete: bool


def least(sources: Mapping[int, Sequence[Source]], tokens: Mapping[int, int]) -> dict[int, Prediction]:
    """Return, by slot, the least of what its ranks hold, so that it is never too much; `tokens` are by a cache's bit."""
    return {
        slot: Prediction(
            min(tokens[source.cache.bit] for source in ranks),
            all(source.incomplete_since is None for source in ranks),
        )
        for slot, ranks in sources.items()
    }
