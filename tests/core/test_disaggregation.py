"""Prefill and decode on endpoints of their own: roles, pairs, and who is charged for what."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.scheduling.decision import PrefillPlace, Reason
from picker.core.scheduling.disaggregation import DisaggregationSettings, PrefillDecodeGroup
from picker.core.tickets import PrefillSignal

ROLE = "llm-d.ai/role"
# What llm-d's role filters let through, by role: (prefill, decode).
ROLES = {
    "": (False, True),
    "prefill": (True, False),
    "decode": (False, True),
    "prefill-decode": (True, True),
    "both": (True, True),
    "encode": (False, False),
    "encode-prefill": (True, False),
    "encode-prefill-decode": (True, True),
}
GOOD = Finish(success=True, learned_on=LearnedOn.STREAM_END, status=200, served=None)
BAD = Finish(success=False, learned_on=LearnedOn.STREAM_END, status=502, served=None)


def fleet(*labels, settings=None, seed=0):
    profile = PROFILES[ProfileName.TOKEN_COST]
    spec = SchedulerSpec(
        profile.filters, profile.scorers, profile.args, profile.producers, settings or DisaggregationSettings()
    )
    scheduler, _ = build_scheduler(spec, None, lambda _model, _blocks: None)
    made = Director(scheduler, EndpointTable(), fallbacks=2, rng=random.Random(seed), timer=lambda: 10**12)
    made.replace_endpoints(
        Endpoint(f"p{n}", f"10.0.0.{n}:8000", labels=one if isinstance(one, dict) else {ROLE: one} if one else {})
        for n, one in enumerate(labels)
    )
    return made


def decide(director, text="a" * 40_000, subset=None):
    body = b'{"model": "m", "prompt": "%s"}' % text.encode()
    return director.decide(Decide({":path": b"/v1/completions"}, body, BodyState.COMPLETE, None, subset))


@given(st.lists(st.sampled_from(sorted(ROLES)), min_size=1, max_size=8), st.integers(0, 9))
def test_everyone_does_what_its_role_allows(roles, seed):
    decision = decide(fleet(*roles, seed=seed))
    if not any(ROLES[role] == (True, False) for role in roles):
        # Nobody is there for prefill alone: an ordinary pool.
        assert decision.prefill is decision.prefill_place is None
        assert decision.reason is Reason.ROUTED
        return
    if not any(ROLES[role][1] for role in roles):
        assert decision.reason is Reason.NO_DECODE_ENDPOINT
        assert decision.order == ()
        return
    assert all(ROLES[roles[int(decision.slots[at])]][1] for at in decision.order)
    assert decision.prefill_place is PrefillPlace.APART
    assert ROLES[roles[decision.prefill.slot]][0]
    assert decision.prefill.slot != decision.slot
    assert decision.prefill.prefill is None
    assert decision.headers == (("x-prefiller-host-port", decision.prefill.destinations[0].encode()),)


def test_a_prompt_of_few_tokens_is_computed_where_it_is_continued():
    director = fleet("prefill", "decode", "decode")
    assert decide(director, "a" * 255 * 4).prefill_place is PrefillPlace.FEW_TOKENS
    assert decide(director, "a" * 256 * 4).prefill_place is PrefillPlace.APART
    # What is cached on the decode endpoint does not count.
    long = decide(director)
    director.route(long).finish(GOOD)
    again = decide(director, "a" * 40_000 + "b" * 400)
    assert again.slot == long.slot
    assert again.prefill_place is PrefillPlace.FEW_TOKENS


def test_both_are_recorded_and_each_is_charged_with_its_own_work():
    director = fleet("prefill", "decode")
    table = director.table
    decision = decide(director)
    ticket = director.route(decision)
    assert director.in_flight == 1
    assert table.in_flight[:2].tolist() == [1, 1]
    assert table.queued_tokens[:2].tolist() == [10_000, 0]
    ticket.answered(200, 1_000.5)
    ticket.prefilled(1_001, PrefillSignal.RESPONSE_BODY)
    assert table.in_flight[:2].tolist() == [0, 1]
    assert table.queued_tokens[:2].tolist() == [0, 0]
    ticket.finish(GOOD)
    assert table.in_flight[:2].tolist() == [0, 0]
    assert director.in_flight == 0
    match = decide(director).matches["prefix-cache"].info
    assert match.matched.tolist() == [match.total] * 2


@pytest.mark.parametrize("first_token", [True, False])
def test_a_request_that_fails_leaves_nothing_behind_unless_its_prompt_was_computed(first_token):
    director = fleet("prefill", "decode")
    ticket = director.route(decide(director))
    if first_token:
        ticket.prefilled(1_001, PrefillSignal.RESPONSE_BODY)
    ticket.finish(BAD)
    assert director.table.in_flight[:2].tolist() == [0, 0]
    assert director.table.queued_tokens[:2].tolist() == [0, 0]
    matched = decide(director).matches["prefix-cache"].info.matched
    assert matched.astype(bool).tolist() == [first_token, False]


def test_pairs_stay_within_a_group():
    settings = DisaggregationSettings(
        pd_group=PrefillDecodeGroup(group_key="group", prefill_labels={"pd": "p"}, decode_labels={"pd": "d"})
    )
    labels = [{"group": str(n % 3), "pd": "pd"[n % 2]} for n in range(12)]
    director = fleet(*labels, settings=settings)
    for number in range(20):
        decision = decide(director, f"{number}" * 40_000)
        assert labels[decision.prefill.slot]["pd"] == "p"
        assert {labels[int(decision.slots[at])]["pd"] for at in decision.order} == {"d"}
        groups = {labels[int(decision.slots[at])]["group"] for at in decision.order}
        assert groups == {labels[decision.prefill.slot]["group"]}
        director.route(decision)
    lonely = fleet({"group": "a", "pd": "p"}, {"group": "b", "pd": "d"}, settings=settings)
    decision = decide(lonely)
    assert decision.prefill_place is PrefillPlace.NO_ENDPOINT
    assert decision.destinations == ("10.0.0.1:8000",)
    # Without the label an endpoint is in no group: neither in another's, nor in one of all such.
    for labels in ({"group": "a"}, {}), ({}, {"group": "a"}), ({}, {}):
        lonely = fleet({**labels[0], "pd": "p"}, {**labels[1], "pd": "d"}, settings=settings)
        assert decide(lonely).prefill_place is PrefillPlace.NO_ENDPOINT


def test_the_subset_of_the_gateway_holds_for_both():
    director = fleet("prefill", "prefill", "decode", "decode")
    for number in range(10):
        decision = decide(director, f"{number}" * 40_000, subset=("10.0.0.1", "10.0.0.3"))
        assert decision.destinations == ("10.0.0.3:8000",)
        assert decision.prefill.destinations == ("10.0.0.1:8000",)
    assert decide(director, subset=("10.0.0.2",)).prefill_place is PrefillPlace.NO_ENDPOINT
