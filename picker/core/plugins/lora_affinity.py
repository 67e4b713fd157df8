"""`lora-affinity`: send a request to endpoints that serve the model or adapter it names, best to one that has it loaded.

Scores: as llm-d's `lora-affinity-scorer`.
"""

from __future__ import annotations

import numpy as np

from picker.core.arrays import Flags, Floats
from picker.core.endpoints import Adapters
from picker.core.plugins.args import NoArgs
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng


class LoraAffinityFilter:
    """Keeps endpoints known to serve the model; if none is, those whose models are unknown.

    If every endpoint is known not to serve it, all stay: the engine's own "no such model" helps the client more
    than "try again later" would.
    """

    name = "lora-affinity"

    def __init__(self, args: NoArgs) -> None: ...

    def keep(self, request: Request, candidates: Candidates) -> Flags | None:
        model, models = request.prompt.model, candidates.table.models
        if not model:
            return None
        served = [models[slot] for slot in candidates.slots.tolist()]
        for flags in (
            [names is not None and model in names for names in served],
            [names is None for names in served],
        ):
            if any(flags):
                return None if all(flags) else np.array(flags, np.bool_)
        return None


LOADED, ROOM, AWAITED, NO_ROOM = 100.0, 80.0, 60.0, 0.0


class LoraAffinityScorer:
    """Rates an endpoint by what its engine would have to do to run the adapter of the request.

    100: it is loaded. 80: a slot is free. 60: requests wait for it already. 0: others have to make room for it. Without
    an opinion when no engine says anything about adapters, and for the name of a base model.
    """

    name = "lora-affinity"
    producer: str | None = None

    def __init__(self, args: NoArgs) -> None: ...

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats | None:  # noqa: ARG002
        model, table = request.prompt.model, candidates.table
        slots = candidates.slots.tolist()
        said = [table.adapters[slot] for slot in slots]
        if not model or not any(said) or any(model in (table.bases[slot] or ()) for slot in slots):
            return None
        return np.array([_rate(adapters, model) for adapters in said])


def _rate(adapters: Adapters | None, model: str) -> float:
    if adapters is None:
        return NO_ROOM
    if model in adapters.running:
        return LOADED
    if len(adapters.running) + len(adapters.waiting) < adapters.most:
        return ROOM
    return AWAITED if model in adapters.waiting else NO_ROOM
