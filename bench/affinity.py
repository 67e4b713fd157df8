"""What knowing conversations is worth: fan-outs and conversations, by what a picker goes by."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import msgspec

from bench.fleet import serve
from bench.replicas import Outcome, cached_rate, replay
from bench.report import Row, progress
from picker.app.demo.workload import Session, Turn, Workload
from picker.core.plugins.prefix_cache_args import WHOLE_PROMPT
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.plugins.session_prefix_cache import NAME as SESSION
from picker.core.scheduling.scheduler import Scheduler
from picker.simulate import workload as simulated
from picker.simulate.families import generate
from picker.simulate.profiles import BUILT_IN, Profile
from picker.simulate.replay import replay as simulate

_ENGINES = 4
_PARENT = 20_000
"""Tokens of the parent's context."""
_WITHIN = 3.0
"""Seconds after the parent that its children come, while it is being answered."""
_ENVOY_CHILDREN = (16, 40, 64)
_LATE = msgspec.structs.replace(WHOLE_PROMPT, recordAtPick=False)


def run() -> list[Row]:
    progress("sessions: fan-outs and conversations, simulated time")
    rows = [*_simulated_fan_outs(), *_simulated_chats()]
    progress("sessions: fan-outs through Envoy")
    return rows + asyncio.run(_fan_outs_through_envoy())


def scheduler(producer: str, *, record_at_pick: bool = True) -> Scheduler:
    """The default policy, by what this producer knows."""
    profile = PROFILES[ProfileName.TOKEN_COST]
    args = {"prefix-cache": WHOLE_PROMPT if record_at_pick else _LATE}
    spec = SchedulerSpec(profile.filters, profile.scorers, args, (producer,))
    return build_scheduler(spec, None, lambda *_: None)[0]


_ARMS: Mapping[str, Callable[[], Scheduler]] = {
    "by session": partial(scheduler, SESSION),
    "prefix-cache": partial(scheduler, "prefix-cache"),
    "prefix-cache, recorded at the end": partial(scheduler, "prefix-cache", record_at_pick=False),
}


def _simulated_fan_outs() -> list[Row]:
    times: dict[str, float] = {}
    rows = []
    for name, build in _ARMS.items():
        outcomes = replay(fan_outs(12), build, engines=_ENGINES, pickers=1, sharing=False)
        children = [one for one in outcomes if one.prompt_tokens != _PARENT]
        times[name] = median(one.first_token for one in children)
        blind = sum(not known_parent(one) for one in children)
        measured = f"of {len(children)}; cached tokens {cached_rate(children):.1%}"
        row = Row(f"fan-out, simulated time: children routed blind, {name}", measured, blind, "children",
                  0.0 if name == "by session" else None)  # fmt: skip
        rows.append(row)
    return rows + _fan_out_rows("fan-out, simulated time", times)


def _fan_out_rows(what: str, times: dict[str, float]) -> list[Row]:
    ours, *others = times
    return [
        Row(
            f"{what}: children's TTFT p50, {ours} / {other}",
            f"{times[ours] * 1e3:.0f} / {times[other] * 1e3:.0f} ms",
            times[ours] / times[other],
            "x",
            0.8 if "at the end" in other else None,
        )
        for other in others
    ]


def known_parent(child: Outcome) -> bool:
    """Whether the picker knew who has its parent's context. It is matched in blocks: 512 bytes at its end may not be."""
    return child.known_tokens > _PARENT - 128


def fan_outs(count: int) -> simulated.Workload:
    """Parents, and 16 to 64 children of each at once."""
    rng, fresh = random.Random(1), simulated.FreshTokens()
    sessions = []
    for number in range(count):
        context = fresh.take(_PARENT)
        start = 30.0 * number
        sessions.append(simulated.Session(start, (simulated.Call((context,), fresh.take(500)),)))
        for _ in range(rng.randint(16, 64)):
            call = simulated.Call((context, fresh.take(rng.randint(100, 400))), fresh.take(rng.randint(100, 300)))
            sessions.append(simulated.Session(start + _WITHIN, (call,)))
    return simulated.Workload("fan-outs", sessions, 0.0, 30.0 * count)


def _simulated_chats() -> list[Row]:
    profiles = [Profile(name, "", lambda _, build=build: build()) for name, build in _ARMS.items()]  # type: ignore[misc]
    rows = []
    workload = generate("F2", load=0.8, engines=_ENGINES, seed=1, seconds=90.0)
    for profile in (*profiles, BUILT_IN["token-cost-events"]):
        calls = simulate(workload, profile, engines=_ENGINES, seed=1).measured()
        lacking = 1 - sum(call.cached_tokens for call in calls) / sum(call.prompt_tokens for call in calls)
        name = "kvcache-aware" if profile.name == "token-cost-events" else profile.name
        ttft = median(call.first - call.due for call in calls) * 1e3
        measured = f"{len(calls)} requests, TTFT p50 {ttft:.0f} ms"
        rows.append(Row(f"chats of 6 turns, simulated time: tokens computed, {name}", measured, lacking * 100, "%"))
    return rows


async def _fan_outs_through_envoy() -> list[Row]:
    at_end = {name: getattr(_LATE, name) for name in _LATE.__struct_fields__}
    arms: dict[str, dict[str, Any]] = {
        "by session": {"pluginConfig": [{"name": SESSION, "args": {"cacheTokens": 1_000_000}}]},
        "prefix-cache, recorded at the end": {"pluginConfig": [{"name": "prefix-cache", "args": at_end}]},
    }
    times = {
        name: (await serve(_real_fan_outs(), plugins, engines=_ENGINES, read_answers=True)).ttft_p50_ms / 1e3
        for name, plugins in arms.items()
    }
    return _fan_out_rows("fan-out through Envoy", times)


def _real_fan_outs() -> Workload:
    rng = random.Random(1)
    prompts, sessions = [], []
    for number, children in enumerate(_ENVOY_CHILDREN):
        start = 12.0 * number
        prompts.append(" ".join(rng.choices(("act", "air", "arm", "art", "bar", "bat"), k=_PARENT)))
        sessions.append(Session(start, number, (Turn(0.0, "Divide the work.", 300),)))
        for child in range(children):
            turn = Turn(0.0, f"Do part {child}. " * 20, rng.randint(20, 60))
            sessions.append(Session(start + _WITHIN, number, (turn,)))
    return Workload(tuple(prompts), tuple(sessions))
