"""What happens between the picker and the engines, whatever the policy."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from picker.core.admission.settings import AdmissionSettings
from picker.sim.limits import EngineLimits
from picker.simulate import replay as module
from picker.simulate import report
from picker.simulate.families import generate
from picker.simulate.profiles import BUILT_IN
from picker.simulate.replay import Run, replay
from picker.simulate.workload import Call, Session, Workload, sheddable

ENGINES = 4


def workload(name: str = "F8", seconds: float = 30.0, load: float = 0.8) -> Workload:
    return generate(name, load=load, engines=ENGINES, seed=7, seconds=seconds)


def again(profile: str, **options: object) -> Run:
    return replay(workload(), BUILT_IN[profile], engines=ENGINES, seed=3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", BUILT_IN)
def test_the_same_seed_gives_the_same_run(profile: str) -> None:
    rows = [report.row(again(profile), load=0.8, seed=3, profile=profile) for _ in range(2)]
    assert rows[0] == rows[1]
    assert rows[0].requests > 100
    assert rows[0].unanswered == 0
    assert rows[0].refused == {}


def test_calls_are_the_same_for_all_profiles() -> None:
    traffic = workload("F1")
    sent = [
        [(one.due, one.prompt_tokens) for one in replay(traffic, BUILT_IN[name], engines=ENGINES, seed=1).sent]
        for name in ("token-cost", "round-robin")
    ]
    assert sent[0] == sent[1]
    assert len(sent[0]) == traffic.calls


@pytest.mark.parametrize("profile", ["token-cost", "token-cost-events", "kthena"])
def test_nothing_is_left_when_all_calls_have_ended(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[module._Replay] = []
    construct = module._Replay.__init__

    def remember(self: module._Replay, *arguments: object) -> None:
        construct(self, *arguments)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(module._Replay, "__init__", remember)
    again(profile)
    (state,) = made
    assert state._director.in_flight == 0
    assert not state._table.in_flight.any()
    assert not state._table.queued_tokens.any()
    assert not state._under_way
    assert all(engine.idle for engine in state._engines)


def test_a_session_goes_on_when_it_was_answered() -> None:
    calls = tuple(Call((range(100),), range(1000, 1010), think) for think in (0.0, 2.0, 3.0))
    one, two, three = replay(
        Workload("test", [Session(1.0, calls)], 0.0, 100.0), BUILT_IN["random"], engines=2, seed=1
    ).sent
    assert one.due == 1
    assert two.due == pytest.approx(one.ended + 2)
    assert three.due == pytest.approx(two.ended + 3)


def test_calls_that_are_due_after_the_end_are_not_sent() -> None:
    calls = tuple(Call((range(100),), range(1000, 1010), think) for think in (0.0, 2.0, 300.0))
    told: list[int] = []
    run = replay(
        Workload("test", [Session(1.0, calls), Session(101.0, calls)], 0.0, 100.0),
        BUILT_IN["random"],
        engines=2,
        seed=1,
        told=told.append,
    )
    assert len(run.sent) == 2
    assert sum(told) == 6


def test_only_what_is_due_after_warming_up_is_measured() -> None:
    sessions = [Session(float(at), (Call((range(100),), range(1000, 1010)),)) for at in range(10)]
    run = replay(Workload("test", sessions, 4.0, 100.0), BUILT_IN["random"], engines=2, seed=1)
    assert [one.due for one in run.measured()] == [4, 5, 6, 7, 8, 9]


def test_what_no_engine_could_run_is_refused() -> None:
    limits = EngineLimits(block_size=64, num_gpu_blocks=11)
    calls = (Call((range(600),), range(1000, 1100)), Call((range(10),), range(2000, 2010)))
    run = replay(
        Workload("test", [Session(0.0, calls)], 0.0, 100.0), BUILT_IN["token-cost"], engines=2, seed=1, limits=limits
    )
    assert run.refused == Counter(too_long=1)
    assert run.sent == []
    assert report.row(run, load=None, seed=1, profile="x").shed_rate == 1.0


def test_sheddable_sessions_are_refused_while_all_engines_are_saturated() -> None:
    traffic = sheddable(generate("F5", load=1.5, engines=1, seed=7, seconds=30), 0.5, seed=7)
    allowed = {session.start for session in traffic.sessions if session.sheddable}
    assert len(allowed) / len(traffic.sessions) == pytest.approx(0.5, abs=0.15)
    calm = structs.replace(
        BUILT_IN["token-cost"], admission=AdmissionSettings(max_waiting_requests=1e6, max_kv_usage=1)
    )
    assert not replay(traffic, calm, engines=1, seed=1).refused
    run = replay(traffic, BUILT_IN["token-cost"], engines=1, seed=1)
    assert run.refused["saturated"] > 5
    assert {session.start for session in traffic.sessions} - {one.due for one in run.sent} <= allowed


def test_a_stuck_engine_leaves_calls_unanswered() -> None:
    run = again("round-robin", stuck=frozenset({2}))
    unanswered = Counter(one.engine for one in run.sent if not one.answered)
    assert set(unanswered) == {2}
    assert all(one.answered or one.engine == 2 for one in run.sent)
    before = [one for one in run.sent if one.engine == 2 and one.answered]
    assert before
    assert all(one.ended <= run.workload.warm + 10 for one in before)


def test_idle_while_queued_is_the_time_in_which_one_had_nothing_and_another_two() -> None:
    # Of four prompts of 20,000 tokens on one engine, two or more wait until the second is admitted. The budget of a step
    # is 8192 tokens: the first is done in the third step, which has room for 8192 - 3616 tokens of the second, and so on.
    prompts = [Session(0.0, (Call((range(at * 10**6, at * 10**6 + 20_000),), range(5, 6)),)) for at in range(4)]
    alone = replay(Workload("test", prompts, 0.0, 1.0), BUILT_IN["random"], engines=1, seed=1)
    assert alone.idle_while_queued == 0.0
    both = replay(Workload("test", prompts, 0.0, 1.0), BUILT_IN["least-request"], engines=2, seed=1)
    assert both.idle_while_queued == 0.0
    stuck = replay(Workload("test", prompts, 0.0, 1.0), BUILT_IN["lmetric"], engines=1, seed=1, stuck=frozenset({0}))
    assert not any(one.answered for one in stuck.sent)
