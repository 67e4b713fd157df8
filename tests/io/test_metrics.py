"""What a scrape says after known traffic, read back by Prometheus' own parser."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from picker.core.director import PrefillSignal
from picker.core.endpoints import EngineMetrics
from picker.core.exchange.effects import Anomaly, BodyState, Finish, LearnedOn
from picker.core.plugins.profiles import PROFILES, Profile, ProfileName
from picker.core.sessions.chain import Chain
from picker.core.usage import Usage
from picker.io.extproc.service import ExtProcService
from picker.io.extproc.settings import ExtProcSettings
from picker.io.metric_families import Counter, Histogram
from picker.io.metrics import Metrics, metrics_markdown
from picker.io.transport.counters import TransportCounters

PROMPT = "p" * 640  # ten blocks of 64 bytes


class Scrape:
    def __init__(self, metrics: Metrics) -> None:
        text = generate_latest(metrics.registry).decode()
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        (value,) = [s.value for s in self.samples if s.name == f"picker_{name}" and s.labels == labels]
        return value

    def label_values(self, name: str, label: str) -> set[str]:
        return {s.labels[label] for s in self.samples if s.name == f"picker_{name}"}


def test_decisions_and_their_reasons(stack) -> None:
    stack.metrics.models.admit("m")
    stack.decide(PROMPT)
    stack.decide(PROMPT)
    stack.decide(PROMPT, subset=("10.9.9.9",))
    stack.decide(PROMPT, state=BodyState.STREAMED)
    scrape = Scrape(stack.metrics)
    assert scrape("decisions_total", reason="routed", model="m") == 2
    assert scrape("decisions_total", reason="none_in_subset", model="m") == 1
    assert scrape("decisions_total", reason="routed", model="<none>") == 1
    assert scrape("prompt_unused_total", reason="body_mode_streamed") == 1
    assert scrape("prompt_unused_total", reason="invalid_json") == 0
    assert scrape("decision_seconds_count") == 4
    steps = sum(
        scrape("decision_step_seconds_sum", step=step) for step in ("parse", "filter", "match", "score", "pick")
    )
    assert scrape("decision_seconds_sum") == pytest.approx(steps)
    assert 0 < steps < 1


def test_match_ratio_is_that_of_the_best_endpoint_and_a_miss_is_0(stack) -> None:
    stack.metrics.models.admit("m")
    stack.serve(PROMPT)
    stack.serve(PROMPT[:320] + "q" * 320)
    stack.serve(PROMPT)
    scrape = Scrape(stack.metrics)
    bucket = {"producer": "prefix-cache", "model": "m"}
    assert scrape("prefix_match_ratio_bucket", le="0", **bucket) == 1
    assert scrape("prefix_match_ratio_bucket", le="0.25", **bucket) == 1
    assert scrape("prefix_match_ratio_bucket", le="0.5", **bucket) == 2
    assert scrape("prefix_match_ratio_bucket", le="0.99", **bucket) == 2
    assert scrape("prefix_match_ratio_bucket", le="1", **bucket) == 3
    assert scrape("prefix_match_ratio_sum", **bucket) == pytest.approx(1.5)


def test_requests_from_pick_to_end(stack) -> None:
    held = stack.decide(PROMPT)
    stack.director.route(held)
    during = Scrape(stack.metrics)
    assert during("in_flight_requests") == 1
    addresses = {"pod-a": "10.0.0.1:8000", "pod-b": "10.0.0.2:8000"}
    name = held.endpoints[held.order[0]].name
    assert during("endpoint_in_flight_requests", target=f"default/{name}", address=addresses[name]) == 1
    assert during("prefix_cache_held") == 10
    assert during("prefix_cache_entries") == 0

    stack.serve("a" * 640)
    stack.serve("b" * 64, status=503)
    stack.serve("c" * 64, status=None)
    stack.serve("d" * 64, served=1)
    stack.serve("e" * 64, served="10.9.9.9:1")
    after = Scrape(stack.metrics)
    assert after("requests_finished_total", status="2xx") == 3
    assert after("requests_finished_total", status="5xx") == 1
    assert after("requests_finished_total", status="none") == 1
    assert after("learned_total", on="response_body", success="true") == 3
    assert after("learned_total", on="response_body", success="false") == 2
    assert after("served_elsewhere_total", by="fallback") == 1
    assert after("served_elsewhere_total", by="other") == 1
    assert after("request_seconds_sum") == 2.5
    assert after("prefix_cache_entries") == 11  # ten of `a`, one of `d`; who served `e` is not ours


def test_evictions_name_the_model_that_lost_blocks(make_stack: Callable[..., object]) -> None:
    stack = make_stack(capacity=4)
    for model in ("old", "new"):
        for _ in range(2):
            stack.serve(PROMPT, model)
    assert Scrape(stack.metrics)("prefix_cache_evictions_total", model="old") >= 6


def test_unknown_load_is_left_out(stack) -> None:
    stack.director.table.observe(0, EngineMetrics(waiting=3, kv_usage=0.25), now=1.0)
    scrape = Scrape(stack.metrics)
    assert scrape("endpoint_waiting_requests", target="default/pod-a", address="10.0.0.1:8000") == 3
    assert scrape("endpoint_kv_cache_usage_ratio", target="default/pod-a", address="10.0.0.1:8000") == 0.25
    assert scrape.label_values("endpoint_waiting_requests", "target") == {"default/pod-a"}
    assert scrape.label_values("endpoint_ttft_seconds", "target") == set()
    assert scrape("endpoints") == 2
    assert scrape("endpoints_stale") == 1
    stack.director.table.expire(now=1000.0)
    assert Scrape(stack.metrics)("endpoints_stale") == 2


def test_state_of_others_is_read_when_asked(stack) -> None:
    transport = stack.metrics.transport = TransportCounters()
    stack.metrics.scrape_outcomes = {"ok": 7, "timeout": 1}
    service = stack.metrics.service = ExtProcService(stack.director, stack.hub, ExtProcSettings())
    service.open_streams, service.buffered_bytes = 5, 4096
    stack.metrics.reload_outcomes = lambda: {"ok": 3, "invalid": 1}
    transport.rejected["bad_frame"] += 2
    transport.resets_received += 9
    scrape = Scrape(stack.metrics)
    assert scrape("open_streams") == 5
    assert scrape("buffered_body_bytes") == 4096
    assert scrape("transport_rejected_total", reason="bad_frame") == 2
    assert scrape("transport_events_total", event="resets_received") == 9
    assert scrape("scrapes_total", outcome="timeout") == 1
    assert scrape("config_reloads_total", outcome="invalid") == 1
    stack.hub.anomaly(Anomaly.STREAMED_REQUEST_BODY, "")
    assert Scrape(stack.metrics)("anomalies_total", kind="streamed_request_body") == 1


def test_clients_cannot_make_series_without_end(stack) -> None:
    for number in range(150):
        stack.serve(PROMPT, f"model-{number}")
        stack.decide(PROMPT, f"model-{number}")
    scrape = Scrape(stack.metrics)
    assert len(scrape.label_values("decisions_total", "model")) == 101
    assert scrape("decisions_total", reason="routed", model="model-99") == 1
    assert scrape("decisions_total", reason="routed", model="<other>") == 100 + 2 * 50


@pytest.mark.parametrize("status", [404, 503, None])
def test_a_name_that_no_engine_serves_takes_no_label(stack, status: int | None) -> None:
    for number in range(150):
        stack.serve(PROMPT, f"junk-{number}", status=status)
    stack.serve(PROMPT, "real")
    stack.decide(PROMPT, "real")
    scrape = Scrape(stack.metrics)
    assert scrape.label_values("decisions_total", "model") == {"<other>", "real"}
    assert scrape("model_label_overflow_total") == 151


@given(st.text(min_size=1, max_size=600) | st.sampled_from(["<other>", "<none>", "other", "none"]))
def test_any_model_name_is_one_short_label_of_its_own(model: str) -> None:
    metrics = Metrics()
    metrics.evicted(model, 1)
    metrics.evicted("", 1)
    metrics.models.admit(model)
    metrics.evicted(model, 1)
    labels = Scrape(metrics).label_values("prefix_cache_evictions_total", "model")
    (label,) = labels - {"<other>", "<none>"}
    assert 1 <= len(label) <= 80
    assert label.isprintable()


@given(st.lists(st.floats(-1, 20)))
def test_histograms_say_what_those_of_the_client_library_say(values: list[float]) -> None:
    bounds = [0, 0.5, 1, 10]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x", "model", "text", bounds)
    ours.register(histogram)
    oracle = prometheus_client.Histogram("picker_x", "text", ["model"], registry=theirs, buckets=bounds)
    for value in values:
        histogram.series["m",].observe(value)
        oracle.labels("m").observe(value)

    def read(registry: CollectorRegistry) -> dict[tuple[str, float], float]:
        return {
            (sample.name, float(sample.labels.get("le", 0))): pytest.approx(sample.value)
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    assert read(ours) == read(theirs)


def test_a_counter_starts_at_0_where_its_labels_are_known() -> None:
    registry = CollectorRegistry()
    registry.register(Counter("tries_total", "outcome", "text", [("ok",)]))
    assert b'picker_tries_total{outcome="ok"} 0.0' in generate_latest(registry)


def test_the_reference_names_every_metric_once(stack) -> None:
    stack.serve(PROMPT)
    table = metrics_markdown()
    names = [line.split("`")[1] for line in table.splitlines()[2:]]
    assert len(names) == len(set(names))
    scraped = {
        family.name for family in text_string_to_metric_families(generate_latest(stack.metrics.registry).decode())
    }
    assert scraped <= {name.removesuffix("_total") for name in names}


def test_what_the_default_policy_counts(make_stack) -> None:
    stack = make_stack(profile=PROFILES[ProfileName.TOKEN_COST])
    stack.metrics.models.admit("m")
    decision = stack.decide("z" * 4096)
    ticket = stack.director.route(decision)
    busy, idle = decision.destinations[0], ({"10.0.0.1:8000", "10.0.0.2:8000"} - set(decision.destinations[:1])).pop()
    name = {"10.0.0.1:8000": "default/pod-a", "10.0.0.2:8000": "default/pod-b"}
    scrape = Scrape(stack.metrics)
    assert scrape("endpoint_queued_tokens", target=name[busy], address=busy) == 1024
    assert scrape("endpoint_queued_tokens", target=name[idle], address=idle) == 0
    assert scrape("work_source_total", source="prefix-cache") == 1
    assert scrape("destination_cost_tokens_sum") == 1024
    assert scrape("destination_cost_tokens_bucket", le="1000") == 0
    assert scrape("destination_cost_tokens_bucket", le="2500") == 1
    assert scrape("prefill_over_total", signal="response_body") == 0
    assert scrape.label_values("endpoint_prefill_tokens_per_second", "address") == set()
    assert scrape.label_values("bytes_per_token", "model") == set()

    ticket.prefilled(stack.director.now() + 0.5, PrefillSignal.RESPONSE_BODY)
    ticket.finish(Finish(True, LearnedOn.RESPONSE_BODY, 200, busy), Usage(prompt_tokens=1000))
    scrape = Scrape(stack.metrics)
    assert scrape("endpoint_queued_tokens", target=name[busy], address=busy) == 0
    assert scrape("prefill_over_total", signal="response_body") == 1
    assert scrape("prefill_over_total", signal="end") == 0
    assert scrape("bytes_per_token", model="m") == 4.096
    assert scrape.label_values("endpoint_prefill_tokens_per_second", "address") == {busy}

    stack.decide("z", state=BodyState.STREAMED)
    assert Scrape(stack.metrics)("work_source_total", source="length") == 1


def test_what_is_known_of_sessions(make_stack) -> None:
    assert Scrape(make_stack().metrics).label_values("sessions_unread_total", "reason") == set()
    profile = Profile((), (("token-cost", 1.0),), producers=("session-prefix-cache-producer",))
    stack = make_stack(profile=profile)
    stack.serve("z" * 1024)
    ticket = stack.director.route(stack.decide("y" * 1024))
    scrape = Scrape(stack.metrics)
    assert scrape("sessions_kept") == scrape("sessions_held") == 1
    assert scrape("session_positions") == 2 * 3, "512 bytes each, and the end"
    stack.decide("x", state=BodyState.TRUNCATED)
    ticket.finish(Finish(False, LearnedOn.RESPONSE_BODY, 500, None))
    scrape = Scrape(stack.metrics)
    assert scrape("sessions_unread_total", reason="unreadable") == 1
    assert scrape("sessions_unread_total", reason="too_deep") == 0
    assert scrape("sessions_evicted_total", reason="capacity") == 0
    assert (scrape("sessions_kept"), scrape("sessions_held"), scrape("session_positions")) == (1, 0, 3)
    assert scrape("session_reader_evictions_total") == scrape("session_reader_memory_bytes") == 0
    assert scrape("session_names") == scrape("session_names_evicted_total") == 0
    (producer,) = stack.director.scheduler.producers
    producer.names.put(1, Chain(array("Q", [1]), array("I", [1]), 1))
    assert Scrape(stack.metrics)("session_names") == 1


def test_suspects_and_their_probes_are_counted(make_stack) -> None:
    stack = make_stack(profile=PROFILES[ProfileName.TOKEN_COST])
    assert Scrape(stack.metrics)("endpoints_suspect") == 0
    for _ in range(4):
        stack.director.table.health.failed(0)
    assert stack.serve("z").destinations[0] == "10.0.0.1:8000", "the probe"
    scrape = Scrape(stack.metrics)
    assert scrape("endpoints_suspect") == 1
    assert scrape("suspicions_total", reason="failing") == 1
    assert scrape("suspicions_total", reason="silent") == 0
    assert scrape("suspect_requests_total", why="probe") == 1
    assert scrape("suspect_requests_total", why="no_other") == 0
    assert scrape("put_first_total", why="probe") == 1
    assert scrape("put_first_total", why="pinned") == 0


def test_models_without_a_label_of_their_own_have_no_ratio(make_stack) -> None:
    stack = make_stack(profile=PROFILES[ProfileName.TOKEN_COST])
    for model in ("known", "unknown"):
        decision = stack.decide("z" * 4096, model)
        stack.director.route(decision).finish(
            Finish(True, LearnedOn.RESPONSE_BODY, 200, None), Usage(prompt_tokens=2048)
        )
    stack.metrics.models.admit("known")
    scrape = Scrape(stack.metrics)
    assert scrape.label_values("bytes_per_token", "model") == {"known"}
    assert scrape("bytes_per_token", model="known") == 2
