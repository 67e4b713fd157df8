"""Alerts and dashboards speak of metrics that there are, by their labels, and Prometheus takes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from picker.io.kv_index.sidecar_metrics import SidecarMetrics
from picker.io.metrics import Metrics
from tests.manifests.builds import MANIFESTS, ROOT, build, one

PROMTOOL = Path(sys.executable).with_name("promtool")
DASHBOARDS = sorted((MANIFESTS / "components/monitoring/dashboards").glob("*.json"))
TARGET_LABELS = {"namespace", "pod", "le"}
"""Labels that Prometheus adds, from its operator's monitors and for histograms."""


def exposed() -> dict[str, set[str]]:
    """Names of all series that pickers and sidecars expose, with the labels they have."""
    metrics = Metrics()
    series: dict[str, set[str]] = {}
    for family in (*metrics.families, *SidecarMetrics().families):
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        series |= {family.name + suffix: set(family.labels) for suffix in suffixes}
    for family in metrics.registry.collect():
        if family.name.startswith("process_"):
            series[family.name + "_total" * (family.type == "counter")] = set()
    return series


def rules() -> list[dict]:
    (group,) = one(build("production"), "PrometheusRule", "picker")["spec"]["groups"]
    return group["rules"]


def panels(path: Path) -> list[dict]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for panel in panels(path):
            found |= {f"{path.stem}: {panel['title']} {query['refId']}": query["expr"] for query in panel["targets"]}
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                found[f"{path.stem}: ${variable['name']}"] = variable["query"]["query"]
    return found


EXPRESSIONS = expressions()


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_every_metric_and_label_is_in_the_code(expression):
    series = exposed()
    names = set(re.findall(r"\b(?:picker|process)_[a-z_]+\b", expression))
    assert names
    assert names <= series.keys()
    known = set.union(TARGET_LABELS, *(series[name] for name in names))
    matched = set(re.findall(r"[{,]\s*([a-z_]+)(?:=~|!=|!~|=)", expression))
    grouped = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
    assert matched | grouped <= known


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_alerts(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(one(build("production"), "PrometheusRule", "picker")["spec"]))
    assert f"{len(rules())} rules found" in promtool("check", "rules", path)


def test_promtool_takes_every_query_of_the_dashboards(tmp_path):
    """As recording rules, which are any expression; what Grafana puts in is put in."""
    path = tmp_path / "rules.yaml"
    queries = [text for name, text in EXPRESSIONS.items() if not name.startswith("alert") and "$" not in name]
    records = [
        {"record": f"query:{number}", "expr": text.replace("$__rate_interval", "5m").replace("$", "")}
        for number, text in enumerate(queries)
    ]
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    promtool("check", "rules", path)


def test_alerts_fire_and_are_silent(tmp_path):
    """Prometheus's own rule tests: a healthy picker, one that lost everything, and some that lost Redis."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(one(build("production"), "PrometheusRule", "picker")["spec"]))
    labels = 'namespace="inference",pod="a",instance="i",job="picker"'

    def scenario(refused: str, endpoints: str, errors: str, decisions: str) -> dict[str, str]:
        return {
            f"picker_build_info{{{labels}}}": "1x60",
            f"picker_endpoints{{{labels}}}": endpoints,
            f"picker_endpoints_stale{{{labels}}}": endpoints,
            f'picker_decisions_total{{{labels},reason="routed",model="m"}}': "0+600x60",
            f'picker_decisions_total{{{labels},reason="no_endpoints",model="m"}}': refused,
            f'picker_errors_total{{{labels},where="decide"}}': errors,
            f"picker_decision_seconds_sum{{{labels}}}": decisions,
            f"picker_sharing_peers{{{labels}}}": "0x60",
        }

    def test(series: dict[str, str], *firing: str) -> dict[str, object]:
        names = [
            "PickerHasNoEndpoints",
            "PickerRefusesRequests",
            "PickerErrors",
            "PickerBusy",
            "PickerMissing",
            "PickerReplicasApart",
            "PickerRedisAway",
            "PickerSidecarRedisAway",
        ]
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                    "eval_time": "40m",
                    "exp_samples": [{"labels": "{}", "value": int(name in firing)}],
                }
                for name in names
            ],
        }

    healthy = scenario("0x60", "8x60", "0x60", "0+6x60")

    def away(failures: str, *counters: str) -> dict[str, str]:
        return {f'picker_{name}_failures_total{{{labels},reason="broken"}}': failures for name in counters}

    pickers = ("redis", "sharing", "sticky_redis")
    tests = [
        test(healthy),
        # Redis was restarted, and some attempts to connect failed.
        test(healthy | away("0x33 20x26", *pickers, "sidecar_redis")),
        *(test(healthy | away("0+12x60", name), "PickerRedisAway") for name in pickers),
        test(healthy | away("0+12x60", "sidecar_redis"), "PickerSidecarRedisAway"),
        test(
            scenario("0+60x60", "0x60", "0+1x60", "0+45x60"),
            *("PickerHasNoEndpoints", "PickerRefusesRequests", "PickerErrors", "PickerBusy"),
        ),
        test({}, "PickerMissing"),
        test(
            healthy | {'picker_build_info{namespace="inference",pod="b",instance="j",job="picker"}': "1x60"},
            "PickerReplicasApart",
        ),
    ]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", path)


def test_the_documentation_has_a_remedy_for_every_alert_and_no_other():
    guide = (ROOT / "docs/operations.md").read_text()
    _, _, table = guide.partition("## Alerts")
    table, _, _ = table.partition("\n## ")
    assert sorted(re.findall(r"^\| `(Picker\w+)` \|", table, re.MULTILINE)) == sorted(rule["alert"] for rule in rules())
    assert set(re.findall(r"`(Picker[A-Z]\w+)`", guide)) <= {rule["alert"] for rule in rules()}


def test_monitors_find_the_picker_and_the_engines():
    documents = build("production")
    service = one(documents, "Service", "picker")
    monitor = one(documents, "ServiceMonitor", "picker")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= {
        port["name"] for port in service["spec"]["ports"]
    }
    engines = one(documents, "PodMonitor", "model-servers")["spec"]
    assert engines["selector"]["matchLabels"] == {"inference-serving": "true"}
    assert [endpoint["portNumber"] for endpoint in engines["podMetricsEndpoints"]] == [8000, 9000]
    ports = {
        port["containerPort"]
        for each in build("engines")
        if each["kind"] == "Deployment"
        for container in each["spec"]["template"]["spec"]["containers"]
        for port in container.get("ports", ())
    }
    assert {8000, 9000} <= ports


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_collected_and_can_be_told_apart(path):
    documents = build("production")
    collected = one(documents, "ConfigMap", "picker-dashboards")
    assert collected["metadata"]["labels"]["grafana_dashboard"] == "1"
    dashboard = json.loads(path.read_text())
    assert json.loads(collected["data"][path.name]) == dashboard
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels(path))


def test_dashboards_have_names_of_their_own():
    assert len({json.loads(path.read_text())["uid"] for path in DASHBOARDS}) == len(DASHBOARDS)
