"""Rows as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:,.0f} s"


def _cell(cell: str, by_profile: dict[str, list[Row]]) -> Table:
    seeds = max(map(len, by_profile.values()))
    table = Table(
        title=cell, title_justify="left", caption=f"times over {seeds} seeds: geometric means" if seeds > 1 else None
    )
    table.add_column("profile")
    columns = (
        "TTFT p50", "p90", "p99", "latency", "from cache", "computed", "spread", "shed", "unanswered", "requests",
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right")
    best = min(report.typical(rows, "ttft_p90") for rows in by_profile.values())
    for profile, rows in by_profile.items():
        times = [report.typical(rows, name) for name in ("ttft_p50", "ttft_p90", "ttft_p99", "latency_mean")]
        cells = [seconds(value) for value in times]
        if times[1] == best and len(by_profile) > 1:
            cells[1] = f"[bold green]{cells[1]}[/]"
        table.add_row(
            profile,
            *cells,
            f"{_mean(row.hit_rate for row in rows):.1%}",
            f"{sum(row.computed_tokens for row in rows):,}",
            f"{_mean(row.spread for row in rows):.2f}",
            f"{_mean(row.shed_rate for row in rows):.1%}",
            f"{sum(row.unanswered for row in rows):,}",
            f"{sum(row.requests for row in rows):,}",
        )
    return table


def _standings(rows: Sequence[Row]) -> Table:
    table = Table(
        title="All cells: ratio to the best profile of each",
        title_justify="left",
        caption="geometric means of ratios; 1.00 is the best there was",
    )
    table.add_column("profile")
    names = ("TTFT p90", "worst", "in", f"> {report.BEYOND}", "p50", "p99", "latency", "from cache", "spread")
    for name in names:
        table.add_column(name, justify="left" if name == "in" else "right")
    for one in report.standings(rows):
        table.add_row(
            one.profile,
            f"[bold]{one.mean:.3f}[/]",
            f"{one.worst:.2f}",
            one.worst_cell,
            f"{one.beyond} of {one.cells}",
            f"{one.ttft_p50_mean:.2f}",
            f"{one.ttft_p99_mean:.2f}",
            f"{one.latency_mean:.2f}",
            f"{one.hit_rate:.1%}",
            f"{one.spread:.2f}",
        )
    return table


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
