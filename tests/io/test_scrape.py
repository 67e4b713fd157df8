"""Scraping real servers: simulated engines, and servers that misbehave."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.io.scrape import MAX_PAGE_BYTES, Scraper, ScrapeSettings
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine


def make_director(*addresses: str, engine: str = "vllm") -> Director:
    scheduler, _ = build_scheduler(SchedulerSpec((), (("prefix-cache", 1),)), None, lambda _: None)
    table = EndpointTable(stale_seconds=0.6)
    director = Director(scheduler, table, fallbacks=0, rng=random.Random(1), timer=time.perf_counter_ns)
    director.replace_endpoints([Endpoint(address, address, engine=engine) for address in addresses])
    return director


@asynccontextmanager
async def scraping(director: Director, **settings):
    restarted: list[Endpoint] = []
    scraper = Scraper(director, ScrapeSettings(**{"interval": 0.05, "timeout": 0.2, **settings}), restarted.append)
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper, restarted
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def serving(handle, path: str = "/metrics", port: int = 0):
    app = web.Application()
    app.router.add_get(path, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def until(condition, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_simulated_engine(engine):
    running = await start_engine(EngineSimConfig(flavour=engine, loras=("adapter",)))
    address = running.url.removeprefix("http://")
    director = make_director(address, engine=engine)
    try:
        async with scraping(director, models_interval=0.05):
            await until(lambda: director.table.models[0] is not None)
            table = director.table
            assert [table.waiting[0], table.running[0], table.kv_usage[0]] == [0, 0, 0]
            assert {"sim", "adapter"} <= table.models[0]
    finally:
        await running.close()


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        (lambda: web.Response(status=500), "bad_status"),
        (lambda: web.Response(status=302, headers={"location": "http://127.0.0.1:1/"}), "bad_status"),
        (lambda: web.Response(body=b"x" * (MAX_PAGE_BYTES + 1)), "too_large"),
    ],
)
async def test_bad_answers_are_counted_and_load_stays_unknown(response, outcome):
    async def handle(_):
        return response()

    async with serving(handle) as address:
        director = make_director(address)
        async with scraping(director, timeout=2.0) as (scraper, _):
            await until(lambda: scraper.outcomes[outcome] >= 1)
            assert scraper.outcomes["ok"] == 0
            assert np.isnan(director.table.waiting[0])


async def test_a_hanging_engine_times_out_and_delays_no_other():
    async def hang(_):
        await asyncio.sleep(30)

    async def answer(_):
        return web.Response(text="vllm:num_requests_waiting 4\n")

    async with serving(hang) as slow, serving(answer) as fast:
        director = make_director(slow, fast)
        async with scraping(director) as (scraper, _):
            await until(lambda: scraper.outcomes["timeout"] >= 2)
            assert scraper.outcomes["ok"] >= 4
            assert np.isnan(director.table.waiting[0])
            assert director.table.waiting[1] == 4


async def test_load_of_a_dead_engine_decays_to_unknown_and_comes_back():
    async def answer(_):
        return web.Response(text="vllm:num_requests_waiting 4\n")

    director = make_director("127.0.0.1:9")
    async with scraping(director) as (scraper, _):
        await until(lambda: scraper.outcomes["unreachable"] >= 1)
        async with serving(answer) as address:
            director.replace_endpoints([Endpoint("e", address)])
            slot = director.table.slot_of(address)
            await until(lambda: director.table.waiting[slot] == 4)
        await until(lambda: np.isnan(director.table.waiting[slot]))
        async with serving(answer, port=int(address.rpartition(":")[2])):
            await until(lambda: director.table.waiting[slot] == 4)


async def test_a_restarted_engine_is_forgotten():
    started = 100.0

    async def answer(_):
        return web.Response(text=f"process_start_time_seconds {started}\n")

    async with serving(answer) as address:
        director = make_director(address)
        index = director.scheduler.producers[0].index
        index.record(0, "m", [1, 2, 3])
        async with scraping(director) as (scraper, restarted):
            await until(lambda: scraper.outcomes["ok"] >= 2)
            assert index.entries == 3
            started = 200.0
            await until(lambda: bool(restarted))
            assert index.entries == 0
            assert restarted == [Endpoint(address, address)]


async def test_models_that_make_no_sense_are_malformed():
    async def handle(request):
        return web.Response(text='{"data": [{"id": 7}]}' if request.path == "/v1/models" else "")

    async with serving(handle, "/{tail:.*}") as address:
        director = make_director(address)
        async with scraping(director, models_interval=0.05) as (scraper, _):
            await until(lambda: scraper.outcomes["malformed"] >= 1)
            assert director.table.models[0] is None


async def test_an_unexpected_error_ends_no_scraping():
    """One that follows a restart, of whoever is told of it."""
    page, errors = "process_start_time_seconds 100\n", []

    async def answer(_):
        return web.Response(text=page)

    def tell(endpoint):
        raise ValueError(f"nobody hears of {endpoint.name}")

    async with serving(answer) as address:
        director = make_director(address)
        settings = ScrapeSettings(interval=0.02, timeout=2.0)
        scraper = Scraper(director, settings, tell, lambda *failure: errors.append(failure))
        task = asyncio.create_task(scraper.run())
        await until(lambda: scraper.outcomes["ok"] >= 2)
        page = "process_start_time_seconds 200\nvllm:num_requests_waiting 4\n"
        await until(lambda: director.table.waiting[0] == 4)
        assert [(where, str(error)) for where, error in errors] == [("scrape", f"nobody hears of {address}")]
        assert scraper.outcomes["error"] == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_scraping_that_has_ended_can_begin_again():
    async def answer(_):
        return web.Response(text="vllm:num_requests_waiting 4\n")

    async with serving(answer) as address:
        director = make_director(address)
        scraper = Scraper(director, ScrapeSettings(interval=0.02, timeout=2.0), lambda _: None)
        for _ in range(2):
            before = scraper.outcomes["ok"]
            task = asyncio.create_task(scraper.run())
            await until(lambda before=before: scraper.outcomes["ok"] > before + 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
