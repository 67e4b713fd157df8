"""The HTTP port, asked over TCP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from io import BytesIO

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

import picker
from picker.core.endpoints import EngineMetrics
from picker.io.admin import MAX_INPUT_BYTES
from picker.io.http import create_app
from picker.io.telemetry import RECENT_DECISIONS

PROMPT = "p" * 640
CONFIG = {
    "redis": {"url": "redis://user:hunter2@cache:6379/0", "password": "hunter2"},
    "sources": [{"authToken": "hunter2", "api_key": "hunter2", "tls": {"privateKey": "hunter2"}}],
    "scheduler": {"tokenizer": "llama", "maxTokens": 5, "plugins": ["token-cost"], "password": ""},
}


class Readiness:
    reason: str | None = None


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def client(stack, readiness: Readiness) -> AsyncIterator[TestClient]:
    now = iter(range(1000, 10_000))
    app = create_app(
        stack.director,
        stack.hub,
        not_ready=lambda: readiness.reason,
        config=lambda: CONFIG,
        clock=lambda: float(next(now)),
    )
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_metrics_are_what_prometheus_reads(stack, client: TestClient) -> None:
    stack.serve(PROMPT)
    answer = await client.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    assert families["picker_decisions"].samples[0].value == 1
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    assert families["picker_build_info"].samples[0].labels["version"] == picker.__version__


async def test_health_says_why_not(client: TestClient, readiness: Readiness) -> None:
    answer = await client.get("/health")
    assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    readiness.reason = "draining"
    answer = await client.get("/health")
    assert (answer.status, await answer.json()) == (503, {"status": "not ready", "reason": "draining"})


async def test_stats(stack, client: TestClient) -> None:
    stack.director.table.observe(0, EngineMetrics(waiting=3, kv_usage=0.5), now=1.0)
    stack.serve(PROMPT)
    stack.director.route(stack.decide("x" * 64))
    stats = await (await client.get("/stats")).json()
    assert stats["version"] == picker.__version__
    assert stats["uptime_seconds"] == 1
    assert stats["in_flight"] == 1
    assert stats["prefix_cache"] == {"entries": 10, "held": 1}
    first, second = stats["endpoints"]
    assert first["in_flight"] + second["in_flight"] == 1
    first.pop("in_flight")
    assert first == {
        "name": "pod-a", "namespace": "default", "address": "10.0.0.1:8000",
        "waiting": 3, "running": None, "kv_usage": 0.5, "ttft": None, "tpot": None,
    }  # fmt: skip


async def test_configuration_is_shown_without_secrets(client: TestClient) -> None:
    answer = await client.get("/debug/config")
    assert "hunter2" not in await answer.text()
    shown = await answer.json()
    assert shown["redis"] == {"url": "redis://***@cache:6379/0", "password": "***"}
    assert shown["scheduler"] == CONFIG["scheduler"]


async def test_recent_decisions_in_short_and_one_in_full(stack, client: TestClient) -> None:
    stack.serve(PROMPT)
    served = stack.serve(PROMPT, "m").destinations[0]
    stack.decide(PROMPT, subset=("10.9.9.9",))
    decisions = (await (await client.get("/debug/scores.json")).json())["decisions"]
    assert [decision["number"] for decision in decisions] == [3, 2, 1]
    refused, hit, miss = decisions
    assert (refused["reason"], refused["destination"], refused["candidates"]) == ("none_in_subset", None, 0)
    assert (hit["destination"]["address"], hit["destination"]["matched"], hit["destination"]["of"]) == (served, 10, 10)
    assert hit["destination"]["total"] == 300  # least-request 100 x 1, prefix-cache 100 x 2
    assert miss["destination"]["matched"] == 0
    full = await (await client.get("/debug/scores.json?decision=2")).json()
    assert full["destinations"][0] == served
    assert [plugin["score"] for plugin in full["endpoints"][0]["plugins"]] == [100, 100]


async def test_lists_are_bounded(stack, client: TestClient) -> None:
    for _ in range(RECENT_DECISIONS + 10):
        stack.decide("x")
    for query, length in (("", 50), ("?limit=7", 7), ("?limit=999999999", RECENT_DECISIONS)):
        answer = await (await client.get(f"/debug/scores.json{query}")).json()
        assert len(answer["decisions"]) == length
    for query in ("limit=0", "limit=-1", "limit=x", "limit=", "decision=1.5", "limit=" + "9" * 5000, "limit=١"):
        answer = await client.get(f"/debug/scores.json?{query}")
        assert answer.status == 400
        assert query.partition("=")[0] in (await answer.json())["error"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    gone = await client.get("/debug/scores.json?decision=1")
    assert gone.status == 404
    assert "256" in (await gone.json())["error"]


async def test_explain_changes_nothing_and_shows_no_prompt(stack, client: TestClient) -> None:
    stack.serve(PROMPT)
    for asked in (
        {"prompt": PROMPT, "model": "m"},
        {"body": json.dumps({"model": "m", "prompt": PROMPT}), "path": "/v1/completions"},
    ):
        answer = await client.post("/debug/explain", json=asked)
        assert PROMPT[:64] not in await answer.text()
        decision = await answer.json()
        assert [plugin["matched"] for plugin in decision["endpoints"][0]["plugins"]] == [0, 10]
    assert len(stack.hub.recent) == 1
    assert sum(stack.metrics.decisions.series.values()) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "truncated"),
        (b'{"promt": "x"}', "promt"),
        (b'{"prompt": 5}', "prompt"),
        (b"{}", "input: "),
        (b'{"body": "\\udfff"}', ""),
    ],
)
async def test_explain_refuses_what_it_cannot_use(client: TestClient, body: bytes, said: str) -> None:
    answer = await client.post("/debug/explain", data=body, headers={"Content-Type": "application/json"})
    assert answer.status == 400
    assert said in (await answer.json())["error"]


def _prompt(length: int) -> bytes:
    return json.dumps({"prompt": "x" * length}).encode()


async def test_explain_takes_no_forms_of_other_pages_and_nothing_huge(client: TestClient) -> None:
    form = await client.post("/debug/explain", data=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert form.status == 415
    as_json = {"Content-Type": "application/json"}
    huge = await client.post("/debug/explain", data=BytesIO(_prompt(MAX_INPUT_BYTES + 1)), headers=as_json)
    assert huge.status == 400
    assert "prompt: has" in (await huge.json())["error"]
    endless = await client.post("/debug/explain", data=BytesIO(_prompt(2 * MAX_INPUT_BYTES)), headers=as_json)
    assert endless.status == 413


async def test_the_page_may_load_nothing_and_run_nothing_but_itself(client: TestClient) -> None:
    answer = await client.get("/debug/scores")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    page = await answer.text()
    for way_in in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http://",
        "https://",
        "src=",
    ):
        assert way_in not in page
