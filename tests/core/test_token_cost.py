"""`token-cost`: the formula of the study, and what the scheduler and the director count for it."""

from __future__ import annotations

import math
import random
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.plugins.token_cost import TokenCost
from picker.core.tickets import PrefillSignal
from picker.core.usage import Usage

loads = st.lists(
    st.tuples(st.integers(1, 200_000), st.integers(0, 500_000), st.integers(0, 300)), min_size=1, max_size=12
)


def by_hand(u, q, n, pool):
    """The formula in exact numbers, as the documentation prints it."""
    mean_n = Fraction(sum(other[2] for other in pool), len(pool))
    mean_q = Fraction(sum(other[1] for other in pool), len(pool))
    backlog = mean_q * Fraction(n + 1, max(other[2] for other in pool) + 1)
    return q + u * (1 + Fraction(2 * n) / (mean_n + 1) + backlog / 8192) + 200 * n


@given(loads)
def test_costs_are_those_of_the_formula(pool):
    uncached, queued, in_flight = (np.array(column) for column in zip(*pool, strict=True))
    costs = TokenCost().costs(uncached.astype(float), queued.astype(float), in_flight)
    assert costs.tolist() == pytest.approx([float(by_hand(*one, pool)) for one in pool], rel=1e-9)


@given(loads)
def test_with_equal_numbers_of_requests_the_backlog_is_the_mean_of_the_queues(pool):
    pool = [(u, q, pool[0][2]) for u, q, _ in pool]
    uncached, queued, in_flight = (np.array(column, float) for column in zip(*pool, strict=True))
    n = pool[0][2]
    a8 = queued + uncached * (1 + 2 * n / (n + 1) + queued.mean() / 8192) + 200 * n
    assert TokenCost().costs(uncached, queued, in_flight) == pytest.approx(a8, rel=1e-9)


@given(loads, st.randoms())
def test_the_order_of_endpoints_does_not_matter(pool, dice):
    order = list(range(len(pool)))
    dice.shuffle(order)
    columns = [np.array(column, float) for column in zip(*pool, strict=True)]
    plain = TokenCost().costs(*columns)
    shuffled = TokenCost().costs(*(column[order] for column in columns))
    assert shuffled == pytest.approx(plain[order], rel=1e-9)


@given(loads, st.data())
def test_more_load_never_makes_an_endpoint_cheaper_and_more_cached_never_dearer(pool, data):
    columns = [np.array(column, float) for column in zip(*pool, strict=True)]
    which, at = data.draw(st.sampled_from([0, 1, 2])), data.draw(st.integers(0, len(pool) - 1))
    more = [column.copy() for column in columns]
    more[which][at] += data.draw(st.integers(1, 10_000))
    before, after = TokenCost().costs(*columns)[at], TokenCost().costs(*more)[at]
    assert after > before or after == pytest.approx(before, rel=1e-9)


@given(st.lists(st.one_of(st.just(math.nan), st.floats(1, 1e6)), min_size=1, max_size=12))
def test_only_the_slow_cost_more_and_at_most_four_times(rates):
    slowness = TokenCost().slowness(np.array(rates))
    known = [rate for rate in rates if not math.isnan(rate)]
    if not known or min(known) >= 2 / 3 * statistics.median_high(known):
        assert slowness is None
        return
    usual = 2 / 3 * statistics.median_high(known)
    expected = [1.0 if math.isnan(rate) else min(max(usual / rate, 1.0), 4.0) for rate in rates]
    assert slowness.tolist() == pytest.approx(expected)


# --- What is counted ----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return int(self.now * 1e9)


def director(endpoints=4, profile=ProfileName.TOKEN_COST, seed=0):
    chosen = PROFILES[profile]
    scheduler, notes = build_scheduler(
        SchedulerSpec(chosen.filters, chosen.scorers, chosen.args, chosen.producers), None, lambda _model, _blocks: None
    )
    assert notes == []
    table = EndpointTable()
    clock = Clock()
    made = Director(scheduler, table, fallbacks=0, rng=random.Random(seed), timer=clock)
    made.replace_endpoints(Endpoint(f"p{n}", f"10.0.0.{n}:8000") for n in range(endpoints))
    return made, clock


def completion(text):
    body = b'{"model": "m", "prompt": "%s"}' % text.encode()
    return Decide({":path": b"/v1/completions"}, body, BodyState.COMPLETE, None, None)


def route(fleet, text):
    decision = fleet.decide(completion(text))
    return decision, fleet.route(decision)


GOOD = Finish(success=True, learned_on=LearnedOn.STREAM_END, status=200, served=None)
BAD = Finish(success=False, learned_on=LearnedOn.STREAM_END, status=500, served=None)


