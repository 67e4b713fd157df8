"""What the load scorers share: how an unknown value counts, and what a scraped one means later."""

from __future__ import annotations

import numpy as np

from picker.core.endpoints import Floats
from picker.core.scheduling.api import Candidates

NEUTRAL = 50.0

_RUNS_AT_LEAST = 8.0
"""Requests that any engine runs at once."""


def unknown_as_average(values: Floats, otherwise: float) -> Floats:
    """Replace NaN by the mean of the known values, or by `otherwise` when none is known.

    An endpoint whose metrics went stale is then neither free nor shunned: our own in-flight counts decide.
    """
    unknown = np.isnan(values)
    if not np.count_nonzero(unknown):
        return values
    known = values[~unknown]
    return np.where(unknown, known.mean() if len(known) else otherwise, values)


def waiting_now(candidates: Candidates) -> Floats:
    """Return how many requests each engine queues, NaN where that is unknown.

    It is what the last scrape said, corrected by what we sent and what ended since: an engine that had a queue queues
    what comes, and one that had none runs as many as it was ever seen to run.
    """
    table, slots = candidates.table, candidates.slots
    waiting = table.waiting.take(slots)
    since = table.in_flight.take(slots) - table.in_flight_seen.take(slots)
    if not np.count_nonzero(since):
        return waiting
    room = np.fmax(table.most_running.take(slots), _RUNS_AT_LEAST) - table.running.take(slots)
    room[waiting > 0] = 0.0
    # An engine that does not say what it runs, nor queues, is taken to run what comes.
    room[np.isnan(room)] = np.inf
    corrected: Floats = np.maximum(waiting + since - np.maximum(room, 0.0), 0.0)
    return corrected
