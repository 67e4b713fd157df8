"""What policies have to keep to, as ratios within one run of the same traffic."""

from __future__ import annotations

from functools import cache

import pytest

from picker.simulate import report
from picker.simulate.families import generate
from picker.simulate.profiles import BUILT_IN
from picker.simulate.replay import Run, replay
from picker.simulate.report import Row

SECONDS = 90.0
"""Instead of 240: the same, a bit noisier."""


def run(
    family: str, profile: str, *, engines: int = 8, load: float | None = 0.7, stuck: int | None = None, **slow: float
) -> Run:
    traffic = generate(family, load=load, engines=8, seed=5, seconds=SECONDS)
    hung = frozenset() if stuck is None else frozenset({stuck})
    slower = {int(number.removeprefix("engine_")): times for number, times in slow.items()}
    return replay(traffic, BUILT_IN[profile], engines=engines, seed=5, slow=slower, stuck=hung)


@cache
def row(family: str, profile: str, load: float = 0.7) -> Row:
    return report.row(run(family, profile, load=load), load=load, seed=5, profile=profile)


@pytest.mark.parametrize("family", ["F1", "F4", "F7", "F8"])
def test_cached_prompts_are_found_again(family: str) -> None:
    default, blind = row(family, "token-cost"), row(family, "round-robin")
    assert default.ttft_p90 * 1.3 < blind.ttft_p90
    assert default.hit_rate > blind.hit_rate + 0.1


@pytest.mark.parametrize("family", ["F1", "F4", "F7", "F8"])
def test_the_default_is_near_the_best(family: str) -> None:
    others = ("kthena", "llm-d", "lmetric-queued")
    best = min(row(family, profile).ttft_p90 for profile in ("token-cost", *others))
    assert row(family, "token-cost").ttft_p90 <= 1.5 * best


def test_own_history_is_nearly_as_good_as_kv_events() -> None:
    assert row("F4", "token-cost").ttft_p90 <= 1.15 * row("F4", "token-cost-events").ttft_p90
    assert row("F4", "token-cost").hit_rate == pytest.approx(row("F4", "token-cost-events").hit_rate, abs=0.05)


def test_one_hot_prefix_spreads() -> None:
    shares = row("F6", "token-cost").shares
    assert max(shares) < 1.5 / 8
    assert min(shares) > 0.5 / 8


def test_a_burst_leaves_nobody_idle_and_computes_no_more_than_its_times_need() -> None:
    done = run("burst", "token-cost", load=None)
    assert done.idle_while_queued == 0.0
    reached = max(one.first - one.due for one in done.sent)
    computed = report.row(done, load=None, seed=5, profile="").computed_tokens
    for engines in range(1, 9):  # the fewest engines, each with an equal part, that are as fast
        equal = run("burst", "round-robin", load=None, engines=engines)
        if max(one.first - one.due for one in equal.sent) <= reached:
            least = report.row(equal, load=None, seed=5, profile="").computed_tokens
            break
    assert computed <= 1.5 * least


@pytest.mark.parametrize("family", ["F1", "F5"])
def test_an_engine_that_hangs_gets_probes_only_after_five_seconds(family: str) -> None:
    done = run(family, "token-cost", stuck=3)
    later = [one for one in done.measured() if one.due >= done.workload.warm + 5]
    to_it = [one.due for one in later if one.engine == 3]
    assert len(later) > 200
    assert len(to_it) <= 0.02 * len(later)


@pytest.mark.parametrize("family", ["F1", "F5"])
def test_with_an_engine_four_times_slower_times_are_those_of_the_seven_others(family: str) -> None:
    slower = report.row(run(family, "token-cost", engine_0=4.0), load=0.7, seed=5, profile="")
    seven = report.row(run(family, "token-cost", engines=7), load=0.7, seed=5, profile="")
    assert slower.shares[0] < 0.5 / 8
    assert slower.ttft_p99 <= 1.5 * seven.ttft_p99
