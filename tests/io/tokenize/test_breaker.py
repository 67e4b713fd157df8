from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from picker.io.tokenize.breaker import Breaker


def opened() -> Breaker:
    breaker = Breaker()
    assert [breaker.failed(10) for _ in range(3)] == [False, False, True]
    return breaker


def test_three_failures_in_a_row_open_it_for_a_second() -> None:
    breaker = opened()
    assert not breaker.ready(10.9)
    assert breaker.ready(11)


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failed(0)
        breaker.failed(0)
        breaker.succeeded()
    assert breaker.ready(0)


def test_one_trial_at_a_time_and_longer_pauses_while_trials_fail() -> None:
    breaker = opened()
    breaker.begin(11)
    assert not breaker.ready(11.5)
    now, pauses = 11.0, []
    for _ in range(7):
        assert not breaker.failed(now)
        start = now
        while not breaker.ready(now):
            now += 0.5
        pauses.append(now - start)
    assert pauses == [2, 4, 8, 16, 30, 30, 30]
    breaker.succeeded()
    assert breaker.ready(now)


def test_a_target_that_declines_is_left_alone_for_as_long_as_said() -> None:
    breaker = Breaker()
    breaker.give_up(5, 60)
    assert not breaker.ready(64)
    assert breaker.ready(65)


@given(st.lists(st.tuples(st.sampled_from("fsbg"), st.floats(0, 100)), max_size=40))
def test_it_is_always_ready_again_within_the_longest_pause(steps: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    for step, seconds in steps:
        now += seconds
        if step == "f":
            breaker.failed(now)
        elif step == "s":
            breaker.succeeded()
        elif step == "b":
            breaker.begin(now)
        else:
            breaker.give_up(now, 60)
    assert breaker.ready(now + 60)
