"""What holds for every scorer and every profile there is, whatever the load and the prompt."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.plugins.profiles import PROFILES
from picker.core.plugins.registry import PLUGINS, SchedulerSpec, build_scheduler
from picker.core.plugins.token_cost import TokenCost
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Work
from picker.core.scheduling.decision import Reason

ASKING = Request("id", "/v1/completions", Prompt("m", (b"x",)))
TOTAL = 64
by_scorer = pytest.mark.parametrize(
    "name", [name for name, plugin in PLUGINS.items() if plugin.scorer and name != "random"]
)

known = {
    "waiting": st.integers(0, 200).map(float),
    "running": st.integers(0, 64).map(float),
    "kv_usage": st.floats(0, 1),
    "ttft": st.floats(0.001, 60),
    "tpot": st.floats(0.001, 1),
}
some = {name: st.none() | value for name, value in known.items()}


def endpoint(values):
    return st.fixed_dictionaries(
        {
            "metrics": st.builds(EngineMetrics, **values),
            "in_flight": st.integers(0, 60),
            "since": st.integers(-20, 20),
            "queued": st.integers(0, 400_000).map(float),
            "matched": st.integers(0, TOTAL),
        }
    )


fleets = st.lists(endpoint(some), min_size=1, max_size=8)
known_fleets = st.lists(endpoint(known), min_size=2, max_size=8)


def table_of(fleet) -> EndpointTable:
    table = EndpointTable()
    table.replace(Endpoint(f"p{number}", f"10.0.0.{number + 1}:8000") for number in range(len(fleet)))
    for slot, one in enumerate(fleet):
        table.in_flight[slot] = one["in_flight"]
        table.observe(slot, one["metrics"], 0.0)
        table.in_flight[slot] = max(one["in_flight"] + one["since"], 0)
        table.queued_tokens[slot] = one["queued"]
    return table


def rate(name: str, fleet) -> np.ndarray:
    table = table_of(fleet)
    plugin = PLUGINS[name]
    matched = np.array([one["matched"] for one in fleet])
    uncached = np.maximum((TOTAL - matched) * 16.0, 1.0)
    size = len(fleet)
    costs = TokenCost().costs(uncached, table.queued_tokens[:size], table.in_flight[:size])
    work = Work(TOTAL * 16.0, uncached, "prefix-cache")
    candidates = Candidates(table, table.slots, table.mask, work, costs)
    info = MatchInfo(matched, TOTAL, "blocks", 16.0, TOTAL * 16.0)
    scores = plugin.scorer(plugin.args()).score(ASKING, candidates, info, random.Random(1))
    if scores is None:  # no opinion, which counts 0 for all
        return np.zeros(size)
    assert scores.shape == (size,)
    return scores


@by_scorer
@settings(max_examples=80, deadline=None)
@given(fleet=fleets)
def test_scores_are_0_to_100(name, fleet):
    scores = rate(name, fleet)
    assert ((scores >= 0) & (scores <= 100)).all()


@by_scorer
@settings(max_examples=60, deadline=None)
@given(fleet=fleets, dice=st.randoms())
def test_the_order_of_endpoints_does_not_matter(name, fleet, dice):
    order = list(range(len(fleet)))
    dice.shuffle(order)
    assert rate(name, [fleet[at] for at in order]) == pytest.approx(rate(name, fleet)[order], abs=1.001)


def loaded(one, more: int):
    metrics = one["metrics"]
    return {
        **one,
        "in_flight": one["in_flight"],
        "since": one["since"] + more,
        "metrics": EngineMetrics(
            waiting=metrics.waiting + more,
            running=metrics.running,
            kv_usage=min(metrics.kv_usage + more / 100, 1.0),
            ttft=metrics.ttft + more,
            tpot=metrics.tpot + more,
        ),
    }


WHOLE_POINTS = {"least-request", "least-latency", "gpu-usage", "prefix-cache", "kvcache-aware"}
"""Scorers that round down, as in Kthena, so that equals may differ by a point."""


def no_better(name: str, before, after, at: int) -> None:
    """Whom `at` did not beat before, it does not beat now."""
    slack = 1.001 if name in WHOLE_POINTS else 1e-7
    assert not [
        other for other in range(len(before)) if before[at] <= before[other] and after[at] > after[other] + slack
    ]


@by_scorer
@settings(max_examples=100, deadline=None)
@given(fleet=known_fleets, data=st.data())
def test_more_load_never_makes_an_endpoint_better_than_another(name, fleet, data):
    at, more = data.draw(st.integers(0, len(fleet) - 1)), data.draw(st.integers(1, 50))
    before = rate(name, fleet)
    fleet[at] = loaded(fleet[at], more)
    no_better(name, before, rate(name, fleet), at)


@settings(max_examples=100, deadline=None)
@given(fleet=known_fleets, data=st.data())
def test_more_queued_tokens_never_make_an_endpoint_better_than_another(fleet, data):
    at, more = data.draw(st.integers(0, len(fleet) - 1)), data.draw(st.integers(1, 100_000))
    before = rate("token-load", fleet)
    fleet[at] = {**fleet[at], "queued": fleet[at]["queued"] + more}
    no_better("token-load", before, rate("token-load", fleet), at)


@by_scorer
@settings(max_examples=100, deadline=None)
@given(fleet=known_fleets, data=st.data())
def test_more_of_the_prompt_never_makes_an_endpoint_worse_than_another(name, fleet, data):
    at = data.draw(st.integers(0, len(fleet) - 1))
    after = [dict(one) for one in fleet]
    after[at]["matched"] = data.draw(st.integers(fleet[at]["matched"], TOTAL))
    no_better(name, -rate(name, fleet), -rate(name, after), at)


# --- Every profile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", list(PROFILES))
@settings(max_examples=60, deadline=None)
@given(fleet=fleets, data=st.data())
def test_the_destination_is_a_candidate_and_nothing_stale_stops_dispatch(profile, fleet, data):
    chosen = PROFILES[profile]
    spec = SchedulerSpec(chosen.filters, chosen.scorers, chosen.args, chosen.producers)
    scheduler, notes = build_scheduler(spec, None, lambda _model, _blocks: None)
    assert notes == []
    table = table_of(fleet)
    if data.draw(st.booleans()):
        table.expire(1e9)
    allowed = data.draw(st.sets(st.integers(0, len(fleet) - 1), min_size=1))
    decision = scheduler.decide(
        Request("id", "/v1/completions", Prompt("m", (b"y" * 4096,)), body_bytes=4200),
        table,
        subset=[f"10.0.0.{slot + 1}:8000" for slot in allowed],
        fallbacks=data.draw(st.integers(0, 3)),
        rng=random.Random(data.draw(st.integers(0, 9))),
        timer=lambda: 0,
    )
    full = all((fleet[slot]["metrics"].waiting or 0) >= 10 for slot in allowed)
    if decision.reason is Reason.FILTERED_OUT:
        assert full, "refused although an engine has room, or may have"
        return
    assert decision.reason is Reason.ROUTED
    assert set(decision.slots[list(decision.order)].tolist()) <= allowed
    assert len(set(decision.destinations)) == len(decision.destinations)
    assert decision.view()["why"].startswith(decision.endpoints[decision.order[0]].name)
