"""A decision alone, without Envoy and without a transport: from headers and body to a ranked list."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from msgspec import Struct

from bench.bodies import Bodies
from bench.report import Row, progress
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.exchange.events import BodyMode
from picker.core.plugins.least_request import LeastRequestFilter, LeastRequestScorer
from picker.core.plugins.least_request_args import LeastRequestArgs
from picker.core.plugins.prefix_cache import PrefixCacheProducer, PrefixScorer
from picker.core.plugins.prefix_cache_args import PrefixCacheArgs
from picker.core.scheduling.scheduler import Scheduler

_T = TypeVar("_T")
_R = TypeVar("_R")

_PROMPTS = 400
_PASSES = 15
_BLOCKS = 64
"""Blocks of each other prompt that the index knows: 4 KiB of text."""
_HEADERS = {
    ":method": b"POST",
    ":path": b"/v1/chat/completions",
    ":authority": b"bench",
    "content-type": b"application/json",
    "x-request-id": b"9f3b1f9e-2f53-4c0e-8a6e-3f6f0a2d7c11",
}
_SUCCESS = Finish(success=True, learned_on=LearnedOn.RESPONSE_BODY, status=200, served=None)
_FAILURE = Finish(success=False, learned_on=LearnedOn.STREAM_END, status=None, served=None)


class _Costs(Struct, frozen=True):
    """Microseconds."""

    decide: float
    route: float
    finish: float


def run() -> list[Row]:
    few = {size: _measure(size * 1024, endpoints=8, entries=50_000) for size in (4, 32)}
    # As many entries in all as with eight endpoints: what is compared is the number of endpoints.
    many = {size: _measure(size * 1024, endpoints=512, entries=50_000 * 8 // 512) for size in (4, 32)}
    rows: list[Row] = []
    for size, budget in ((4, 50.0), (32, 150.0)):
        what = f"{size} KiB prompt"
        costs, wide = few[size], many[size]
        rows += [
            Row(
                f"decision, {what}, 8 endpoints",
                "parse, render, hash, look up, filter, score, pick",
                costs.decide,
                "us",
                budget,
            ),
            Row(
                f"decision, {what}, 512 endpoints / 8 endpoints",
                f"{wide.decide:.1f} / {costs.decide:.1f} us",
                wide.decide / costs.decide,
                "x",
                3.0,
            ),
            Row(f"route, {what}, 8 endpoints", "its blocks become visible", costs.route, "us"),
            Row(f"finish, {what}, 8 endpoints", "its blocks are recorded, others dropped", costs.finish, "us"),
        ]
    return rows


def _measure(size: int, *, endpoints: int, entries: int) -> _Costs:
    progress(f"decision: {size} bytes, {endpoints} endpoints")
    rng = random.Random(size + endpoints)
    producer = PrefixCacheProducer(PrefixCacheArgs(maxHashCacheSize=entries), lambda _model, _blocks: None)
    scheduler = Scheduler(
        [LeastRequestFilter(LeastRequestArgs())],
        [producer],
        [(LeastRequestScorer(LeastRequestArgs()), 1.0), (PrefixScorer("prefix-cache", "prefix-cache"), 1.0)],
    )
    table = EndpointTable()
    director = Director(scheduler, table, fallbacks=2, rng=rng, timer=time.perf_counter_ns)
    director.replace_endpoints(
        Endpoint(name=f"pod-{n}", address=f"10.0.{n // 200}.{n % 200 + 1}:8000") for n in range(endpoints)
    )
    for slot in range(endpoints):
        table.in_flight[slot] = rng.randrange(8)
        table.observe(slot, EngineMetrics(waiting=rng.randrange(3), running=rng.randrange(8), kv_usage=0.5), 0.0)
        for _ in range(entries // _BLOCKS):
            producer.index.record(slot, "other", [rng.getrandbits(64) for _ in range(_BLOCKS)])
    bodies = Bodies(size)
    asked = [Decide(_HEADERS, bodies.next(), BodyState.COMPLETE, BodyMode.BUFFERED, None) for _ in range(2 * _PROMPTS)]
    # The first half is learnt, so that every prompt of the second finds its beginning on some endpoints.
    for one in asked[:_PROMPTS]:
        director.route(director.decide(one)).finish(_SUCCESS)
    asked = asked[_PROMPTS:]
    gc.collect()

    decide: list[float] = []
    route: list[float] = []
    for _ in range(_PASSES):
        decisions, each = _each(director.decide, asked)
        decide.append(each)
        tickets, each = _each(director.route, decisions)
        route.append(each)
        for ticket in tickets:
            ticket.finish(_FAILURE)
    tickets = [director.route(director.decide(one)) for one in asked]
    _, finish = _each(lambda ticket: ticket.finish(_SUCCESS), tickets)
    return _Costs(median(decide), median(route), finish)


def _each(what: Callable[[_T], _R], items: Sequence[_T]) -> tuple[list[_R], float]:
    """The results, and the microseconds of CPU each took: other processes on the machine are not counted in."""
    started = time.thread_time_ns()
    results = [what(item) for item in items]
    return results, (time.thread_time_ns() - started) / len(items) / 1000
