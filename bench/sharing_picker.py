"""A picker's core with requests at a steady rate, which shares its picks or not: a process of its own.

`python -m bench.sharing_picker REDIS_PORT RATE SECONDS SIZE PRODUCER`: port 0 shares nothing, rate 0 only hears. Prints
a line when it has met another picker, and at the end what it used and heard.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import cast

import numpy as np
import uvloop

from bench.bodies import Bodies
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng
from picker.core.scheduling.decision import Decision
from picker.core.scheduling.scheduler import Scheduler
from picker.core.tickets import Sharing
from picker.core.usage import Usage
from picker.io.kv_index.redis_connection import RedisSettings
from picker.io.sharing.picks import SharedPicks

_ENDPOINTS = 8
_HEADERS = {":method": b"POST", ":path": b"/v1/chat/completions", "content-type": b"application/json"}
_DECISIONS = 2000
_PREFILL_SECONDS = 0.05
_REQUEST_SECONDS = 0.2
_SETTLE_SECONDS = 1.0


class Pick:
    """A match that tells when it was picked. Learns nothing."""

    def __init__(self, info: MatchInfo) -> None:
        self.info = info
        self.at = 0.0

    def shared(self, slot: int) -> bytes:  # noqa: ARG002
        return struct.pack("d", self.at)

    def picked(self, slot: int) -> Pick:  # noqa: ARG002
        return self

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None: ...

    def undo(self) -> None: ...


class Stopwatch:
    """A producer of pick times: another picker's becomes known when it is adopted."""

    name = "stopwatch"

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.info = MatchInfo(np.zeros(_ENDPOINTS, np.int64), 0, "picks")

    def match(self, request: Request, candidates: Candidates, rng: Rng) -> Pick:  # noqa: ARG002
        return Pick(self.info)

    def adopt(self, slot: int, shared: bytes, now: float) -> None:  # noqa: ARG002
        (picked,) = struct.unpack("d", shared)
        self.lags.append((time.monotonic() - picked) * 1e3)

    def reconfigure(self, args: object) -> bool:  # noqa: ARG002
        return True

    def forget(self, slot: int) -> None: ...

    def restarted(self, slot: int) -> None: ...


def _director(producer: str, stopwatch: Stopwatch) -> Director:
    profile = PROFILES[ProfileName.TOKEN_COST]
    spec = SchedulerSpec(profile.filters, profile.scorers, profile.args, (producer,))
    plain, _ = build_scheduler(spec, None, lambda _model, _blocks: None)
    scheduler = Scheduler((), (*plain.producers, stopwatch), plain.scorers, counts_work=True)
    director = Director(scheduler, EndpointTable(), fallbacks=2, rng=random.Random(1), timer=time.perf_counter_ns)
    director.replace_endpoints(Endpoint(f"pod-{n}", f"10.0.0.{n + 1}:8000") for n in range(_ENDPOINTS))
    return director


def _decisions(director: Director, size: int) -> list[Decision]:
    """Decisions that are made before time is taken, so that only sharing is measured."""
    bodies = Bodies(size)
    return [director.decide(Decide(_HEADERS, bodies.next(), BodyState.COMPLETE, None, None)) for _ in range(_DECISIONS)]


async def _requests(decisions: Sequence[Decision], sharing: Sharing | None, rate: float, seconds: float) -> int:
    """Poisson arrivals; each is computed after 50 ms and over after 200 ms."""
    rng, sent = random.Random(2), 0
    running: deque[tuple[float, int, str]] = deque()
    computing: deque[tuple[float, int]] = deque()
    due = time.monotonic()
    until = due + seconds
    while due < until:
        await asyncio.sleep(max(due - time.monotonic(), 0))
        now = time.monotonic()
        decision = decisions[sent % len(decisions)]
        cast("Pick", decision.matches[Stopwatch.name]).at = now
        number = 0 if sharing is None else sharing.picked(decision)
        sent += 1
        computing.append((now + _PREFILL_SECONDS, number))
        running.append((now + _REQUEST_SECONDS, number, decision.destinations[0]))
        while computing and computing[0][0] < now:
            _, number = computing.popleft()
            if sharing is not None:
                sharing.prefilled(number)
        while running and running[0][0] < now:
            _, number, served = running.popleft()
            if sharing is not None:
                sharing.ended(number, served)
        due += rng.expovariate(rate)
    return sent


async def _run(port: int, rate: float, seconds: float, size: int, producer: str) -> None:
    stopwatch = Stopwatch()
    director = _director(producer, stopwatch)
    task = None
    if port:
        name = f"bench-{rate}"
        picks = SharedPicks(director, RedisSettings("127.0.0.1", port), "bench", name=name, batch_seconds=0.02)
        task = asyncio.create_task(picks.run())
        while not picks.replicas.peers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    sent = 0
    if rate:
        await asyncio.sleep(_SETTLE_SECONDS)
        decisions = _decisions(director, size)
        await _requests(decisions, director.sharing, rate, 1.0)  # what is new in the first second is not later
        began = time.process_time()
        sent = await _requests(decisions, director.sharing, rate, seconds)
        used = time.process_time() - began
    else:
        began = time.process_time()
        await asyncio.sleep(_SETTLE_SECONDS)
        idle = time.process_time() - began
        await asyncio.sleep(1.0)
        stopwatch.lags.clear()
        began = time.process_time()
        await asyncio.sleep(seconds)
        used = time.process_time() - began - idle * seconds / _SETTLE_SECONDS
        sent = len(stopwatch.lags)
    if task is not None:
        await asyncio.sleep(0.1)
        task.cancel()
    print(json.dumps({"requests": sent, "microseconds": used / max(sent, 1) * 1e6, "lags": sorted(stopwatch.lags)}))


if __name__ == "__main__":
    _port, _rate, _seconds, _size, _producer = sys.argv[1:]
    uvloop.run(_run(int(_port), float(_rate), float(_seconds), int(_size), _producer))
