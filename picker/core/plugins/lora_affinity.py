"""`lora-affinity`: send a request to endpoints that serve the model or adapter it names."""

from __future__ import annotations

import numpy as np

from picker.core.endpoints import Flags
from picker.core.plugins.args import NoArgs
from picker.core.scheduling.api import Candidates, Request


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
