"""Why a decision ended at its destination, in a sentence for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from picker.core.scheduling.decision import Decision

_PUT_FIRST = {
    "pinned": "The session is pinned to {}.",
    "probe": "{} kept failing or had gone silent; this request tries whether it works again.",
}
"""By `First`."""


def why(decision: Decision) -> str:
    """Say what made the destination win over the next best candidate; empty when the request was refused."""
    if not decision.order:
        return ""
    at = decision.order[0]
    name = decision.endpoints[at].name
    if decision.first is not None:
        return _PUT_FIRST[decision.first].format(name)
    if len(decision.endpoints) == 1:
        return f"{name} is the only candidate."
    totals = decision.totals
    others = np.delete(np.arange(len(totals)), at)
    equals = others[totals[others] == totals[at]]
    if len(equals):
        return (
            f"{_rating(decision, at)} {_among_equals(decision, at, int(decision.in_flight[equals].min()), len(equals))}"
        )
    return f"{_rating(decision, at)} {_lead(decision, at, int(others[totals[others].argmax()]))}"


def _rating(decision: Decision, at: int) -> str:
    name, work = decision.endpoints[at].name, decision.work
    if not decision.plugins:
        return "No plugin rates endpoints."
    if work is None or not _by_cost(decision):
        return f"{name} has {decision.totals[at]:,.6g} of {sum(100 * plugin.weight for plugin in decision.plugins):g} points."
    running = int(decision.in_flight[at])
    return (
        f"{name} costs {decision.costs[at]:,.0f} tokens: it lacks {work.uncached[at]:,.0f} of the prompt's "
        f"{work.prompt:,.0f}, and has {decision.queued[at]:,.0f} queued and {running} request{'s' * (running != 1)} in flight"
        f"{_slow(decision, at)}."
    )


def _slow(decision: Decision, at: int) -> str:
    if decision.slowness is None or decision.slowness[at] <= 1:
        return ""
    return f", {decision.slowness[at]:.2g} times as many because it is slower than others"


def _by_cost(decision: Decision) -> bool:
    """Whether nothing but costs decided."""
    return len(decision.costs) > 0 and len(decision.plugins) == 1


def _among_equals(decision: Decision, at: int, fewest: int, count: int) -> str:
    others = "One other is" if count == 1 else f"{count} others are"
    if decision.in_flight[at] < fewest:
        return f"{others} as good, with more requests in flight."
    return f"{others} as good; chance decided."


def _lead(decision: Decision, at: int, second: int) -> str:
    name = decision.endpoints[second].name
    if _by_cost(decision):
        return f"The next best is {name}, with {decision.costs[second]:,.0f}{_slow(decision, second)}."
    leads = {
        plugin.name: float(plugin.scores[at] - plugin.scores[second]) * plugin.weight
        for plugin in decision.plugins
        if plugin.scores is not None
    }
    best = max(leads, key=leads.__getitem__)
    return f"The next best is {name}, with {decision.totals[second]:,.6g}; what counts most is {best}."
