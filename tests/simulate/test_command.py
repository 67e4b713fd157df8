"""The command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picker.app.cli import main

SHORT = ("--engines", "2", "--seconds", "10")


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_tables_json_and_a_page_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    arguments = ("--family", "F1,F5", "--family", "burst", "--load", "40,80", "--profiles", "token-cost,random", *SHORT)
    read = json.loads(out(capsys, *arguments, "--json", "--html", str(html)))
    cells = {(run["workload"], run["load"]) for run in read["runs"]}
    assert cells == {("F1", 0.4), ("F1", 0.8), ("F5", 0.4), ("F5", 0.8), ("burst", None)}
    assert [run["profile"] for run in read["runs"]] == ["token-cost", "random"] * 5
    assert html.read_text().count("<svg viewBox") >= 5
    text = out(capsys, *arguments)
    assert "F1 at 40%" in text
    assert "All cells" in text


def test_deterministic_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = (out(capsys, "--json", *SHORT, "--seed", seed) for seed in ("1", "1", "2"))
    assert one == same != other


def test_a_configuration_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text("scheduler: {plugins: {Score: {enabled: [{name: random, weight: 1}]}, Filter: {enabled: []}}}")
    read = json.loads(out(capsys, "--config", f"mine={file}", "--profiles", "random", "--json", *SHORT))
    random, mine = read["runs"]
    assert (random["profile"], mine["profile"]) == ("random", "mine")
    random["profile"] = "mine"
    assert random == mine


def test_exact_knowledge_by_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "events.yaml"
    file.write_text("scheduler: {pluginConfig: [{name: kvcache-aware, args: {indexMode: redis}}]}")
    read = json.loads(out(capsys, "--config", str(file), "--profiles", "token-cost-events", "--json", *SHORT))
    exact, configured = read["runs"]
    assert configured["profile"] == "events"
    assert configured["hit_rate"] == pytest.approx(exact["hit_rate"], rel=0.1)


def test_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1000, "output_length": 4, "hash_ids": [1, 2]}
    file.write_text("".join(json.dumps({**line, "timestamp": 1000 * at}) + "\n" for at in range(20)) + "broken\n")
    assert main(["simulate", "--trace", str(file), "--profiles", "token-cost", "--json", "--engines", "2"]) == 0
    printed = capsys.readouterr()
    (run,) = json.loads(printed.out)["runs"]
    assert (run["workload"], run["load"], run["requests"]) == ("trace.jsonl", None, 20)
    assert run["hit_rate"] > 0.5
    assert "line 21" in printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--family", "F12"], "F1"),
        (["--profiles", "token-coat"], "token-cost"),
        (["--load", "0"], "greater than 0"),
        (["--load", "nan"], "greater than 0"),
        (["--sheddable", "x"], "greater than 0"),
        (["--seed", "x"], "whole number"),
        (["--engines", "0"], "1 to"),
        (["--requests", "10", "--seconds", "10"], "not allowed"),
        (["--slow-engine", "8=2"], "no engine 8"),
        (["--slow-engine", "1"], "greater than 0"),
        (["--stuck-engine", "9"], "no engine 9"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--trace", "x", "--family", "F1"], "leave out"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "token-cost={config}", "--profiles", "token-cost"], "two profiles"),
        (["--html", "/nowhere/page.html"], "/nowhere"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "picker.yaml"
    config.write_text("{}")
    filled = [argument.format(config=config) for argument in arguments]
    try:
        status = main(["simulate", *filled])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_a_trace_without_a_usable_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("{}\n")
    assert main(["simulate", "--trace", str(file)]) == 2
    assert "line 1" in capsys.readouterr().err