def test_tokens_are_queued_until_prefill_is_over_and_only_what_is_not_cached():
    fleet, clock = director()
    text = "a" * 4096
    first, ticket = route(fleet, text)
    assert first.work.prompt == 1024
    assert first.work.source == "prefix-cache"
    assert first.work.uncached.tolist() == [1024] * 4
    assert fleet.table.queued_tokens[first.slot] == 1024
    clock.now += 0.5
    ticket.prefilled(clock.now, PrefillSignal.RESPONSE_BODY)
    assert fleet.table.queued_tokens.sum() == 0
    ticket.prefilled(clock.now, PrefillSignal.END)
    assert fleet.prefill_signals == {PrefillSignal.RESPONSE_BODY: 1}
    # The same again and 100 tokens more: only those count where the rest is.
    again, _ = route(fleet, text + "b" * 400)
    assert again.slot == first.slot
    assert again.work.uncached[again.order[0]] == pytest.approx(100)
    ticket.finish(GOOD)
    assert fleet.table.prefill_rate[first.slot] == pytest.approx(2048)


def test_progress_takes_tokens_away_chunk_by_chunk_and_never_more_than_there_were():
    fleet, clock = director()
    decision, ticket = route(fleet, "a" * 4096)
    ticket.progress(1000, clock.now)
    assert fleet.table.queued_tokens[decision.slot] == 24
    ticket.progress(1000, clock.now)
    ticket.prefilled(clock.now, PrefillSignal.KV_EVENTS)
    ticket.finish(GOOD)
    assert fleet.table.queued_tokens.sum() == 0
    assert fleet.table.in_flight.sum() == fleet.in_flight == 0


@pytest.mark.parametrize("endpoints", [2, 4, 8])
def test_a_burst_with_one_new_prefix_leaves_nobody_idle_and_is_not_computed_more_often_than_that_takes(endpoints):
    """64 requests of 10,000 shared tokens and 100 of their own, at once, on idle endpoints."""
    fleet, _ = director(endpoints)
    prefix = "x" * 40_000
    decisions = [route(fleet, f"{prefix}{number:04} {'y' * 400}")[0] for number in range(64)]
    counts = [sum(decision.slot == slot for decision in decisions) for slot in range(endpoints)]
    assert min(counts) > 0
    assert max(counts) - min(counts) <= 1
    computed = sum(decision.tokens for decision in decisions)
    # Everyone computes the prefix once; the last block of it is counted with what follows.
    assert computed <= 1.1 * (endpoints * 10_000 + 64 * 100)


def test_two_requests_with_one_new_prefix_stay_together():
    fleet, _ = director(8)
    first, second = (route(fleet, "x" * 40_000 + tail)[0] for tail in ("a" * 400, "b" * 400))
    assert first.slot == second.slot


def test_an_endpoint_that_has_answered_may_generate_for_as_long_as_it_likes():
    fleet, clock = director(3)
    tickets = [route(fleet, f"{n}" * 400) for n in range(3)]
    for _, ticket in tickets:
        clock.now += 0.1
        ticket.answered(200, clock.now)
        ticket.prefilled(clock.now, PrefillSignal.RESPONSE_BODY)
    clock.now += 1_000
    assert len(fleet.decide(completion("z" * 400)).endpoints) == 3
    # One that has not is suspect, and not before its work could have been done.
    _, late = route(fleet, "late" * 400)
    clock.now += 1.9
    assert len(fleet.decide(completion("z" * 400)).endpoints) == 3
    clock.now += 20
    assert fleet.table.suspects(fleet.table.slots, clock.now).sum() == 1
    late.answered(200, clock.now)
    clock.now += 1
    assert fleet.table.suspects(fleet.table.slots, clock.now) is None


def test_headers_are_no_sign_of_work_where_the_body_will_be_seen():
    fleet, clock = director(3)
    tickets = [route(fleet, f"{n}" * 400) for n in range(3)]
    for _, ticket in tickets:
        clock.now += 0.1
        ticket.answered(200, clock.now, body_follows=True)
    for _, ticket in tickets[1:]:
        ticket.prefilled(clock.now, PrefillSignal.RESPONSE_BODY)
    clock.now += 20
    hung = tickets[0][0].slot
    assert fleet.table.suspects(fleet.table.slots, clock.now).tolist() == [slot == hung for slot in range(3)]
    tickets[0][1].prefilled(clock.now, PrefillSignal.RESPONSE_BODY)
    clock.now += 1
    assert fleet.table.suspects(fleet.table.slots, clock.now) is None


@given(st.lists(st.tuples(st.sampled_from("rpfexg"), st.integers(0, 40)), max_size=60))
def test_counts_are_never_negative_and_zero_at_rest(steps):
    fleet, clock = director(3)
    under_way = []
    for step, number in steps:
        clock.now += 0.01
        if step == "r":
            under_way.append(route(fleet, f"{number % 5} " * (number * 97 + 1))[1])
        elif under_way:
            ticket = under_way[number % len(under_way)]
            if step == "p":
                ticket.progress(float(number * 50), clock.now)
            elif step == "f":
                ticket.answered(200, clock.now, body_follows=number % 2 == 0)
                ticket.prefilled(clock.now, PrefillSignal.RESPONSE_BODY)
            elif step in "ex":
                under_way.remove(ticket)
                ticket.finish(GOOD if step == "e" else BAD)
            else:
                fleet.replace_endpoints(Endpoint(f"p{n}", f"10.0.0.{n}:8000") for n in range(1 + number % 4))
        assert (fleet.table.queued_tokens >= 0).all()
        assert (fleet.table.in_flight >= 0).all()
    for ticket in under_way:
        ticket.finish(BAD)
    slots = fleet.table.slots
    assert fleet.table.queued_tokens[slots].sum() == pytest.approx(0, abs=1e-3)
    assert fleet.table.in_flight[slots].sum() == fleet.in_flight == 0


