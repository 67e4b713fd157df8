"""What policies are worth on traffic that passes a real Envoy: simulated engines, and clients that measure.

The engines and the clients run in this process, which is idle enough for that: `lateness` says if it was not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

import aiohttp
from msgspec import Struct

from bench import rig
from bench.report import Row, progress
from picker.app.demo.load import MODEL, Outcome, send
from picker.app.demo.report import percentile
from picker.app.demo.workload import Session, Shape, Turn, Workload, plan
from picker.app.envoy import Template
from picker.sim.config import EngineSimConfig
from picker.sim.launch import RunningEngine, start_engine
from picker.sim.limits import EngineLimits

_PROFILES = ("token-cost", "kthena", "llm-d")
_ENGINES = 8
_SECONDS = 20.0
_WARM_SHARE = 1 / 3
"""Of the answers, the first ones, that are not measured."""
_SLOWER = 4.0

_SHARED = Shape(mean_turns=1.0, requests_per_second=3.0, speed=1.0)
_TURNS = Shape(mean_turns=6.0, prompts=1, prompt_tokens=1_000, think_seconds=1.0, requests_per_second=4.0, speed=1.0)
_BURST = 64
_PREFIX_TOKENS = 10_000
_OWN_TOKENS = 75
_LOOK_SECONDS = 0.01


class _Fleet(Struct, frozen=True):
    url: str
    engines: Sequence[RunningEngine]

    def total(self, name: str) -> int:
        return sum(engine.stats()[name] for engine in self.engines)


class _Times(Struct, frozen=True):
    """Seconds to the first token, of the answers that are measured."""

    p90: float
    p99: float
    cached: float
    """Share of prompt tokens that came from a cache."""
    lateness: float
    slow_share: float = 0.0
    """Of the answers, those of the engine with number 0."""


def run() -> list[Row]:
    return asyncio.run(_run())


async def _run() -> list[Row]:
    rows: list[Row] = []
    for name, workload in _traffic().items():
        times = {profile: await _measure(f"{name}, {profile}", workload, profile) for profile in _PROFILES}
        for profile, found in times.items():
            cached = f"{found.cached:.1%} cached, clients late by {found.lateness * 1000:.0f} ms"
            rows.append(Row(f"{name}, {profile}: TTFT p90", cached, found.p90 * 1000, "ms"))
        best = min(found.p90 for profile, found in times.items() if profile != _PROFILES[0])
        what = f"{name}: TTFT p90, token-cost / the best of the others"
        rows.append(Row(what, "", times[_PROFILES[0]].p90 / best, "x", 1.1))
    rows += await _one_burst()
    workload = plan(_SHARED, engines=_ENGINES, seconds=_SECONDS * 2, seed=2)
    seven = await _measure("seven engines", workload, _PROFILES[0], engines=_ENGINES - 1)
    slow = await _measure("one of eight slower", workload, _PROFILES[0], slower=_SLOWER)
    measured = (
        f"{slow.p99 * 1000:.0f} / {seven.p99 * 1000:.0f} ms, the slow one had {slow.slow_share:.1%} of the requests"
    )
    rows.append(Row("one of 8 engines 4 times slower / 7 engines: TTFT p99", measured, slow.p99 / seven.p99, "x", 1.5))
    return rows


def _traffic() -> dict[str, Workload]:
    return {
        "shared prefixes": plan(_SHARED, engines=_ENGINES, seconds=_SECONDS, seed=1),
        "conversations": plan(_TURNS, engines=_ENGINES, seconds=_SECONDS, seed=1),
        "bursts": _bursts(),
    }


def _bursts() -> Workload:
    """Every few seconds 16 to 64 requests with one new prefix, and other prompts all the time."""
    rng = random.Random(1)
    prompts: list[str] = []
    sessions: list[Session] = []

    def ask(start: float, tokens: int) -> None:
        sessions.append(Session(start, len(prompts) - 1, (Turn(0.0, _text(rng, tokens), rng.randint(20, 60)),)))

    start = 0.0
    while (start := start + 3.0) < _SECONDS:
        prompts.append(_text(rng, rng.randint(6_000, 12_000)))
        for _ in range(rng.randint(16, _BURST)):
            ask(start, rng.randint(200, 400))
    start = 0.0
    while (start := start + rng.expovariate(6.0)) < _SECONDS:
        prompts.append(_text(rng, rng.randint(500, 3_000)))
        ask(start, 100)
    return Workload(tuple(prompts), tuple(sessions))


def _text(rng: random.Random, tokens: int) -> str:
    """Text that is so many tokens of a simulated engine, four bytes each."""
    return rng.randbytes(2 * tokens).hex()


async def _measure(
    what: str, workload: Workload, profile: str, *, engines: int = _ENGINES, slower: float = 1.0
) -> _Times:
    progress(f"policies: {what}: {workload.requests} requests")
    async with _fleet(profile, engines, cache_blocks=_SHARED.cache_blocks) as fleet:
        if slower > 1:
            fault = {"mode": "slow", "factor": slower}
            async with aiohttp.request("POST", f"{fleet.engines[0].url}/sim/faults", json=fault) as answer:
                answer.raise_for_status()
        outcomes = await send(fleet.url, workload, lambda _: None)
    times = _times(outcomes)
    progress(f"policies: {what}: TTFT p90 {times.p90 * 1000:.0f} ms, p99 {times.p99 * 1000:.0f} ms")
    return times


def _times(outcomes: Sequence[Outcome]) -> _Times:
    if failed := next((outcome.error for outcome in outcomes if outcome.error), None):
        raise RuntimeError(f"a request failed: {failed}")
    measured = outcomes[int(len(outcomes) * _WARM_SHARE) :]
    first = [outcome.first_token for outcome in measured]
    return _Times(
        percentile(first, 90),
        percentile(first, 99),
        sum(outcome.cached_tokens for outcome in measured) / sum(outcome.prompt_tokens for outcome in measured),
        percentile([outcome.lateness for outcome in measured], 99),
        sum(outcome.engine == "0" for outcome in measured) / len(measured),
    )


async def _one_burst() -> list[Row]:
    """All at once on idle engines, some times."""
    computed: list[float] = []
    idle: list[float] = []
    used = _ENGINES
    for seed in range(3):
        progress("policies: a burst of one new prefix")
        rng = random.Random(seed)
        sessions = tuple(Session(0.0, 0, (Turn(0.0, _text(rng, _OWN_TOKENS), 20),)) for _ in range(_BURST))
        workload = Workload((_text(rng, _PREFIX_TOKENS),), sessions)
        async with _fleet(_PROFILES[0], _ENGINES) as fleet:
            task = asyncio.create_task(_idle_while_queued(fleet))
            await send(fleet.url, workload, lambda _: None)
            task.cancel()
            used = sum(engine.stats()["requests"] > 0 for engine in fleet.engines)
            least = used * _PREFIX_TOKENS + _BURST * _OWN_TOKENS
            computed.append((fleet.total("prompt_tokens") - fleet.total("cached_tokens")) / least)
            idle.append(await task)
    what = f"{_BURST} requests with one new prefix of {_PREFIX_TOKENS} tokens on {_ENGINES} engines"
    return [
        Row(f"{what}: computed / once for each engine used", f"{used} used", median(computed), "x", 1.5),
        Row(f"{what}: an engine idle while another queues two", "once all had come", median(idle) * 1000, "ms", 20.0),
    ]


async def _idle_while_queued(fleet: _Fleet) -> float:
    """Seconds of it, until cancelled."""
    loop, found = asyncio.get_running_loop(), 0.0
    looked = loop.time()
    try:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now, stats = loop.time(), [engine.stats() for engine in fleet.engines]
            idle = any(not one["running"] and not one["waiting"] for one in stats)
            if idle and any(one["waiting"] >= 2 for one in stats) and fleet.total("requests") == _BURST:
                found += now - looked
            looked = now
    except asyncio.CancelledError:
        return found


@asynccontextmanager
async def _fleet(profile: str, engines: int, *, cache_blocks: int | None = None) -> AsyncIterator[_Fleet]:
    """Engines, a picker with nothing but a profile and their addresses, and an Envoy in front of them."""
    limits = EngineLimits() if cache_blocks is None else EngineLimits(num_gpu_blocks=cache_blocks)
    async with AsyncExitStack() as exits:
        started: list[RunningEngine] = []
        for number in range(engines):
            started.append(await start_engine(EngineSimConfig(name=str(number), model=MODEL, limits=limits, grace=0.1)))
            exits.push_async_callback(started[-1].close)
        ports = [engine.port for engine in started]
        static = [{"name": f"engine-{port}", "address": f"127.0.0.1:{port}"} for port in ports]
        config = {"endpoints": {"static": static}, "scheduler": {"profile": profile}}
        server = await exits.enter_async_context(rig.picker_process(config))
        envoy = await exits.enter_async_context(rig.envoy(Template.FULL_DUPLEX, server, ports))
        yield _Fleet(f"http://127.0.0.1:{envoy.port}", started)
