"""Rows as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from picker.simulate import report
from picker.simulate.report import Row


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each cell, and how profiles stand over all cells if there are several of both."""
    grouped = report.cells(rows)
    for cell, by_profile in grouped.items():
        yield _cell(cell, by_profile)
    if len(grouped) > 1 and len({row.profile for row in rows}) > 1:
        yield _standings(rows)


def seconds(value: float) -> str:
    """A time for people: three digits that matter, at most."""
    if value == float("inf"):
        return "never"
    return f"{value * 1000:.0f}ms" if value < 1 else f"{value:.2f}s" if value < 10 else f"{value:,.0f}s"


def _cell(cell: str, by_profile: dict[str, list[Row]]) -> Table:
    any_of = next(iter(by_profile.values()))
    many = f", {len(any_of)} seeds: geometric means of times" if len(any_of) > 1 else ""
    table = _table(f"{cell}, {sum(row.requests for row in any_of):,} requests{many}", _HEADS)
    every = [row for rows in by_profile.values() for row in rows]
    shed, hung = any(row.shed_rate for row in every), any(row.unanswered for row in every)
    for head in ("shed",) * shed + ("hung",) * hung:
        table.add_column(head, justify="right")
    best = min(report.typical(rows, "ttft_p90") for rows in by_profile.values())
    for profile, rows in by_profile.items():
        times = [report.typical(rows, name) for name in ("ttft_p50", "ttft_p90", "ttft_p99", "latency_mean")]
        cells = [seconds(value) for value in times]
        if times[1] == best and len(by_profile) > 1:
            cells[1] = f"[bold green]{cells[1]}[/]"
        cells += [
            f"{_mean(row.hit_rate for row in rows):.1%}",
            f"{sum(row.computed_tokens for row in rows) / 1e6:,.2f}M",
            f"{_mean(row.spread for row in rows):.2f}",
        ]
        if shed:
            cells.append(f"{_mean(row.shed_rate for row in rows):.1%}")
        if hung:
            cells.append(f"{sum(row.unanswered for row in rows):,}")
        table.add_row(escape(profile), *cells)
    return table


_HEADS = ("TTFT p50", "p90", "p99", "latency", "cached", "computed", "spread")
_TIGHT: Any = {"pad_edge": False, "collapse_padding": True, "show_edge": False}
"""So that tables fit into 80 columns."""


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, **_TIGHT)
    table.add_column("profile", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=head == "in")
    return table


def _standings(rows: Sequence[Row]) -> Table:
    heads = ("TTFT p90", "worst", "in", "p50", "p99", "latency", "cached")
    table = _table("All cells: ratios to the best profile of each, geometric means", heads)
    for one in report.standings(rows):
        table.add_row(
            escape(one.profile),
            f"[bold]{one.mean:.3f}[/]",
            f"{one.worst:.2f}",
            one.worst_cell,
            f"{one.ttft_p50_mean:.2f}",
            f"{one.ttft_p99_mean:.2f}",
            f"{one.latency_mean:.2f}",
            f"{one.hit_rate:.1%}",
        )
    return table


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
