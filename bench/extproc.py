"""What the picker costs behind a real Envoy, against servers that decide nothing.

Everything shares the machine, so absolute numbers are its own. Contenders take turns in short rounds; each number is
the median of its rounds, and only ratios within one run count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from statistics import median
from typing import Any

import uvloop
from msgspec import Struct

from bench import rig
from bench.bodies import Bodies
from bench.load import closed_loop
from bench.report import Row, progress
from picker.app.envoy import EnvoyProcess, Template

_BODY_BYTES = 4096
_CONNECTIONS = 16
_WARM_SECONDS = 1.0
_IDLE_SECONDS = 3.0
_USUAL_SCRAPE_SECONDS = 0.2
_SCRAPE_SECONDS = 1.0
"""Scraping costs by the second and not by the request, so that it has a row of its own and is rare in the others."""
_FILL_SECONDS = 5.0
"""Long enough to fill the prefix index, so that what is measured drops entries as a picker does for most of its life."""

_PICKER, _CONSTANT, _GRPCIO, _PLAIN = "picker", "constant", "grpcio", "no ext_proc"
_LEARNING, _OBSERVING = "picker reading usage", "picker observing"
_OBSERVED_ROUNDS = 5


class _Contender(Struct, frozen=True):
    """A server behind its Envoy; without a server, Envoy alone."""

    name: str
    server: rig.Server | None
    envoy: EnvoyProcess


class _Round(Struct, frozen=True):
    """One contender's turn. CPU in microseconds for each request."""

    server_cpu: float
    envoy_cpu: float
    rate: float
    p50: float
    p99: float


def _server_cpu(turn: _Round) -> float:
    return turn.server_cpu


def _envoy_cpu(turn: _Round) -> float:
    return turn.envoy_cpu


def _median(rounds: Sequence[_Round], of: Callable[[_Round], float]) -> float:
    return median(map(of, rounds))


def run() -> list[Row]:
    return uvloop.run(_run())


async def _run() -> list[Row]:
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        engines = (await start(rig.engines())).ports
        servers = {
            _PICKER: await start(rig.picker(engines, scrape_seconds=_SCRAPE_SECONDS)),
            _CONSTANT: await start(rig.constant_server("http2", engines[0])),
            _GRPCIO: await start(rig.constant_server("grpcio", engines[0])),
        }
        rows.append(await _idle_row(engines))
        plain = _Contender(_PLAIN, None, await start(rig.envoy(Template.BUFFERED, None, engines)))
        bodies = Bodies(_BODY_BYTES)
        for template in (Template.FULL_DUPLEX, Template.BUFFERED):
            duplex = template is Template.FULL_DUPLEX
            contenders = [
                _Contender(name, server, await start(rig.envoy(template, server, engines)))
                for name, server in servers.items()
            ]
            progress(f"{template}: warming up")
            for contender in contenders:
                fill = duplex and contender.name == _PICKER
                await _turn(contender, bodies, _CONNECTIONS, _FILL_SECONDS if fill else _WARM_SECONDS)
            busy = await _rounds(template, [*contenders, plain], bodies, _CONNECTIONS, 7 if duplex else 3, 1.5)
            rows += _cpu_rows(str(template), busy, budgets=duplex)
            if duplex:
                alone = await _rounds(template, [*contenders, plain], bodies, 1, 7, 1.0)
                rows += _latency_rows(alone)
        rows += await _usage_rows(start, engines, servers[_PICKER], bodies)
    return rows


async def _usage_rows(
    start: Callable[[AbstractAsyncContextManager[Any]], Awaitable[Any]],
    engines: Sequence[int],
    plain: rig.Server,
    bodies: Bodies,
) -> list[Row]:
    """What it costs to learn usage from responses: in full duplex, and from a second filter that observes."""
    contenders = [
        _Contender(_PICKER, plain, await start(rig.envoy(Template.FULL_DUPLEX, plain, engines))),
        _Contender("picker, buffered", plain, await start(rig.envoy(Template.BUFFERED, plain, engines))),
    ]
    for name, template in ((_LEARNING, Template.FULL_DUPLEX), (_OBSERVING, Template.OBSERVABILITY)):
        server = await start(rig.picker(engines, scrape_seconds=_SCRAPE_SECONDS, learn_usage=True))
        contenders.append(_Contender(name, server, await start(rig.envoy(template, server, engines))))
        await _turn(contenders[-1], bodies, _CONNECTIONS, _FILL_SECONDS)
    rounds = list((await _rounds("usage", contenders, bodies, _CONNECTIONS, _OBSERVED_ROUNDS, 1.5)).values())
    rows: list[Row] = []
    for what, without, reading in (
        ("reading usage in full duplex", rounds[0], rounds[2]),
        ("an observing filter", rounds[1], rounds[3]),
    ):
        for whose, cpu in (("server", _server_cpu), ("Envoy", _envoy_cpu)):
            before, after = _median(without, cpu), _median(reading, cpu)
            rows.append(
                Row(f"{whose} CPU per request for {what}", f"{after:.0f} - {before:.0f} us", after - before, "us")
            )
    return rows


