"""Times of simulated engines against those that the formula of the study gives by hand.

step = slow * (16 ms + 83 us * SUM chunk * (1 + middle of its context / 40,000) + 60 us * decodes + 38 ns * their context)
"""

from __future__ import annotations

import pytest

from picker.simulate.profiles import BUILT_IN
from picker.simulate.replay import Run, replay
from picker.simulate.workload import Call, Session, Workload

BASE = 0.016


def prefill(chunk: int, before: int) -> float:
    return 83e-6 * chunk * (1 + (before + chunk / 2) / 40_000)


def decode(*contexts: int) -> float:
    return 60e-6 * len(contexts) + 38e-9 * sum(contexts)


def run(*sessions: Session, engines: int = 1, slow: dict[int, float] | None = None) -> Run:
    workload = Workload("test", sessions, 0.0, 100.0)
    return replay(workload, BUILT_IN["least-request"], engines=engines, seed=1, slow=slow)


def call(prompt: range, answer: int, think: float = 0.0) -> Call:
    return Call((prompt,), range(10**9, 10**9 + answer), think)


def test_one_prompt_and_three_tokens() -> None:
    (sent,) = run(Session(5.0, (call(range(1000), 3),))).sent
    first = BASE + prefill(1000, 0)
    assert sent.first - sent.due == pytest.approx(first)
    assert sent.ended - sent.due == pytest.approx(first + BASE + decode(1001) + BASE + decode(1002))


def test_a_long_prompt_takes_a_step_for_every_8192_tokens() -> None:
    (sent,) = run(Session(0.0, (call(range(20_000), 1),))).sent
    chunks = prefill(8192, 0) + prefill(8192, 8192) + prefill(3616, 16_384)
    assert sent.first == pytest.approx(3 * BASE + chunks)
    assert sent.ended == sent.first


def test_what_is_cached_is_not_computed_but_the_last_token_always_is() -> None:
    first, second, third = run(
        Session(0.0, (call(range(1000), 1), call(range(1000), 1, 2.0), call(range(640), 1, 2.0)))
    ).sent
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 15 * 64, 9 * 64)
    assert second.due == pytest.approx(first.ended + 2)
    assert second.first - second.due == pytest.approx(BASE + prefill(40, 960))
    assert third.first - third.due == pytest.approx(BASE + prefill(64, 576))


def test_prompts_share_a_step_and_decodes_go_on_in_it() -> None:
    one = Session(0.0, (call(range(1000), 100),))
    # Both arrive in the first step, and are computed together in the second, while the first one decodes.
    two = Session(0.01, (call(range(5000, 5500), 100),))
    three = Session(0.02, (call(range(9000, 9300), 100),))
    sent = run(one, two, three).sent
    begun = BASE + prefill(1000, 0)
    assert sent[0].first == pytest.approx(begun)
    both = begun + BASE + prefill(500, 0) + prefill(300, 0) + decode(1001)
    assert sent[1].first == sent[2].first == pytest.approx(both)


def test_a_prompt_gets_what_decodes_leave_of_a_step() -> None:
    one = Session(0.0, (call(range(100), 100),))
    two = Session(0.01, (call(range(5000, 5000 + 8192), 100),))
    sent = run(one, two).sent
    # One token of the budget of 8192 is the first request's, so the second needs another step for its last token.
    begun = BASE + prefill(100, 0)
    assert sent[1].first == pytest.approx(begun + 2 * BASE + prefill(8191, 0) + prefill(1, 8191) + decode(101, 102))


def test_a_slow_engine_takes_so_many_times_as_long() -> None:
    (sent,) = run(Session(0.0, (call(range(1000), 2),)), slow={0: 4.0}).sent
    assert sent.first == pytest.approx(4 * (BASE + prefill(1000, 0)))
    assert sent.ended == pytest.approx(4 * (2 * BASE + prefill(1000, 0) + decode(1001)))


def test_who_does_not_fit_waits_and_nobody_overtakes() -> None:
    # 384,000 tokens fit, less the hundredth that stays free: of four prompts of 120,000 tokens the fourth has to wait.
    sessions = [
        Session(number / 1000, (call(range(number * 10**6, number * 10**6 + 120_000), 2),)) for number in range(4)
    ]
    small = Session(0.5, (call(range(10**8, 10**8 + 10), 2),))
    *large, last = run(*sessions, small).sent
    assert large[3].first > large[0].ended
    assert last.first >= large[3].first - 1e-9
