"""One decision, complete and immutable: logs, metrics, Explain and the debug page are views of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from picker.core.arrays import Floats, Integers, Slots
from picker.core.endpoints import Endpoint
from picker.core.scheduling.api import Match, MatchInfo, Request, Work
from picker.core.scheduling.explanation import why

_NONE = np.zeros(0)


class Reason(StrEnum):
    """How a decision ended."""

    ROUTED = "routed"
    NO_ENDPOINTS = "no_endpoints"
    NONE_IN_SUBSET = "none_in_subset"
    FILTERED_OUT = "filtered_out"
    SATURATED = "saturated"
    """The pool is full, and the request was not to wait, or waited too long."""
    NO_DECODE_ENDPOINT = "no_decode_endpoint"
    """Every endpoint only computes prompts."""


class First(StrEnum):
    """Why the destination is another than the one with the highest total."""

    PINNED = "pinned"
    """The client's session is pinned to it."""
    PROBE = "probe"
    """An endpoint that kept failing is tried again."""


class PrefillPlace(StrEnum):
    """Where a prompt is computed, if some endpoints are there for nothing else."""

    APART = "apart"
    FEW_TOKENS = "few_tokens"
    """On the decode endpoint, since little of it is not cached there."""
    NO_ENDPOINT = "no_endpoint"
    """On the decode endpoint, since no prefill endpoint could be used."""


class PluginScores(Struct, frozen=True, gc=False):
    """What one scorer said; `scores` is None when it had no opinion."""

    name: str
    weight: float
    scores: Floats | None
    match: MatchInfo | None


class Steps(NamedTuple):
    """Nanoseconds each step of a decision took."""

    parse: int
    prepare: int
    """Waiting for what producers need to know; others are decided on meanwhile."""
    filter: int
    match: int
    score: int
    pick: int


class Sent(NamedTuple):
    """What is remembered of a routed request until it is over: nothing that grows with its prompt."""

    request_id: str
    path: str
    model: str
    destinations: tuple[str, ...]


class Decision(Struct, frozen=True):
    """Everything about one choice.

    Arrays are by candidate, in the order of `slots` and `endpoints`. `order` lists the positions of the destination
    and its fallbacks; it is empty when the request is refused.
    """

    request: Request
    reason: Reason
    slots: Slots
    endpoints: tuple[Endpoint, ...]
    in_flight: Integers
    totals: Floats
    plugins: tuple[PluginScores, ...]
    order: tuple[int, ...]
    filters: tuple[tuple[str, int], ...]
    matches: dict[str, Match]
    steps: Steps
    work: Work | None = None
    queued: Floats = _NONE
    """Uncached tokens sent to each candidate before, whose prefill is not over; there when `work` is."""
    prefill_rate: Floats = _NONE
    """Tokens per second that each candidate was seen to compute, NaN when it was not; there when `work` is."""
    costs: Floats = _NONE
    """What sending the prompt to each candidate costs, in tokens; there when a scorer has a formula for it."""
    slowness: Floats | None = None
    """How many times more each candidate costs because it is slower than the pool; None when none is."""
    first: First | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    """Request headers that tell the destination what was decided for it."""
    prefill_place: PrefillPlace | None = None
    prefill: Decision | None = None
    """The choice of the prefill endpoint, when the prompt is computed apart."""

    @property
    def destinations(self) -> tuple[str, ...]:
        """Addresses, the destination first, then the fallbacks."""
        endpoints = self.endpoints
        return tuple([endpoints[position].address for position in self.order])

    @property
    def sent(self) -> Sent:
        """What to remember of it when the request goes out."""
        request = self.request
        return Sent(request.request_id, request.path, request.prompt.model, self.destinations)

    @property
    def slot(self) -> int:
        """The slot of the destination."""
        return int(self.slots[self.order[0]])

    @property
    def tokens(self) -> float:
        """Prompt tokens that the destination has to compute; 0 when nobody counts them."""
        return 0.0 if self.work is None else float(self.work.uncached[self.order[0]])

    def view(self) -> dict[str, Any]:
        """The decision as plain values, every candidate best first."""
        ranks = {position: rank for rank, position in enumerate(self.order, 1)}
        rest = sorted(
            set(range(len(self.endpoints))) - set(ranks),
            key=lambda position: (-self.totals[position], self.in_flight[position], position),
        )
        return {
            "request_id": self.request.request_id,
            "path": self.request.path,
            "model": self.request.prompt.model,
            "reason": str(self.reason),
            "prompt_unused": str(self.request.prompt.unused or ""),
            "prompt_tokens": 0.0 if self.work is None else self.work.prompt,
            "tokens_from": "" if self.work is None else self.work.source,
            "first": str(self.first or ""),
            "prefill_place": str(self.prefill_place or ""),
            "prefill_destination": "" if self.prefill is None else self.prefill.destinations[0],
            "why": why(self),
            "destinations": list(self.destinations),
            "filters": [{"filter": name, "remaining": remaining} for name, remaining in self.filters],
            "step_microseconds": {name: value / 1000 for name, value in self.steps._asdict().items()},
            "endpoints": [self._endpoint(position, rank) for rank, position in enumerate((*self.order, *rest), 1)],
        }

    def _endpoint(self, position: int, rank: int) -> dict[str, Any]:
        endpoint = self.endpoints[position]
        cost = float(self.costs[position]) if len(self.costs) else 0.0
        rate = float(self.prefill_rate[position]) if len(self.costs) else 0.0
        if self.slowness is not None:
            rate *= float(self.slowness[position])  # costs are in tokens of a pool that is not slow
        return {
            "name": endpoint.name,
            "namespace": endpoint.namespace,
            "address": endpoint.address,
            "rank": rank,
            "total": float(self.totals[position]),
            "in_flight": int(self.in_flight[position]),
            "uncached_tokens": 0.0 if self.work is None else float(self.work.uncached[position]),
            "queued_tokens": 0.0 if self.work is None else float(self.queued[position]),
            "cost_tokens": cost,
            "cost_milliseconds": cost / rate * 1000 if rate > 0 else 0.0,
            "plugins": [
                {
                    "plugin": plugin.name,
                    "weight": plugin.weight,
                    "score": 0.0 if plugin.scores is None else float(plugin.scores[position]),
                    "matched": 0 if plugin.match is None else int(plugin.match.matched[position]),
                    "total": 0 if plugin.match is None else plugin.match.total,
                    "unit": "" if plugin.match is None else plugin.match.unit,
                }
                for plugin in self.plugins
            ],
        }
