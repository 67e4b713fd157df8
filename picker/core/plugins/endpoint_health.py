"""`endpoint-health`: no work for endpoints that keep failing or have gone silent, but a probe now and then."""

from __future__ import annotations

import numpy as np

from picker.core.arrays import Flags
from picker.core.plugins.args import NoArgs
from picker.core.scheduling.api import Candidates, Request


class EndpointHealthFilter:
    """Keeps endpoints that are not suspect, and the suspect whose turn it is to be probed; all when all are suspect."""

    name = "endpoint-health"

    def __init__(self, args: NoArgs) -> None: ...

    def keep(self, request: Request, candidates: Candidates) -> Flags | None:
        """Keep all when no candidate would be left: a wrong suspicion must not refuse requests."""
        table, slots = candidates.table, candidates.slots
        now = request.now
        suspects = table.suspects(slots, now)
        if suspects is None or suspects.all():
            return None
        keep = ~suspects
        probed = table.health.due(slots[suspects], now)
        if probed is not None:
            keep[slots.searchsorted(probed)] = True
        return keep

    def probe(self, request: Request, candidates: Candidates) -> int | None:
        """The suspect that was kept, which is the one to probe."""
        slots = candidates.slots
        suspects = candidates.table.suspects(slots, request.now)
        if suspects is None or suspects.all():
            return None
        return int(slots[np.flatnonzero(suspects)[0]])
