"""Rows as one page of HTML that needs nothing else: tables and charts, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from picker.simulate import report
from picker.simulate.families import FAMILIES
from picker.simulate.plot import Axis, Line, chart, line_class
from picker.simulate.report import Row
from picker.simulate.tables import seconds

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #656d76; --paper: #ffffff; --rule: #d8dee4; --good: #1a7f37;
  --c0: #0072b2; --c1: #d55e00; --c2: #00835f; --c3: #b0538b; --c4: #9a6700; --c5: #2f8fc4; --c6: #6b4c9a; --c7: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117; --rule: #30363d;
  --good: #3fb950; --c0: #4aa3df; --c1: #ff8a4c; --c2: #2fc49a; --c3: #e59bc6; --c4: #f0b840; --c5: #8ccbf2;
  --c6: #a98bdb; --c7: #b1bac4; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 76rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, figcaption { color: var(--faint); } figure { margin: 0; flex: 0 1 35rem; min-width: 0; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem 2rem; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .best { color: var(--good); font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--faint); } svg .label { fill: var(--ink); }
.grid { stroke: var(--rule); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } circle.line { fill: var(--paper); }
.dashed { stroke-dasharray: 6 4; } .key { width: 1.75rem; height: .75rem; vertical-align: middle; margin-right: .4rem; }
""" + "\n".join(f".l{number} {{ stroke: var(--c{number}); }}" for number in range(8))

_TTFT = "Time to first token"
_TIME = Axis(_TTFT, lambda value: f"{value * 1000:g}ms" if value < 1 else f"{value:,.0f}s", logarithmic=True)
_PERCENT = Axis("Percentile of requests", lambda value: f"{value:.0f}")
_LOAD = Axis("Load, % of capacity", lambda value: f"{value:.0f}")
_HITS = Axis("Prompt tokens from cache", lambda value: f"{value:.0%}")


def page(rows: Sequence[Row], *, engines: int) -> str:
    """The whole page as text. The same rows give the same page."""
    numbers = {profile: number for number, profile in enumerate(dict.fromkeys(row.profile for row in rows))}
    seeds = sorted({row.seed for row in rows})
    requests = sum(row.requests for row in rows)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>picker simulate</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>Routing policies side by side</h1>",
        (
            f"<p>{engines} simulated engines, seeds {', '.join(map(str, seeds))}, {requests:,} measured requests, replayed "
            "in simulated time through the picker's own scheduler. Times over several seeds are geometric means.</p>"
        ),
    ]
    grouped = report.cells(rows)
    if len(grouped) > 1 and len(numbers) > 1:
        parts += ["<h2>All cells</h2>", _standings(rows, numbers)]
    for workload in dict.fromkeys(row.workload for row in rows):
        mine = [row for row in rows if row.workload == workload]
        family = FAMILIES.get(workload)
        parts.append(f"<h2>{escape(workload)}</h2>" + (f"<p>{escape(family.summary)}</p>" if family else ""))
        parts.append(_by_load(workload, mine, numbers))
        for cell, by_profile in report.cells(mine).items():
            parts += [f"<h3>{escape(cell)}</h3>", '<div class="charts">', _curve(cell, by_profile, numbers)]
            parts += [_cell(by_profile, numbers), "</div>"]
    parts.append("</body></html>")
    return "\n".join(parts)


def _by_load(workload: str, rows: Sequence[Row], numbers: dict[str, int]) -> str:
    """Charts over load; empty for a workload at one load."""
    loads = sorted({row.load for row in rows if row.load is not None})
    if len(loads) < 2:
        return ""

    def lines(value: Callable[[Sequence[Row]], float]) -> list[Line]:
        found = []
        for profile, number in numbers.items():
            at = {load: [row for row in rows if row.profile == profile and row.load == load] for load in loads}
            found.append(Line(profile, number, [(load * 100, value(some)) for load, some in at.items() if some]))
        return found

    p90 = chart(
        f"{workload}: {_TTFT}, p90, by load", _LOAD, _TIME, lines(lambda some: report.typical(some, "ttft_p90"))
    )
    hits = chart(
        f"{workload}: prompt tokens from cache by load", _LOAD, _HITS, lines(lambda some: _mean(some, "hit_rate"))
    )
    return (
        f'<div class="charts"><figure>{p90}<figcaption>{_TTFT}, 90th percentile. {_legend(numbers)}</figcaption></figure>'
        f"<figure>{hits}<figcaption>Prompt tokens that came from a cache.</figcaption></figure></div>"
    )


