"""What it costs that pickers share their picks, how late they know of them, and what it is worth."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from functools import partial
from statistics import fmean, median, quantiles
from typing import Any

from msgspec import Struct

from bench.affinity import scheduler
from bench.fleet import redis, serve
from bench.replicas import cached_rate, replay
from bench.report import Row, progress
from picker.app.demo.report import Summary
from picker.app.demo.workload import Session, Turn, Workload
from picker.core.plugins.session_prefix_cache import NAME as SESSION
from picker.simulate.families import generate

_RATE = 1000
_SECONDS = 4
_ROUNDS = 3
_ENGINES = 4
_SEEDS = 4
_CHATS = 40
_BURSTS = 10


class Told(Struct, frozen=True):
    """One picker tells another of its requests: microseconds of CPU for each request, and milliseconds of lag."""

    told: float
    heard: float
    lags: list[float]


def run() -> list[Row]:
    rows: list[Row] = []
    for size in (4, 32):
        for producer in ("prefix-cache", SESSION):
            progress(f"sharing: {_RATE} requests/s of {size} KiB, {producer}")
            rows += _cost_rows(f"{size} KiB, {producer}", asyncio.run(_costs(size * 1024, producer)))
    for name, family, load in (("chats of 6 turns", "F2", 0.8), ("bursts of 16 to 64", "F7", 0.4)):
        progress(f"sharing: {name}, simulated time")
        rows += _simulated(name, family, load)
    progress("sharing: conversations and bursts through Envoy")
    return rows + asyncio.run(_through_envoy())


def _cost_rows(what: str, rounds: list[Told]) -> list[Row]:
    percentiles = [quantiles(one.lags, n=100) for one in rounds]
    p50, p99 = median(one[49] for one in percentiles), median(one[98] for one in percentiles)
    told, heard = median(one.told for one in rounds), median(one.heard for one in rounds)
    measured = f"{_RATE} requests/s, batches of 20 ms"
    return [
        Row(f"sharing, {what}: from pick to known, p50", measured, p50, "ms", 30.0),
        Row(f"sharing, {what}: from pick to known, p99", measured, p99, "ms", 50.0),
        Row(f"sharing, {what}: CPU per request, told", measured, told, "us", 30.0),
        Row(f"sharing, {what}: CPU per request, heard", measured, heard, "us", 30.0),
    ]


async def _costs(size: int, producer: str) -> list[Told]:
    rounds = []
    async with redis() as port:
        for _ in range(_ROUNDS):
            alone = await _picker(0, _RATE, size, producer)
            telling, hearing = await asyncio.gather(
                _picker(port, _RATE, size, producer), _picker(port, 0, size, producer)
            )
            told = telling["microseconds"] - alone["microseconds"]
            rounds.append(Told(told, hearing["microseconds"], hearing["lags"]))
    return rounds


async def _picker(port: int, rate: int, size: int, producer: str) -> dict[str, Any]:
    arguments = map(str, (port, rate, _SECONDS, size, producer))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.sharing_picker", *arguments), stdin=DEVNULL, stdout=PIPE
    )
    output, _ = await process.communicate()
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _simulated(what: str, family: str, load: float) -> list[Row]:
    arms = {"one": (1, False), "two": (2, True), "two that share nothing": (2, False)}
    rates: dict[str, float] = {}
    times: dict[str, float] = {}
    for name, (pickers, sharing) in arms.items():
        found = [
            replay(
                generate(family, load=load, engines=_ENGINES, seed=seed, seconds=60.0),
                partial(scheduler, "prefix-cache"),
                engines=_ENGINES,
                pickers=pickers,
                sharing=sharing,
                seed=seed,
            )
            for seed in range(_SEEDS)
        ]
        every = [outcome for outcomes in found for outcome in outcomes]
        rates[name] = cached_rate(every)
        times[name] = quantiles([outcome.first_token for outcome in every], n=10)[8]
    return _compared(f"{what}, simulated time", rates, times)


def _compared(what: str, rates: dict[str, float], times: dict[str, float]) -> list[Row]:
    """Rows of two pickers against one. Rates are compared by their inverses, so that less is better."""
    one, two, alone = rates
    return [
        Row(f"{what}: cached tokens, one picker / {name}", f"{rates[one]:.1%} / {rates[name]:.1%}",
            rates[one] / rates[name], "x", 1 / 0.98 if name == two else None)
        for name in (two, alone)
    ] + [
        Row(f"{what}: TTFT p90, {name} / one picker", f"{times[name] * 1e3:.0f} / {times[one] * 1e3:.0f} ms",
            times[name] / times[one], "x", 1.05 if name == two else None)
        for name in (two, alone)
    ]  # fmt: skip


async def _through_envoy() -> list[Row]:
    """All arms take turns, with the same conversations each; what is compared are means of several such rounds."""
    kinds: tuple[tuple[str, Callable[[int], Workload], int], ...] = (("chats", _chats, 4), ("bursts", _bursts, 1))
    arms = (("one", 1, False), ("two", 2, True), ("two that share nothing", 2, False))
    rows: list[Row] = []
    async with redis() as port:
        for what, workload, rounds in kinds:
            found: dict[str, list[Summary]] = {name: [] for name, *_ in arms}
            for seed in range(rounds):
                for name, pickers, share in arms:
                    arm = await serve(
                        workload(seed), {}, engines=_ENGINES, pickers=pickers, redis_port=port if share else None
                    )
                    found[name].append(arm)
                each = {name: [f"{arm.cached_token_rate:.1%}" for arm in every] for name, every in found.items()}
                progress(f"{what} through Envoy, cached tokens: {each}")
            rows += _compared(
                f"{what} through Envoy",
                {name: fmean(arm.cached_token_rate for arm in every) for name, every in found.items()},
                {name: fmean(arm.ttft_p90_ms for arm in every) / 1e3 for name, every in found.items()},
            )
    return rows


def _chats(seed: int) -> Workload:
    """Conversations of five turns, each with a beginning of 3,000 tokens of its own; eight requests a second."""
    rng = random.Random(seed)
    sessions, start = [], 0.0
    for number in range(_CHATS):
        start += rng.expovariate(1.6)
        turns = (Turn(rng.expovariate(1.0), _text(rng, rng.randint(50, 300)), rng.randint(20, 60)) for _ in range(5))
        sessions.append(Session(start, number, tuple(turns)))
    return Workload(tuple(_text(rng, 3000) for _ in sessions), tuple(sessions))


def _bursts(seed: int) -> Workload:
    """Every two seconds 8 to 24 requests within 20 ms with a new beginning of 6,000 tokens."""
    rng = random.Random(seed)
    prompts, sessions = [], []
    for number in range(_BURSTS):
        prompts.append(_text(rng, 6000))
        for _ in range(rng.randint(8, 24)):
            turn = Turn(0.0, _text(rng, rng.randint(50, 200)), rng.randint(10, 40))
            sessions.append(Session(2.0 * number + rng.uniform(0, 0.02), number, (turn,)))
    return Workload(tuple(prompts), tuple(sorted(sessions, key=lambda session: session.start)))


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choices(("act", "air", "arm", "art", "bar", "bat"), k=tokens))