async def _rounds(
    what: str, contenders: Sequence[_Contender], bodies: Bodies, connections: int, count: int, seconds: float
) -> Mapping[str, list[_Round]]:
    rounds: dict[str, list[_Round]] = {contender.name: [] for contender in contenders}
    for number in range(count):
        for contender in contenders:
            turn = await _turn(contender, bodies, connections, seconds)
            rounds[contender.name].append(turn)
            progress(
                f"{what}, {connections} connections, round {number + 1}/{count}, {contender.name}: "
                f"server {turn.server_cpu:.0f} us, Envoy {turn.envoy_cpu:.0f} us, "
                f"{turn.rate:.0f}/s, p50 {turn.p50 * 1e3:.2f} ms"
            )
    return rounds


async def _turn(contender: _Contender, bodies: Bodies, connections: int, seconds: float) -> _Round:
    server, envoy = contender.server, contender.envoy
    streams = await _streams(envoy)
    before = rig.cpu_seconds(server.pid) if server else 0.0
    envoy_before = rig.cpu_seconds(envoy.pid)
    load = await closed_loop(envoy.port, bodies.next, connections=connections, seconds=seconds)
    server_cpu = rig.cpu_seconds(server.pid) - before if server else 0.0
    envoy_cpu = rig.cpu_seconds(envoy.pid) - envoy_before
    each = 2 if contender.name == _OBSERVING else 1
    if server and await _streams(envoy) - streams != each * load.requests:
        raise RuntimeError(f"Envoy did not ask {contender.name} about every request; nothing was measured")
    scale = 1e6 / load.requests
    percentiles = load.percentiles
    return _Round(server_cpu * scale, envoy_cpu * scale, load.requests / load.seconds, percentiles[49], percentiles[98])


async def _idle_row(engines: Sequence[int]) -> Row:
    progress("a picker without requests")
    async with rig.picker(engines, scrape_seconds=_USUAL_SCRAPE_SECONDS) as server:
        await asyncio.sleep(_WARM_SECONDS)
        before = rig.cpu_seconds(server.pid)
        await asyncio.sleep(_IDLE_SECONDS)
        share = (rig.cpu_seconds(server.pid) - before) / _IDLE_SECONDS
    measured = f"{rig.ENDPOINTS} engines, scraped every {_USUAL_SCRAPE_SECONDS} s"
    return Row("CPU of an idle picker", measured, share * 100, "% of a core")


async def _streams(envoy: EnvoyProcess) -> int:
    return (await envoy.stats("cluster.picker.upstream_rq_total")).get("cluster.picker.upstream_rq_total", 0)


def _cpu_rows(mode: str, rounds: Mapping[str, list[_Round]], *, budgets: bool) -> list[Row]:
    cpu = {name: _median(turns, _server_cpu) for name, turns in rounds.items()}
    ours, constant, grpcio = cpu[_PICKER], cpu[_CONSTANT], cpu[_GRPCIO]
    what = f"server CPU per request, {mode}"
    rows = [
        Row(f"{what}: picker / constant answer", f"{ours:.0f} / {constant:.0f} us", ours / constant, "x"),
        Row(f"{what}: picker / grpcio constant", f"{ours:.0f} / {grpcio:.0f} us", ours / grpcio, "x"),
    ]
    if budgets:
        rows = [
            Row(row.name, row.measured, row.value, row.unit, budget)
            for row, budget in zip(rows, (2.5, 1 / 6), strict=True)
        ]
    for name, turns in rounds.items():
        rate = _median(turns, lambda turn: turn.rate)
        p50, p99 = _median(turns, lambda turn: turn.p50), _median(turns, lambda turn: turn.p99)
        envoy = _median(turns, _envoy_cpu)
        measured = f"{rate:.0f} requests/s, p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms"
        rows.append(Row(f"Envoy CPU per request, {mode}: {name}", measured, envoy, "us"))
    return rows


def _latency_rows(rounds: Mapping[str, list[_Round]]) -> list[Row]:
    p50 = {name: _median(turns, lambda turn: turn.p50) * 1e3 for name, turns in rounds.items()}
    plain = p50[_PLAIN]
    added = {name: value - plain for name, value in p50.items()}
    what = "latency added to plain Envoy, 1 connection, p50"

    def measured(name: str) -> str:
        return f"{p50[name]:.2f} - {plain:.2f} ms"

    half = added[_PICKER] <= added[_GRPCIO] / 2
    ours = f"{measured(_PICKER)}; {added[_PICKER] / added[_GRPCIO]:.2f}x of what grpcio's constant answer adds"
    return [
        Row(f"{what}: picker", ours, added[_PICKER], "ms", 0.7, half),
        Row(f"{what}: constant answer", measured(_CONSTANT), added[_CONSTANT], "ms"),
        Row(f"{what}: grpcio constant", measured(_GRPCIO), added[_GRPCIO], "ms"),
    ]
