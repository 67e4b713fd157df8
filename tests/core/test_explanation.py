"""The sentence that says why a destination won."""

from __future__ import annotations

import random

import pytest

from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Request
from picker.core.scheduling.decision import Decision
from picker.core.scheduling.explanation import why
from picker.core.scheduling.scheduler import Scheduler

PROMPT = b"z" * 4096  # 1,024 tokens


@pytest.fixture
def table() -> EndpointTable:
    table = EndpointTable()
    table.replace(Endpoint(name, f"10.0.0.{number}:8000") for number, name in enumerate(("alpha", "beta", "gamma")))
    return table


def scheduler_of(profile: ProfileName) -> Scheduler:
    chosen = PROFILES[profile]
    spec = SchedulerSpec(chosen.filters, chosen.scorers, chosen.args, chosen.producers)
    return build_scheduler(spec, None, lambda _model, _blocks: None)[0]


def decide(scheduler: Scheduler, table: EndpointTable, prompt: bytes = PROMPT, **more) -> Decision:
    asked = {"subset": None, "fallbacks": 0, "rng": random.Random(1), "timer": lambda: 0, **more}
    return scheduler.decide(Request("", "", Prompt("m", (prompt,))), table, **asked)


def holds(scheduler: Scheduler, table: EndpointTable, slot: int, prompt: bytes) -> None:
    decision = decide(scheduler, table, prompt)
    for match in decision.matches.values():
        match.picked(slot).confirm(slot)


def test_by_cost(table):
    scheduler = scheduler_of(ProfileName.TOKEN_COST)
    holds(scheduler, table, 1, PROMPT[:2048])
    table.in_flight[:3] = [4, 1, 4]
    table.queued_tokens[:3] = [2048, 2048, 2048]
    # By hand, with 3 in flight on average and 2,048 queued everywhere: beta 2048 + 512 (1 + 2/4 + 1/4 * 2/5) + 200 = 3,067,
    # alpha 2048 + 1024 (1 + 8/4 + 1/4) + 800 = 6,176.
    assert why(decide(scheduler, table)) == (
        "beta costs 3,067 tokens: it lacks 512 of the prompt's 1,024, and has 2,048 queued and 1 request in flight. "
        "The next best is alpha, with 6,176."
    )


def test_by_scores(table):
    scheduler = scheduler_of(ProfileName.LLM_D)
    holds(scheduler, table, 2, PROMPT)
    assert why(decide(scheduler, table)) == (
        "gamma has 500 of 700 points. The next best is alpha, with 200; what counts most is prefix-cache."
    )


def test_among_equals(table):
    scheduler = scheduler_of(ProfileName.KTHENA)
    assert why(decide(scheduler, table)).endswith(" has 150 of 300 points. 2 others are as good; chance decided.")
    tokens = scheduler_of(ProfileName.LLM_D_GUIDE)
    table.in_flight[:3] = [5, 5, 0]
    assert why(decide(tokens, table)) == (
        "gamma has 100 of 100 points. 2 others are as good, with more requests in flight."
    )


def test_without_a_choice(table):
    scheduler = scheduler_of(ProfileName.TOKEN_COST)
    assert why(decide(scheduler, table, pinned=1)) == "The session is pinned to beta."
    assert why(decide(scheduler, table, subset=["10.0.0.2:8000"])) == "gamma is the only candidate."
    assert why(decide(scheduler, table, subset=["10.9.9.9:1"])) == ""
    assert why(decide(Scheduler((), (), ()), table)).startswith("No plugin rates endpoints. 2 others are as good")


def test_a_probe(table):
    scheduler = scheduler_of(ProfileName.TOKEN_COST)
    for _ in range(4):
        table.health.failed(0)
    assert why(decide(scheduler, table)) == (
        "alpha kept failing or had gone silent; this request tries whether it works again."
    )
