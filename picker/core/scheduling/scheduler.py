"""The decision: filter, match, score, pick. Pure and without side effects, so that Explain can use it as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, cast

import numpy as np

from picker.core.arrays import Flags, Floats, Integers, Slots
from picker.core.endpoint_table import EndpointTable
from picker.core.scheduling.api import (
    Candidates,
    Costing,
    Filter,
    Match,
    MatchFilter,
    MatchInfo,
    Prober,
    Producer,
    Remembering,
    Request,
    Rng,
    Scorer,
    Timer,
    Work,
    sample,
)
from picker.core.scheduling.decision import Decision, First, PluginScores, Reason, Steps

_NOTHING = np.zeros(0)
_FEW = 32
"""So many candidates are ranked one by one."""


class Asked(NamedTuple):
    """What a decision is asked for: a request, and how many fallbacks. `reason` says why not, if it is over already."""

    request: Request
    reason: Reason
    began: int
    fallbacks: int
    rng: Rng
    timer: Timer
    pinned: int | None


class Matched(NamedTuple):
    """What producers said of the prompt, by candidate of `candidates`."""

    candidates: Candidates
    matches: dict[str, Match]
    infos: Mapping[str, MatchInfo]

    def among(self, candidates: Candidates) -> Mapping[str, MatchInfo]:
        """The same by candidate of some of them."""
        mine = self.candidates.slots
        if candidates.slots is mine or not self.infos:
            return self.infos
        at = mine.searchsorted(candidates.slots)
        return {name: info._replace(matched=info.matched[at]) for name, info in self.infos.items()}

    def best(self, candidates: Candidates, producer: str | None) -> MatchInfo | None:
        """What a producer said of some of them, or the first that said something."""
        infos = self.among(candidates)
        return next(iter(infos.values()), None) if producer is None else infos.get(producer)


class Disaggregation(Protocol):
    """Decides where prefill and decode happen, with the plugins of a scheduler."""

    def decide(self, scheduler: Scheduler, asked: Asked, candidates: Candidates) -> Decision: ...

    def pools(self, table: EndpointTable) -> tuple[Slots, ...]:
        """The endpoints of each part of the work, where they differ; a request may need one of each."""
        ...


_ROUTED: Final = Reason.ROUTED
"""Looked up once: members of enumerations take longer than a call in Python 3.11."""


class Scheduler:
    """Filters, producers and weighted scorers, in the order they run. Replaced whole when the configuration changes."""

    def __init__(
        self,
        filters: Sequence[Filter | MatchFilter],
        producers: Sequence[Producer],
        scorers: Sequence[tuple[Scorer, float]],
        *,
        counts_work: bool = False,
        disaggregation: Disaggregation | None = None,
    ) -> None:
        """Make a scheduler. `producers` come best first: `Work` is by the first that matched, if it `counts_work`."""
        self.filters = tuple(plugin for plugin in filters if not hasattr(plugin, "keep_matched"))
        self._late_filters = tuple(cast("MatchFilter", plugin) for plugin in filters if hasattr(plugin, "keep_matched"))
        self.producers = tuple(producers)
        self.scorers = tuple(scorers)
        self.counts_work = counts_work
        self.disaggregation = disaggregation
        self._by_cost = next((scorer for scorer, _ in scorers if hasattr(scorer, "formula")), None)
        """The scorer that goes by costs, and so by the match that the work was counted by."""
        self._costing: Costing | None = getattr(self._by_cost, "formula", None)
        self._remembering = tuple(cast("Remembering", scorer) for scorer, _ in scorers if hasattr(scorer, "routed"))
        self._probers = tuple(cast("Prober", plugin) for plugin in filters if hasattr(plugin, "probe"))

    def decide(
        self,
        request: Request,
        table: EndpointTable,
        *,
        subset: Sequence[str] | None,
        fallbacks: int,
        rng: Rng,
        timer: Timer,
        pinned: int | None = None,
    ) -> Decision:
        """Choose a destination and up to `fallbacks` further endpoints.

        `subset` limits the candidates to these addresses; an entry without a port means all ports of that host.
        `pinned` is a slot that is the destination, whatever the scores say, provided that the filters keep it.
        """
        began = timer()
        candidates = Candidates(table, table.slots, table.mask)
        reason = _ROUTED if len(table.slots) else Reason.NO_ENDPOINTS
        if subset is not None and reason is _ROUTED:
            candidates = narrow(candidates, _in_subset(candidates, subset))
            if not len(candidates.slots):
                reason = Reason.NONE_IN_SUBSET
        asked = Asked(request, reason, began, fallbacks, rng, timer, pinned)
        if self.disaggregation is not None and reason is _ROUTED:
            return self.disaggregation.decide(self, asked, candidates)
        return self.choose(asked, candidates)

    def match(self, request: Request, candidates: Candidates, rng: Rng) -> Matched:
        """Ask every producer who holds what of the prompt, once for a request."""
        matches: dict[str, Match] = {}
        for producer in self.producers:
            match = producer.match(request, candidates, rng)
            if match is not None:
                matches[producer.name] = match
        return Matched(candidates, matches, {name: match.info for name, match in matches.items()})

    def choose(self, asked: Asked, candidates: Candidates, matched: Matched | None = None) -> Decision:
        """Filter, score and pick among these candidates; `matched` are all producers' matches if they are known."""
        request, reason, began, fallbacks, rng, timer, pinned = asked
        table = candidates.table
        ran: list[tuple[str, int]] = []
        if reason is _ROUTED:
            for plugin in self.filters:
                keep = plugin.keep(request, candidates)
                if keep is not None:
                    candidates = narrow(candidates, keep)
                ran.append((plugin.name, len(candidates.slots)))
            if not len(candidates.slots):
                reason = Reason.FILTERED_OUT
        filtered = done_matching = scored = timer()
        infos: Mapping[str, MatchInfo] = {}
        plugins: list[PluginScores] = []
        totals: Floats = _NOTHING
        order: tuple[int, ...] = ()
        work: Work | None = None
        queued = rates = costs = _NOTHING
        slowness: Floats | None = None
        first: First | None = None
        if reason is _ROUTED:
            matched = self.match(request, candidates, rng) if matched is None else matched
            for late in self._late_filters:
                keep = late.keep_matched(request, candidates, matched.best(candidates, late.producer), rng)
                if keep is not None and keep.any():
                    candidates = narrow(candidates, keep)
                ran.append((late.name, len(candidates.slots)))
            infos = matched.among(candidates)
            if self.counts_work:
                work = _work(request, len(candidates.slots), infos)
                queued = table.queued_tokens.take(candidates.slots)
                rates = table.prefill_rate.take(candidates.slots)
            done_matching = timer()
        slots = candidates.slots
        in_flight: Integers = table.in_flight.take(slots)
        if reason is _ROUTED:
            if work is not None:
                if self._costing is not None:
                    costs = self._costing.costs(work.uncached, queued, in_flight)
                    if (slowness := self._costing.slowness(rates)) is not None:
                        costs = costs * slowness
                candidates = Candidates(table, slots, candidates.mask, work, costs if len(costs) else None)
            for scorer, weight in self.scorers:
                producer = scorer.producer or (work.source if work is not None and scorer is self._by_cost else "")
                info = infos.get(producer) if producer else None
                scores = scorer.score(request, candidates, info, rng)
                if scores is not None:
                    weighted = scores if weight == 1 else scores * weight
                    totals = totals + weighted if len(totals) else weighted
                plugins.append(PluginScores(scorer.name, weight, scores, info))
            if not len(totals):
                totals = np.zeros(len(slots))
            scored = timer()
            order = pick(totals, in_flight, fallbacks + 1, rng)
            if pinned is not None and candidates.mask >> pinned & 1:
                first, order = First.PINNED, _ahead(order, slots, pinned)
            elif (probed := self._probe(request, candidates)) is not None:
                first, order = First.PROBE, _ahead(order, slots, probed)
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
            matches={} if matched is None else matched.matches,
            steps=Steps(
                request.parsed - request.started,
                began - request.parsed,
                filtered - began,
                done_matching - filtered,
                scored - done_matching,
                done - scored,
            ),
            work=work,
            queued=queued,
            prefill_rate=rates,
            costs=costs,
            slowness=slowness,
            first=first,
        )

    def routed(self, decision: Decision) -> None:
        """Tell scorers that go by it where a request goes."""
        if decision.work is not None:
            for scorer in self._remembering:
                scorer.routed(decision.destinations[0], decision.work)

    def _probe(self, request: Request, candidates: Candidates) -> int | None:
        for prober in self._probers:
            if (slot := prober.probe(request, candidates)) is not None:
                return slot
        return None


