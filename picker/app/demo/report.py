"""What the demo found out, as numbers, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from rich.table import Table

from picker.app.demo.load import Outcome

LAGGING_SECONDS = 0.05
"""Lateness of the load generator, at its 99th percentile, beyond which its times are not to be trusted."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm. Times are in milliseconds, over answered requests; zero if there are none."""

    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    cached_token_rate: float
    """Share of all prompt tokens that came from a cache, 0..1."""
    requests: int
    errors: int
    requests_per_engine: dict[str, int]
    generator_lateness_p99_ms: float

    @property
    def lagged(self) -> bool:
        """Whether the load generator was too slow for its times to be trusted."""
        return self.generator_lateness_p99_ms > LAGGING_SECONDS * 1000


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of `values` do not exceed; 0 if there are none."""
    if not values:
        return 0.0
    return sorted(values)[max(ceil(len(values) * percent / 100), 1) - 1]


def summarize(outcomes: Sequence[Outcome], engines: Sequence[str]) -> Summary:
    """Sum up one arm. Every one of `engines` is in `requests_per_engine`, asked or not."""
    answered = [outcome for outcome in outcomes if outcome.error is None]
    times = [outcome.first_token * 1000 for outcome in answered]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in answered)
    counts = Counter(outcome.engine for outcome in answered)
    p50, p90, p99 = (round(percentile(times, percent), 1) for percent in (50, 90, 99))
    return Summary(
        ttft_p50_ms=p50,
        ttft_p90_ms=p90,
        ttft_p99_ms=p99,
        cached_token_rate=round(sum(outcome.cached_tokens for outcome in answered) / max(prompt_tokens, 1), 4),
        requests=len(outcomes),
        errors=len(outcomes) - len(answered),
        requests_per_engine={engine: counts[engine] for engine in engines},
        generator_lateness_p99_ms=round(percentile([outcome.lateness * 1000 for outcome in outcomes], 99), 1),
    )


def ratios(round_robin: Summary, picker: Summary) -> dict[str, float]:
    """How many times better the picker is: greater than 1 is better, in every entry."""
    pairs = {
        name: (getattr(round_robin, name), getattr(picker, name))
        for name in ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms")
    }
    pairs["cached_token_rate"] = (picker.cached_token_rate, round_robin.cached_token_rate)
    return {name: round(better / worse, 2) if worse else 0.0 for name, (better, worse) in pairs.items()}


def as_json(round_robin: Summary, picker: Summary, kvcache_aware: Summary | None = None) -> dict[str, Any]:
    """All arms and how many times better those with the picker are, ready for JSON."""
    arms = {"round_robin": round_robin, "picker": picker}
    better: dict[str, Any] = {"times_better": ratios(round_robin, picker)}
    if kvcache_aware is not None:
        arms["kvcache_aware"] = kvcache_aware
        better["kvcache_aware_times_better"] = ratios(round_robin, kvcache_aware)
    return {name: asdict(arm) | {"generator_lagged": arm.lagged} for name, arm in arms.items()} | better


def table(round_robin: Summary, picker: Summary, kvcache_aware: Summary | None = None) -> Table:
    """All arms side by side."""
    arms, names = [round_robin, picker], ["round robin", "picker"]
    if kvcache_aware is not None:
        arms, names = [*arms, kvcache_aware], ["round robin", "prefix-cache", "kvcache-aware"]
    better = [ratios(round_robin, arm) for arm in arms[1:]]
    made = Table(caption="TTFT: time to first token, as the client sees it; more than 1.00× is better")
    for name in ("", *names, *["times better"] * len(better)):
        made.add_column(name, justify="right" if name else "left")

    def row(name: str, cells: Sequence[str], key: str = "") -> None:
        made.add_row(name, *cells, *(_times(one[key]) if key else "" for one in better))

    for name in ("p50", "p90", "p99"):
        key = f"ttft_{name}_ms"
        row(f"TTFT {name}", [f"{getattr(arm, key):,.0f} ms" for arm in arms], key)
    row("prompt tokens from cache", [f"{arm.cached_token_rate:.1%}" for arm in arms], "cached_token_rate")
    made.add_section()
    row("requests", [str(arm.requests) for arm in arms])
    row("errors", [str(arm.errors) for arm in arms])
    for engine in round_robin.requests_per_engine:
        row(f"to {engine}", [str(arm.requests_per_engine[engine]) for arm in arms])
    late = [f"{'too late: ' if arm.lagged else ''}{arm.generator_lateness_p99_ms:.1f} ms" for arm in arms]
    row("load generator late, p99", late)
    return made


def _times(ratio: float) -> str:
    return f"[bold]{ratio:.2f}×[/]"