def _curve(cell: str, by_profile: dict[str, list[Row]], numbers: dict[str, int]) -> str:
    lines = []
    for profile, rows in by_profile.items():
        typical = [report.geometric_mean(times) for times in zip(*(row.curve for row in rows), strict=True)]
        lines.append(Line(profile, numbers[profile], list(zip(map(float, report.CURVE), typical, strict=True))))
    drawn = chart(f"{cell}: {_TTFT} by percentile", _PERCENT, _TIME, lines)
    return (
        f"<figure>{drawn}<figcaption>So many per cent of requests had their first token by then.</figcaption></figure>"
    )


def _cell(by_profile: dict[str, list[Row]], numbers: dict[str, int]) -> str:
    heads = ("profile", "TTFT p50", "p90", "p99", "latency", "cached", "spread", "shed", "hung")
    best = min(report.typical(rows, "ttft_p90") for rows in by_profile.values())
    body = []
    for profile, rows in by_profile.items():
        times = [report.typical(rows, name) for name in ("ttft_p50", "ttft_p90", "ttft_p99", "latency_mean")]
        cells = [f"<td>{_key(numbers[profile])}{escape(profile)}</td>"]
        cells += [f"<td{_best(at == 1 and value == best)}>{seconds(value)}</td>" for at, value in enumerate(times)]
        cells.append(f"<td>{_mean(rows, 'hit_rate'):.1%}</td><td>{_mean(rows, 'spread'):.2f}</td>")
        cells.append(f"<td>{_mean(rows, 'shed_rate'):.1%}</td><td>{sum(row.unanswered for row in rows):,}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return _table(heads, body)


def _standings(rows: Sequence[Row], numbers: dict[str, int]) -> str:
    heads = (
        "profile",
        "TTFT p90",
        "worst",
        "in",
        f"over {report.BEYOND}",
        "p50",
        "p99",
        "latency",
        "cached",
        "spread",
    )
    body = [
        f"<tr><td>{_key(numbers[one.profile])}{escape(one.profile)}</td><td><b>{one.mean:.3f}</b></td>"
        f"<td>{one.worst:.2f}</td><td>{escape(one.worst_cell)}</td><td>{one.beyond} of {one.cells}</td>"
        f"<td>{one.ttft_p50_mean:.2f}</td><td>{one.ttft_p99_mean:.2f}</td><td>{one.latency_mean:.2f}</td>"
        f"<td>{one.hit_rate:.1%}</td><td>{one.spread:.2f}</td></tr>"
        for one in report.standings(rows)
    ]
    said = "<p>Geometric means, over cells, of the ratio to the best profile of each cell; 1 is the best there was.</p>"
    return said + _table(heads, body)


def _table(heads: Iterable[str], body: Iterable[str]) -> str:
    head = "".join(f"<th>{head}</th>" for head in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _legend(numbers: dict[str, int]) -> str:
    return " ".join(f"<span>{_key(number)}{escape(profile)}</span>" for profile, number in numbers.items())


def _key(number: int) -> str:
    return f'<svg class="key" viewBox="0 0 28 12" aria-hidden="true"><path class="{line_class(number)}" d="M0 6H28"/></svg>'


def _best(yes: bool) -> str:
    return ' class="best"' if yes else ""


def _mean(rows: Sequence[Row], name: str) -> float:
    values: list[float] = [getattr(row, name) for row in rows]
    return sum(values) / len(values)
