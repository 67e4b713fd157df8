"""`no-hit-lru`: send prompts that nobody holds anything of to the endpoint that got none of them for longest.

Formula: llm-d's `no-hit-lru-scorer`, with scores 0 to 100. Endpoints that never got one are equal here, so that load
decides among them.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from picker.core.arrays import Floats
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng, Work

_WARM = 50.0


class NoHitLruArgs(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Arguments of `no-hit-lru`."""

    lru_size: Annotated[int, Meta(le=1_000_000)] = 1024
    """Endpoints that are remembered to have got such a prompt. Zero or less means the default."""


class NoHitLruScorer:
    """Rates all endpoints 50 when one holds something, else by rank: the one longest without 100, the latest one 0."""

    name = "no-hit-lru"
    producer: str | None = None

    def __init__(self, args: NoHitLruArgs) -> None:
        self._size = args.lru_size
        self._count = 0
        self._sent: dict[str, int] = {}
        """Addresses, the least recent first, each with the number of its last such prompt."""

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats | None:  # noqa: ARG002
        """None without `Candidates.work`, which a scheduler with this scorer counts."""
        work, slots = candidates.work, candidates.slots
        if work is None:
            return None
        if not _nobody_holds(work):
            return np.full(len(slots), _WARM)
        endpoints, sent = candidates.table.endpoints, self._sent
        last = np.array([sent.get(endpoints[slot].address, 0) for slot in slots.tolist()])
        longer = np.sort(last).searchsorted(last)
        rated: Floats = longer / max(len(slots) - 1, 1)
        return 100.0 * (1.0 - rated)

    def routed(self, address: str, work: Work) -> None:
        """Remember where a request goes, if nobody holds anything of its prompt."""
        if not _nobody_holds(work):
            return
        self._count += 1
        self._sent.pop(address, None)
        self._sent[address] = self._count
        if len(self._sent) > self._size:
            del self._sent[next(iter(self._sent))]


def _nobody_holds(work: Work) -> bool:
    return work.uncached.item(work.uncached.argmin()) >= work.prompt
