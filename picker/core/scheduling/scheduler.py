"""The decision: filter, match, score, pick. Pure and without side effects, so that Explain can use it as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from picker.core.endpoints import EndpointTable, Flags, Floats, Integers
from picker.core.scheduling.api import Candidates, Filter, Match, Producer, Request, Rng, Scorer, Timer, sample
from picker.core.scheduling.decision import Decision, PluginScores, Reason, Steps

_NOTHING = np.zeros(0)


class Scheduler:
    """Filters, producers and weighted scorers, in the order they run. Replaced whole when the configuration changes."""

    def __init__(
        self,
        filters: Sequence[Filter],
        producers: Sequence[Producer],
        scorers: Sequence[tuple[Scorer, float]],
    ) -> None:
        self.filters = tuple(filters)
        self.producers = tuple(producers)
        self.scorers = tuple(scorers)

    def decide(
        self,
        request: Request,
        table: EndpointTable,
        *,
        subset: Sequence[str] | None,
        fallbacks: int,
        rng: Rng,
        timer: Timer,
    ) -> Decision:
        """Choose a destination and up to `fallbacks` further endpoints.

        `subset` limits the candidates to these addresses; an entry without a port means all ports of that host.
        """
        began = timer()
        candidates = Candidates(table, table.slots, table.mask)
        reason = Reason.ROUTED if len(table.slots) else Reason.NO_ENDPOINTS
        if subset is not None and reason is Reason.ROUTED:
            candidates = _narrow(candidates, _in_subset(candidates, subset))
            if not len(candidates.slots):
                reason = Reason.NONE_IN_SUBSET
        ran: list[tuple[str, int]] = []
        if reason is Reason.ROUTED:
            for plugin in self.filters:
                keep = plugin.keep(request, candidates)
                if keep is not None:
                    candidates = _narrow(candidates, keep)
                ran.append((plugin.name, len(candidates.slots)))
            if not len(candidates.slots):
                reason = Reason.FILTERED_OUT
        slots = candidates.slots
        filtered = matched = scored = timer()
        matches: dict[str, Match] = {}
        plugins: list[PluginScores] = []
        totals: Floats = _NOTHING
        order: tuple[int, ...] = ()
        in_flight: Integers = table.in_flight.take(slots)
        if reason is Reason.ROUTED:
            for producer in self.producers:
                match = producer.match(request, candidates, rng)
                if match is not None:
                    matches[producer.name] = match
            matched = timer()
            for scorer, weight in self.scorers:
                held = matches.get(scorer.producer) if scorer.producer else None
                info = held.info if held else None
                scores = scorer.score(request, candidates, info, rng)
                if scores is not None:
                    weighted = scores if weight == 1 else scores * weight
                    totals = totals + weighted if len(totals) else weighted
                plugins.append(PluginScores(scorer.name, weight, scores, info))
            if not len(totals):
                totals = np.zeros(len(slots))
            scored = timer()
            order = pick(totals, in_flight, fallbacks + 1, rng)
        done = timer()
        return Decision(
            request=request,
            reason=reason,
            slots=slots,
            endpoints=table.all if slots is table.slots else tuple(map(table.endpoints.__getitem__, slots.tolist())),
            in_flight=in_flight,
            totals=totals,
            plugins=tuple(plugins),
            order=order,
            filters=tuple(ran),
            matches=matches,
            steps=Steps(
                request.parsed - request.started,
                began - request.parsed,
                filtered - began,
                matched - filtered,
                scored - matched,
                done - scored,
            ),
        )


def pick(totals: Floats, in_flight: Integers, count: int, rng: Rng) -> tuple[int, ...]:
    """The positions of the `count` best: highest total, then fewest in flight, then by chance."""
    left = totals.copy()
    chosen: list[int] = []
    missing = min(count, len(left))
    while missing > 0:
        best = (left == left.item(left.argmax())).nonzero()[0]
        if len(best) > 1:
            flights = in_flight[best]
            best = best[flights == flights.item(flights.argmin())]
        equal = best.tolist()
        if len(equal) > 1:
            equal = sample(equal, min(missing, len(equal)), rng)
        chosen += equal
        missing -= len(equal)
        if missing:
            left[best] = -np.inf
    return tuple(chosen)


def _narrow(candidates: Candidates, keep: Flags) -> Candidates:
    if keep.all():
        return candidates
    slots = candidates.slots[keep]
    flags = np.zeros(len(candidates.table.endpoints), np.bool_)
    flags[slots] = True
    mask = int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
    return Candidates(candidates.table, slots, mask)


def _in_subset(candidates: Candidates, subset: Sequence[str]) -> Flags:
    table = candidates.table
    flags = np.zeros(len(table.endpoints), np.bool_)
    flags[[slot for place in subset for slot in table.slots_at(place)]] = True
    return flags[candidates.slots]
