"""Which model a request gets for the name that it asks for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from picker.core.scheduling.api import Rng
from picker.core.strict import Findings, child


class Target(Struct, frozen=True):
    """A model that answers for a name."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    """The name that engines serve it by."""
    weight: Annotated[float, Meta(gt=0, extra={"remedy": "remove the entry to send it nothing"})] = 1.0
    """Its share of the requests, against the weights of the others."""


class Rewrite(Struct, frozen=True):
    """A name, and the models that answer for it."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    """What clients ask for."""
    targets: tuple[Target, ...]
    """The models that requests get, each with its `model` and `weight`."""


class ModelSettings(Struct, frozen=True):
    """Names of models."""

    rewrites: tuple[Rewrite, ...] = ()
    """Names that are replaced in request bodies, each with its `name` and `targets`. Only then is a body changed."""

    def check(self, path: str, findings: Findings) -> None:
        """Refuse names that are there twice or lead nowhere."""
        seen: set[str] = set()
        for index, rewrite in enumerate(self.rewrites):
            here = child(child(path, "rewrites"), index)
            if rewrite.name in seen:
                findings.add(child(here, "name"), "is there twice", rewrite.name, "keep one entry, with all targets")
            seen.add(rewrite.name)
            if not rewrite.targets:
                findings.add(child(here, "targets"), "is empty", remedy="add a model, or remove the entry")


class Rewritten(NamedTuple):
    """A request that goes to another model than it asks for."""

    name: str
    target: str


class Rewrites:
    """Chooses targets by their weights."""

    def __init__(self, settings: ModelSettings) -> None:
        self._targets: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
            rewrite.name: (
                tuple(target.model for target in rewrite.targets),
                tuple(accumulate(target.weight for target in rewrite.targets)),
            )
            for rewrite in settings.rewrites
        }

    def __bool__(self) -> bool:
        return bool(self._targets)

    def target(self, name: str, rng: Rng) -> str | None:
        """The model for a name, by chance if it has several; None to leave the request as it is."""
        known = self._targets.get(name)
        if known is None:
            return None
        models, sums = known
        chosen = models[min(bisect_right(sums, rng.random() * sums[-1]), len(models) - 1)]
        return None if chosen == name else chosen
