"""Two pickers that share their picks against one, on simulated engines in simulated time. Bounds are generous."""

from __future__ import annotations

from statistics import median

import pytest

from bench.affinity import fan_outs, known_parent
from bench.affinity import scheduler as going_by
from bench.replicas import cached_rate, replay
from picker.simulate.families import generate


@pytest.fixture(scope="module")
def chats():
    workload = generate("F2", load=0.6, engines=4, seed=3, seconds=40.0)

    def send(pickers, sharing):
        return replay(workload, lambda: going_by("prefix-cache"), engines=4, pickers=pickers, sharing=sharing)

    return {"one": send(1, False), "two": send(2, True), "alone": send(2, False)}


def test_two_pickers_that_share_find_as_much_as_one(chats):
    assert len(chats["two"]) > 200
    assert cached_rate(chats["two"]) > 0.95 * cached_rate(chats["one"])


def test_two_pickers_that_share_nothing_do_not(chats):
    assert cached_rate(chats["alone"]) < 0.95 * cached_rate(chats["one"])


def test_no_child_of_a_fan_out_is_routed_blind_and_their_first_tokens_come_sooner():
    def children(**arguments):
        outcomes = replay(
            fan_outs(3), lambda: going_by(**arguments), engines=4, pickers=2, sharing=True
        )  # fmt: skip
        return [one for one in outcomes if one.prompt_tokens > 20_000]

    early = children(producer="session-prefix-cache-producer")
    late = children(producer="prefix-cache", record_at_pick=False)
    assert len(early) == len(late) > 40
    assert all(known_parent(child) for child in early)
    assert not any(known_parent(child) for child in late)
    assert median(child.first_token for child in early) < 0.8 * median(child.first_token for child in late)
