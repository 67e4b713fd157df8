"""`token-cost`: what sending this prompt to an endpoint costs, in tokens of prefill; the default policy.

    cost = (queued + uncached * (1 + 2 * in_flight / (mean in_flight + 1) + backlog / 8192) + 200 * in_flight) * slowness
    backlog = mean queued * (in_flight + 1) / (max in_flight + 1)
    slowness = 2/3 * median prefill rate / prefill rate, at least 1 and at most 4

`queued + uncached` is the wait of the prompt itself; what it adds to that of requests that run there grows with their
number; recomputing is dearer while the pool has a backlog, but less so where an endpoint has little of it, so that a burst
with one new prefix leaves nobody idle; and each running request slows down the others. An endpoint that was seen to be
slower than the pool costs so many times more; rates differ by a third for no reason but the prompts that were timed.
Nothing is scraped, and no weight has to be tuned. Source: a study by simulation, docs/simulate.md shows it on this code.
The study takes the mean of the queues for the backlog, and nobody for slow; on this code the share of it is 3 % better
in TTFT p90, and the time that a slow endpoint takes is what keeps its few requests out of the p99.
"""

from __future__ import annotations

from math import inf, isnan
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from picker.core.arrays import Floats, Integers
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng

NAME = "token-cost"

_USUAL = 2 / 3
"""Of the median rate: whoever computes faster than that is not slow."""
_SLOWEST = 4.0
"""Nobody costs more times as much, so that the slow are tried again as soon as the others are busy."""


class TokenCostArgs(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Arguments of `token-cost`. The defaults are right for a wide range of engines and loads."""

    disturbance: Annotated[float, Meta(ge=0)] = 2.0
    """How dear recomputing is where requests run, against the mean of the pool; 0.5 to 4 makes little difference."""
    request_tokens: Annotated[float, Meta(gt=0)] = 200.0
    """What a request in flight costs the others, in tokens; 100 to 800 makes little difference, 0 is fatal."""
    batch_tokens: Annotated[float, Meta(gt=0)] = 8192.0
    """Tokens that an engine computes in one step (vLLM: `max_num_batched_tokens`)."""


class TokenCost(NamedTuple):
    """The formula with its arguments."""

    disturbance: float = 2.0
    request_tokens: float = 200.0
    batch_tokens: float = 8192.0

    def costs(self, uncached: Floats, queued: Floats, in_flight: Integers) -> Floats:
        """Tokens it costs, by candidate; lowest is best."""
        count = len(in_flight)
        mean_in_flight = np.add.reduce(in_flight) / count
        most_in_flight = in_flight.item(in_flight.argmax())
        behind = np.add.reduce(queued) / (count * (most_in_flight + 1.0) * self.batch_tokens)
        costs: Floats = in_flight * (self.disturbance / (mean_in_flight + 1.0) + behind)
        costs += 1.0 + behind
        costs *= uncached
        costs += queued
        costs += in_flight * self.request_tokens
        return costs

    def slowness(self, rates: Floats) -> Floats | None:
        """How many times more each candidate costs because it is slower than the pool; None when none is.

        `rates` are tokens of prefill per second, NaN where nothing was timed.
        """
        ordered = rates.copy()
        ordered.sort()  # NaN last
        slowest = ordered.item(0)
        if isnan(slowest):
            return None
        known = len(ordered) if ordered.item(-1) < inf else int(ordered.searchsorted(inf))
        usual = _USUAL * ordered.item(known // 2)
        if slowest >= usual:
            return None
        slow: Floats = np.fmax(np.minimum(usual / rates, _SLOWEST), 1.0)
        return slow


class TokenCostScorer:
    """Rates the cheapest endpoint 100, and one that costs twice as much 50."""

    name = NAME
    producer: str | None = None

    def __init__(self, args: TokenCostArgs) -> None:
        self.formula = TokenCost(args.disturbance, args.request_tokens, args.batch_tokens)

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats | None:  # noqa: ARG002
        """None without `Candidates.costs`, which a scheduler makes with the formula of this scorer."""
        costs = candidates.costs
        if costs is None:
            return None
        rated: Floats = costs.item(costs.argmin()) / costs
        rated *= 100.0
        return rated
