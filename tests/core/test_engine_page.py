"""Engine metrics read from pages that another library writes, and another library reads."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from picker.core.endpoints import EngineMetrics
from picker.core.engine_page import PageReader


class Engine:
    """What a vLLM with data-parallel ranks exposes, as far as it matters, and things that look like it."""

    def __init__(self, ranks: int = 1, started: float | None = None) -> None:
        self.registry = CollectorRegistry()
        labels = ["engine", "model_name"]
        self.ranks = [{"engine": str(rank), "model_name": 'a "quoted} \\ name'} for rank in range(ranks)]
        self.waiting = Gauge("vllm:num_requests_waiting", "waiting", labels, registry=self.registry)
        by_reason = Gauge("vllm:num_requests_waiting_by_reason", "decoy", labels, registry=self.registry)
        self.running = Gauge("vllm:num_requests_running", "running", labels, registry=self.registry)
        self.usage = Gauge("vllm:kv_cache_usage_perc", "usage", labels, registry=self.registry)
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "ttft", labels, registry=self.registry)
        self.tpot = Histogram("vllm:inter_token_latency_seconds", "tpot", labels, registry=self.registry)
        for rank in self.ranks:
            by_reason.labels(**rank).set(1000)
            for metric in (self.waiting, self.running, self.usage, self.ttft, self.tpot):
                metric.labels(**rank)
        if started is not None:
            Gauge("process_start_time_seconds", "start", registry=self.registry).set(started)

    def page(self) -> bytes:
        return generate_latest(self.registry)


counts = st.lists(st.integers(0, 500), min_size=4, max_size=4)


@given(st.integers(1, 4), counts, counts, st.lists(st.floats(0, 1), min_size=4, max_size=4))
@settings(deadline=None, max_examples=30)
def test_ranks_are_summed_and_usage_is_averaged(ranks, waiting, running, usage):
    engine = Engine(ranks)
    for index, rank in enumerate(engine.ranks):
        engine.waiting.labels(**rank).set(waiting[index])
        engine.running.labels(**rank).set(running[index])
        engine.usage.labels(**rank).set(usage[index])
    metrics, restarted = PageReader("vllm").read(engine.page())
    assert metrics.waiting == sum(waiting[:ranks])
    assert metrics.running == sum(running[:ranks])
    assert metrics.kv_usage == pytest.approx(sum(usage[:ranks]) / ranks)
    assert not restarted


def test_timestamps_and_exemplars_are_not_values():
    page = b'vllm:num_requests_waiting{engine="0"} 3 1700000000000\nvllm:num_requests_running 2 # {trace="{7}"} 9 1.5\n'
    assert PageReader("vllm").read(page)[0] == EngineMetrics(waiting=3, running=2)


def test_latency_is_the_mean_since_the_page_before_and_stays_while_nothing_happens():
    engine = Engine(2)
    reader = PageReader("vllm")
    assert reader.read(engine.page())[0].ttft == 0, "no traffic yet"
    for rank, seconds in zip(engine.ranks, (0.2, 0.6), strict=True):
        engine.ttft.labels(**rank).observe(seconds)
    assert reader.read(engine.page())[0].ttft == pytest.approx(0.4)
    assert reader.read(engine.page())[0].ttft == pytest.approx(0.4)
    engine.ttft.labels(**engine.ranks[0]).observe(2.0)
    assert reader.read(engine.page())[0].ttft == pytest.approx(2.0)


def test_a_new_process_start_time_is_a_restart():
    reader = PageReader("vllm")
    assert not reader.read(Engine(started=100.0).page())[1]
    assert not reader.read(Engine(started=100.0).page())[1]
    assert reader.read(Engine(started=107.5).page())[1]


def test_counters_that_fall_are_a_restart_and_means_start_again():
    before, after = Engine(), Engine()
    for _ in range(3):
        before.ttft.labels(**before.ranks[0]).observe(9.0)
    after.ttft.labels(**after.ranks[0]).observe(0.5)
    reader = PageReader("vllm")
    reader.read(before.page())
    metrics, restarted = reader.read(after.page())
    assert restarted
    assert metrics.ttft == pytest.approx(0.5)


def test_names_of_other_releases_and_engines():
    old = b'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\nvllm:num_requests_waiting 3\n'
    assert PageReader("vllm").read(old)[0] == EngineMetrics(waiting=3, kv_usage=0.25)
    sglang = b"sglang:num_queue_reqs{} 4.0\nsglang:num_running_reqs{} 2.0\nsglang:token_usage{} 0.5 1700000000000\n"
    assert PageReader("sglang").read(sglang)[0] == EngineMetrics(waiting=4, running=2, kv_usage=0.5)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "many", "", "1e999"])
def test_values_that_cannot_be_are_unknown(value):
    page = f"vllm:num_requests_waiting{{}} {value}\nvllm:num_requests_running 1\n".encode()
    assert PageReader("vllm").read(page)[0] == EngineMetrics(running=1)


@given(st.binary(max_size=400), st.sampled_from(["vllm", "sglang"]))
def test_any_page_can_be_read(noise, engine):
    reader = PageReader(engine)
    for page in (noise, noise + b"\nvllm:num_requests_waiting{" + noise, b"vllm:num_requests_waiting " + noise):
        metrics, _ = reader.read(page)
        for value in (metrics.waiting, metrics.running, metrics.kv_usage, metrics.ttft, metrics.tpot):
            assert value is None or (value >= 0 and math.isfinite(value))
