"""What is reported: percentiles against numpy's, standings by hand, JSON and a page that need nothing else."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from io import StringIO

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from picker.simulate import page, report, tables
from picker.simulate.report import CURVE, Row

times = st.floats(0.001, 1000)


@given(st.lists(times, min_size=1), st.integers(1, 100))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert report.percentile(sorted(values), percent) == expected


def test_nothing_answered_is_never() -> None:
    assert report.percentile([], 90) == float("inf")


def made(profile: str, p90: float, *, workload: str = "F1", load: float | None = 0.7, seed: int = 1) -> Row:
    return Row(
        workload=workload,
        load=load,
        seed=seed,
        profile=profile,
        requests=100,
        unanswered=0,
        refused={},
        shed_rate=0.0,
        ttft_p50=p90 / 2,
        ttft_p90=p90,
        ttft_p99=p90 * 2,
        latency_mean=10.0,
        latency_p90=20.0,
        hit_rate=0.5,
        computed_tokens=1000,
        spread=0.1,
        idle_while_queued=0.0,
        shares=(0.5, 0.5),
        curve=tuple(p90 * percent / 90 + 0.001 for percent in CURVE),
    )


def test_standings_are_ratios_to_the_best_of_each_cell() -> None:
    rows = [
        made("a", 1.0, seed=1), made("a", 4.0, seed=2),  # 2 on geometric mean
        made("b", 8.0, seed=1), made("b", 8.0, seed=2),  # 4 times that
        made("a", 3.0, workload="F2"), made("b", 1.5, workload="F2"),
    ]  # fmt: skip
    first, second = report.standings(rows)
    assert (first.profile, second.profile) == ("a", "b")
    assert first.mean == pytest.approx(2**0.5)
    assert (first.worst, first.worst_cell) == (pytest.approx(2.0), "F2 at 70%")
    assert second.mean == pytest.approx(2.0)
    assert (second.worst, second.worst_cell) == (pytest.approx(4.0), "F1 at 70%")
    assert (first.beyond, second.beyond, first.cells) == (1, 1, 2)
    assert first.latency_mean == second.latency_mean == 1.0


def test_who_never_answers_is_last() -> None:
    first, last = report.standings([made("dead", float("inf")), made("alive", 1.0)])
    assert (first.profile, last.profile, last.mean) == ("alive", "dead", float("inf"))
    (only,) = report.standings([made("dead", float("inf"))])
    assert only.mean == 1.0


def test_json_is_plain() -> None:
    rows = [made("a", 1.0), made("b", float("inf"))]
    read = json.loads(msgspec.json.encode(report.as_json(rows)))
    assert [run["profile"] for run in read["runs"]] == ["a", "b"]
    assert read["runs"][1]["ttft_p90"] is None
    assert len(read["runs"][0]["curve"]) == len(read["curve_percentiles"])
    assert read["standings"][0]["profile"] == "a"


ROWS = [
    made(profile, p90 * load, workload=workload, load=load)
    for workload in ("F1", "F2")
    for load in (0.4, 0.9)
    for profile, p90 in (("token-cost", 0.2), ("<b>&", 3.0), ("dead", float("inf")))
] + [made("token-cost", 0.3, workload="trace.jsonl", load=None)]


def test_tables_have_every_profile_and_cell() -> None:
    console = Console(width=160, record=True, file=StringIO())
    for table in tables.tables(ROWS):
        console.print(table)
    text = console.export_text()
    for expected in ("F1 at 40%", "F2 at 90%", "trace.jsonl", "token-cost", "<b>&", "never", "All cells"):
        assert expected in text


VOID = {"meta", "path", "circle"}


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_asks_nobody_for_anything() -> None:
    made_page = page.page(ROWS, engines=8)
    elements = Elements()
    elements.feed(made_page)
    assert elements.open == []
    tags = {tag for tag, _ in elements.seen}
    assert {"svg", "table", "style"} <= tags
    assert not tags & {"script", "img", "link", "iframe", "object"}
    attributes = {name for _, found in elements.seen for name in found}
    assert not attributes & {"src", "href", "xlink:href", "onload"}
    assert "url(" not in made_page
    assert "@import" not in made_page
    assert "prefers-color-scheme: dark" in made_page
    for expected in ("token-cost", "<b>&", "never", "F1 at 40%", "Load, % of capacity", "Time to first token"):
        assert expected in elements.text
    assert page.page(ROWS, engines=8) == made_page


def test_points_of_a_chart_lie_within_it() -> None:
    elements = Elements()
    elements.feed(page.page(ROWS, engines=8))
    dots = [found for tag, found in elements.seen if tag == "circle"]
    assert dots
    assert all(0 <= float(dot["cx"] or -1) <= 560 and 0 <= float(dot["cy"] or -1) <= 320 for dot in dots)


@given(st.lists(st.one_of(times, st.just(float("inf"))), min_size=1, max_size=5))
def test_any_times_can_be_drawn(values: list[float]) -> None:
    rows = [made(f"p{number}", value, load=load) for number, value in enumerate(values) for load in (0.4, 0.9)]
    elements = Elements()
    elements.feed(page.page(rows, engines=1))
    assert elements.open == []
    assert not any("nan" in (value or "") for _, found in elements.seen for value in found.values())