def test_tokens_of_a_text_are_learnt_from_what_engines_report():
    fleet, _ = director()
    text = "a" * 8000
    for _ in range(3):
        decision, ticket = route(fleet, text)
        ticket.finish(GOOD, Usage(prompt_tokens=1000))
    assert fleet.decide(completion(text)).work.prompt == pytest.approx(1000)
    assert decision.work.prompt == pytest.approx(1000)


@pytest.mark.parametrize(
    ("stored", "bytes_per_token"),
    [
        (b'"previous_response_id": null, "conversation": null', 8),
        (b'"previous_response_id": "resp_1"', 4),
        (b'"conversation": {"id": "conv_1"}', 4),
    ],
)
def test_tokens_of_turns_that_the_engine_remembers_are_not_taken_for_those_of_the_text(stored, bytes_per_token):
    fleet, _ = director()
    body = b'{"model": "m", "input": "%s", %s}' % (b"a" * 8000, stored)
    asked = Decide({":path": b"/v1/responses"}, body, BodyState.COMPLETE, None, None)
    fleet.route(fleet.decide(asked)).finish(GOOD, Usage(prompt_tokens=1000))
    assert fleet.token_ratio.of("m") == pytest.approx(bytes_per_token, rel=0.01)


def test_an_endpoint_that_was_slow_gets_fewer_requests_and_the_reason_says_so():
    fleet, clock = director(2)
    seconds = (1.0, 0.25)
    for decision, ticket in [route(fleet, f"{number}" * 4096) for number in range(2)]:
        ticket.prefilled(clock.now + seconds[decision.slot], PrefillSignal.RESPONSE_BODY)
        ticket.finish(GOOD)
    assert fleet.table.prefill_rate[fleet.table.slots].tolist() == pytest.approx([1024, 4096])
    decision, _ = route(fleet, "n" * 4096)
    assert decision.slot == 1
    assert decision.costs.tolist() == pytest.approx([8 / 3 * 1024, 1024])
    endpoints = {endpoint["name"]: endpoint for endpoint in decision.view()["endpoints"]}
    assert endpoints["p0"]["cost_milliseconds"] == pytest.approx(1000)
    assert endpoints["p1"]["cost_milliseconds"] == pytest.approx(250)
    assert decision.view()["why"].endswith(
        "The next best is p0, with 2,731, 2.7 times as many because it is slower than others."
    )


def test_a_rate_is_a_mean_over_tokens_and_forgotten_after_a_minute():
    table = EndpointTable()
    table.replace(Endpoint(f"p{n}", f"10.0.0.{n}:8000") for n in range(2))
    table.timed(0, 1_000, 1.0, now=0.0)
    table.timed(0, 20_000, 10.0, now=50.0)
    assert table.prefill_rate[:2].tolist() == pytest.approx([1_500, math.nan], nan_ok=True)
    table.timed(1, 1_000, 1.0, now=100.0)
    assert table.prefill_rate[:2].tolist() == pytest.approx([1_500, 1_000])
    table.timed(1, 1_000, 1.0, now=115.0)
    assert table.prefill_rate[:2].tolist() == pytest.approx([math.nan, 1_000], nan_ok=True)


def test_what_is_no_prompt_costs_by_its_length():
    fleet, _ = director()
    decision = fleet.decide(
        Decide({":path": b"/v1/other"}, b'{"a": "%s"}' % (b"x" * 4000), BodyState.COMPLETE, None, None)
    )
    assert decision.work.source == "length"
    assert decision.work.uncached.tolist() == [pytest.approx(4009 / 4)] * 4


def test_an_index_is_as_large_as_the_engines_cache():
    fleet, _ = director(1)
    fleet.table.cache_tokens[0] = 10_000.0
    for number in range(40):
        _, ticket = route(fleet, f"{number:04}" * 2048)
        ticket.finish(GOOD)
    (producer,) = fleet.scheduler.producers
    held = producer.index.entries * 512 / 4
    assert 10_000 <= held <= 14_000


def test_what_took_no_time_tells_nothing_of_speed():
    fleet, clock = director(2)
    decision, ticket = route(fleet, "a" * 8192)
    clock.now += 0.009
    ticket.prefilled(clock.now, PrefillSignal.RESPONSE_BODY)
    assert np.isnan(fleet.table.prefill_rate[decision.slot])