def _work(request: Request, candidates: int, infos: Mapping[str, MatchInfo]) -> Work:
    """What the best producer that matched says the prompt costs; by its length where none did."""
    for name, (matched, total, _, tokens_per_unit, prompt_tokens) in infos.items():
        prompt = prompt_tokens or total * tokens_per_unit
        uncached = prompt - matched * tokens_per_unit
        return Work(prompt, np.maximum(uncached, 1.0, out=uncached), name)
    prompt = max(request.body_bytes / request.bytes_per_token, 1.0)
    return Work(prompt, np.full(candidates, prompt), "length")


def _ahead(order: tuple[int, ...], slots: Slots, slot: int) -> tuple[int, ...]:
    """The order with a slot's position before the others, and as long as it was."""
    position = int(slots.searchsorted(slot))
    return (position, *[other for other in order if other != position][: len(order) - 1])


def pick(totals: Floats, in_flight: Integers, count: int, rng: Rng) -> tuple[int, ...]:
    """The positions of the `count` best: highest total, then fewest in flight, then by chance."""
    points, flights, random = totals.tolist(), in_flight.tolist(), rng.random
    positions = range(len(points)) if len(points) <= _FEW else _contenders(totals, in_flight, count, rng)
    ranks = [(-points[position], flights[position], random(), position) for position in positions]
    ranks.sort()
    return tuple([rank[3] for rank in ranks[:count]])


def _contenders(totals: Floats, in_flight: Integers, count: int, rng: Rng) -> list[int]:
    """The positions that can be among the `count` best of many: few, so that ranking them is cheap."""
    count = min(count, len(totals))
    last = np.partition(totals, -count)[-count]
    better, equal = np.flatnonzero(totals > last), np.flatnonzero(totals == last)
    missing = count - len(better)
    flights = in_flight.take(equal)
    most = np.partition(flights, missing - 1)[missing - 1]
    emptier, rest = equal[flights < most], equal[flights == most]
    return [*better.tolist(), *emptier.tolist(), *sample(rest.tolist(), missing - len(emptier), rng)]


def narrow(candidates: Candidates, keep: Flags) -> Candidates:
    """The candidates for which `keep` is true."""
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
