"""What the peers' profiles do: where a prompt goes, by hand from their weights, and how much of it they look at."""

from __future__ import annotations

import random

import pytest

from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Request
from picker.core.scheduling.decision import Decision, Reason

PROMPT = b"y" * 8192


class Fleet:
    """Two endpoints under a profile; `alpha` is the one that gets to hold prompts."""

    def __init__(self, profile: ProfileName) -> None:
        chosen = PROFILES[profile]
        spec = SchedulerSpec(chosen.filters, chosen.scorers, chosen.args, chosen.producers)
        self.scheduler = build_scheduler(spec, None, lambda _model, _blocks: None)[0]
        self.table = EndpointTable()
        self.table.replace([Endpoint("alpha", "10.0.0.1:8000"), Endpoint("beta", "10.0.0.2:8000")])

    def decide(self, prompt: bytes = PROMPT) -> Decision:
        return self.scheduler.decide(
            Request("", "", Prompt("m", (prompt,)), body_bytes=len(prompt)),
            self.table,
            subset=None,
            fallbacks=0,
            rng=random.Random(1),
            timer=lambda: 0,
        )

    def hold(self, prompt: bytes = PROMPT) -> None:
        self.decide(prompt).matches["prefix-cache"].picked(0).confirm(0)

    def observe(self, alpha: EngineMetrics, beta: EngineMetrics) -> None:
        self.table.observe(0, alpha, 0.0)
        self.table.observe(1, beta, 0.0)

    def goes_to(self, prompt: bytes = PROMPT) -> str:
        return self.decide(prompt).endpoints[self.decide(prompt).order[0]].name


@pytest.mark.parametrize(
    ("alpha", "beta", "totals"),
    [
        # 2 x queue + 2 x free cache + 3 x prefix
        (EngineMetrics(waiting=0, kv_usage=0.5), EngineMetrics(waiting=0, kv_usage=0.5), [600, 300]),
        (EngineMetrics(waiting=1, kv_usage=0.5), EngineMetrics(waiting=0, kv_usage=0.5), [400, 300]),
        (EngineMetrics(waiting=10, kv_usage=0.9), EngineMetrics(waiting=0, kv_usage=0.1), [320, 380]),
        (EngineMetrics(waiting=5, kv_usage=0.2), EngineMetrics(waiting=5, kv_usage=0.2), [660, 360]),
    ],
)
def test_llm_d_weighs_queue_cache_and_prefix(alpha, beta, totals):
    fleet = Fleet(ProfileName.LLM_D)
    fleet.hold()
    fleet.observe(alpha, beta)
    decision = fleet.decide()
    assert decision.totals.tolist() == pytest.approx(totals)
    assert decision.filters == ()
    assert fleet.goes_to() == ("alpha" if totals[0] > totals[1] else "beta")


def test_llm_d_goes_on_without_metrics():
    fleet = Fleet(ProfileName.LLM_D)
    fleet.hold()
    fleet.observe(EngineMetrics(waiting=50, kv_usage=1.0), EngineMetrics(waiting=0, kv_usage=0.0))
    assert fleet.goes_to() == "beta"
    fleet.table.expire(100.0)
    assert fleet.goes_to() == "alpha"


@pytest.mark.parametrize("profile", [ProfileName.LLM_D, ProfileName.LLM_D_GUIDE])
def test_llm_d_matches_131072_tokens_in_blocks_of_64(profile):
    fleet = Fleet(profile)
    info = fleet.decide(b"q" * 1_000_000).matches["prefix-cache"].info
    assert (info.total, info.tokens_per_unit) == (131_072 // 64, 64)
    assert fleet.decide(b"q" * 256 * 3).matches["prefix-cache"].info.total == 3
    assert fleet.decide(b"q" * (256 * 3 + 1)).matches["prefix-cache"].info.total == 4, "a part of a block counts"


def test_llm_d_keeps_as_many_blocks_as_the_engine_has_which_are_four_times_as_large():
    fleet = Fleet(ProfileName.LLM_D)
    (producer,) = fleet.scheduler.producers
    fleet.observe(EngineMetrics(cache_tokens=500 * 16), EngineMetrics())
    for number in range(20):
        fleet.hold(b"%04d" % number * 64 * 50)  # 50 blocks each
    assert producer.index.entries in range(500, 502)
    unknown = Fleet(ProfileName.LLM_D)
    (producer,) = unknown.scheduler.producers
    for number in range(20):
        unknown.hold(b"%04d" % number * 64 * 2000)
    assert producer.index.entries == 31_250


def test_llm_ds_guide_stays_with_the_cache_until_it_costs_18_seconds():
    fleet = Fleet(ProfileName.LLM_D_GUIDE)
    assert fleet.decide().filters == (("prefix-cache-affinity-filter", 2),)
    fleet.hold()
    fleet.table.queued_tokens[0] = 286_000
    assert fleet.decide().filters == (("prefix-cache-affinity-filter", 1),)
    assert fleet.goes_to() == "alpha"
    fleet.table.queued_tokens[0] = 287_000
    assert fleet.goes_to() == "beta"


def test_llm_ds_guide_spreads_what_nobody_holds_by_queued_tokens():
    fleet = Fleet(ProfileName.LLM_D_GUIDE)
    fleet.table.queued_tokens[:2] = [10_000, 9_000]
    assert fleet.goes_to() == "beta"
    decision = fleet.decide(PROMPT)
    assert decision.tokens == 2048, "what is sent there counts as queued"


def test_kthena_looks_at_8_kib_and_leaves_out_who_queues_ten():
    fleet = Fleet(ProfileName.KTHENA)
    assert fleet.decide(b"q" * 1_000_000).matches["prefix-cache"].info.total == 128
    fleet.hold()
    assert fleet.goes_to() == "alpha"
    fleet.observe(EngineMetrics(waiting=10), EngineMetrics(waiting=9))
    assert fleet.goes_to() == "beta"
    fleet.observe(EngineMetrics(waiting=10), EngineMetrics(waiting=10))
    assert fleet.decide().reason is Reason.FILTERED_OUT
    fleet.table.expire(100.0)
    assert fleet.goes_to() == "alpha"
