"""What runs say, as numbers: one row for each run, and profiles against the best of each cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, exp, log
from typing import Any

import msgspec
from msgspec import Struct

from picker.simulate.replay import Run

CURVE = (*range(0, 100, 2), 99, 100)
"""Percentiles of the curve of times to first token."""


class Row(Struct, frozen=True):
    """One run in numbers. Times are in seconds, over the answered calls that were due in the measured time.

    Rates are shares, 0..1. A percentile is the smallest time that so many per cent of the answered calls do not exceed,
    and infinite where none was answered.
    """

    workload: str
    load: float | None
    """Share of the capacity; None for traces."""
    seed: int
    profile: str
    requests: int
    """Calls due in the measured time."""
    unanswered: int
    """Of these, those that an engine never answered."""
    refused: dict[str, int]
    """Of these, those that no engine got, by reason."""
    shed_rate: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    latency_mean: float
    latency_p90: float
    hit_rate: float
    """Share of prompt tokens that came from a cache."""
    computed_tokens: int
    """Prompt tokens that did not."""
    spread: float
    """Mean coefficient of variation, over engines, of the requests in each."""
    idle_while_queued: float
    """Seconds in which an engine had nothing to do while another had two or more requests waiting."""
    shares: tuple[float, ...]
    """Of the calls that engines got, by engine."""
    curve: tuple[float, ...]
    """Time to first token at each percentile of `CURVE`."""


def row(run: Run, *, load: float | None, seed: int, profile: str) -> Row:
    """Sum up a run."""
    sent = run.measured()
    answered = [one for one in sent if one.answered]
    times = sorted(one.first - one.due for one in answered)
    latencies = sorted(one.ended - one.due for one in answered)
    prompt = sum(one.prompt_tokens for one in answered)
    cached = sum(one.cached_tokens for one in answered)
    refused = sum(run.refused.values())
    requests = len(sent) + refused
    by_engine = [0] * run.engines
    for one in sent:
        by_engine[one.engine] += 1
    return Row(
        workload=run.workload.name,
        load=load,
        seed=seed,
        profile=profile,
        requests=requests,
        unanswered=len(sent) - len(answered),
        refused=dict(run.refused),
        shed_rate=refused / max(requests, 1),
        ttft_p50=percentile(times, 50),
        ttft_p90=percentile(times, 90),
        ttft_p99=percentile(times, 99),
        latency_mean=sum(latencies) / len(latencies) if latencies else float("inf"),
        latency_p90=percentile(latencies, 90),
        hit_rate=cached / max(prompt, 1),
        computed_tokens=prompt - cached,
        spread=sum(run.spreads) / len(run.spreads) if run.spreads else 0.0,
        idle_while_queued=run.idle_while_queued,
        shares=tuple(number / max(len(sent), 1) for number in by_engine),
        curve=tuple(percentile(times, percent) for percent in CURVE),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of the ordered values that at least `percent` % of them do not exceed; infinite if there are none."""
    if not ordered:
        return float("inf")
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]


class Standing(Struct, frozen=True):
    """A profile against the best of each cell, a cell being a workload at a load: ratios, 1 is the best there was."""

    profile: str
    mean: float
    """Geometric mean over cells."""
    worst: float
    worst_cell: str
    beyond: int
    """Cells where it is more than `BEYOND` times the best."""
    cells: int
    ttft_p50_mean: float
    ttft_p99_mean: float
    latency_mean: float
    hit_rate: float
    spread: float


BEYOND = 1.25
"""A ratio to the best from which a cell counts as lost."""


def cell(workload: str, load: float | None) -> str:
    """The name of a cell: its workload, and its load in per cent."""
    return workload if load is None else f"{workload} at {load:.0%}"


def cells(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows by cell and profile, in the order in which they come."""
    grouped: dict[str, dict[str, list[Row]]] = {}
    for one in rows:
        grouped.setdefault(cell(one.workload, one.load), {}).setdefault(one.profile, []).append(one)
    return grouped


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Compare profiles by the 90th percentile of the time to first token, best first. Of seeds, geometric means count."""
    grouped = cells(rows)
    ratios = {name: _ratios(grouped, name) for name in ("ttft_p90", "ttft_p50", "ttft_p99", "latency_mean")}
    found = []
    for profile in dict.fromkeys(one.profile for one in rows):
        mine = [one for one in rows if one.profile == profile]
        by_cell = ratios["ttft_p90"][profile]
        worst = max(by_cell, key=by_cell.__getitem__)
        means = {name: geometric_mean(ratios[name][profile].values()) for name in ratios}
        found.append(
            Standing(
                profile=profile,
                mean=means["ttft_p90"],
                worst=by_cell[worst],
                worst_cell=worst,
                beyond=sum(ratio > BEYOND for ratio in by_cell.values()),
                cells=len(by_cell),
                ttft_p50_mean=means["ttft_p50"],
                ttft_p99_mean=means["ttft_p99"],
                latency_mean=means["latency_mean"],
                hit_rate=sum(one.hit_rate for one in mine) / len(mine),
                spread=sum(one.spread for one in mine) / len(mine),
            )
        )
    return sorted(found, key=lambda one: one.mean)


def typical(rows: Sequence[Row], name: str) -> float:
    """The geometric mean of a field over rows that differ in their seed."""
    return geometric_mean(getattr(one, name) for one in rows)


def _ratios(grouped: dict[str, dict[str, list[Row]]], name: str) -> dict[str, dict[str, float]]:
    """By profile and cell, the field's mean over seeds against the best profile's in that cell."""
    found: dict[str, dict[str, float]] = {}
    for name_of_cell, by_profile in grouped.items():
        means = {profile: typical(rows, name) for profile, rows in by_profile.items()}
        best = min(means.values())
        for profile, mean in means.items():
            found.setdefault(profile, {})[name_of_cell] = 1.0 if mean == best else mean / best
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """Of times, which are more than nothing, or infinite."""
    logarithms = [log(max(value, 1e-9)) for value in values]
    return exp(sum(logarithms) / len(logarithms))


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything, as plain data; an infinite time is null."""
    plain: dict[str, Any] = msgspec.to_builtins(
        {"curve_percentiles": CURVE, "standings": standings(rows), "runs": rows}
    )
    return plain
