"""Sticky sessions through a real Envoy: every source, two pickers with a real Redis, and what comes after a binding."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys

import pytest
import pytest_asyncio

from picker.app.envoy import Template, bootstrap
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.support.bodies import chat
from tests.support.http_client import send
from tests.support.picker_process import OFTEN, over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SOURCES = [
    {"type": "Header", "name": "X-Session-ID"},
    {"type": "Query", "name": "session_id"},
    {"type": "Cookie", "name": "session_sid"},
    {"type": "JWTClaim", "name": "sid"},
]
BY_LOAD = {
    "plugins": {
        "Filter": {"enabled": ["least-request"]},
        "Score": {"enabled": [{"name": "least-request", "weight": 1}]},
    }
}
PATH = "/v1/chat/completions"


def token(session):
    parts = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in ({}, {"sid": session})
    )
    return f"Bearer {'.'.join(parts)}.x"


WAYS = {
    "header": lambda session: {"headers": [("x-session-id", session)]},
    "query": lambda session: {"path": f"{PATH}?session_id={session}"},
    "cookie": lambda session: {"headers": [("cookie", f"a=b; session_sid={session}")]},
    "claim": lambda session: {"headers": [("authorization", token(session))]},
    "header before query": lambda session: {
        "headers": [("x-session-id", session)],
        "path": f"{PATH}?session_id={id(object())}",
    },
}


async def engine_of(port, **how):
    answer = await send(port, chat("hello"), **how)
    assert answer.status == 200
    return answer.headers["x-engine"]


@pytest_asyncio.fixture(loop_scope="session")
async def start_pair(start_picker, start_envoy_here):
    """Starts a picker with an Envoy of its own; returns it and the port."""

    async def start(engines, sticky, template=Template.BUFFERED, **more):
        picker = await start_picker(over(engines, sessionSticky=sticky, scheduler=BY_LOAD, **more))
        addresses = [engine.address for engine in engines]
        envoy = await start_envoy_here(bootstrap(template, picker=picker.address, endpoints=addresses))
        return picker, envoy.port

    return start


@pytest.mark.parametrize("template", Template)
async def test_sessions_of_every_source_stay_where_they_are(start_pair, engines, template):
    picker, port = await start_pair(engines, {"sources": SOURCES}, template)
    for way, how in WAYS.items():
        homes = {session: await engine_of(port, **how(f"{way}-{session}".replace(" ", ""))) for session in "abcdef"}
        assert len(set(homes.values())) > 1
        for session, home in homes.items():
            sent = (engine_of(port, **how(f"{way}-{session}".replace(" ", ""))) for _ in range(3))
            assert await asyncio.gather(*sent) == [home] * 3
    assert len({await engine_of(port) for _ in range(20)}) > 1
    metrics = await picker.settled()
    sessions, requests = len(WAYS) * 6, len(WAYS) * 6 * 4
    assert metrics.series("sticky_requests_total", "outcome") == {
        "bound": sessions,
        "pinned": requests - sessions,
        "none": 20,
    }
    assert metrics("sticky_sessions") == sessions


async def test_explain_shows_the_pin(start_pair, engines):
    picker, port = await start_pair(engines, {"sources": SOURCES})
    home = await engine_of(port, headers=[("x-session-id", "s")])
    command = [sys.executable, "-m", "picker", "explain", "--admin", f"127.0.0.1:{picker.ports['admin']}"]

    async def explain(*more):
        asking = asyncio.to_thread(
            subprocess.run,
            [*command, "--prompt", "hello", "--model", "sim", *more],
            capture_output=True,
            text=True,
            check=False,
        )
        return await asking

    shown = await explain("--header", "X-Session-ID: s")
    assert "pinned" in shown.stdout
    assert home in next(line for line in shown.stdout.splitlines() if "▶" in line)
    assert json.loads((await explain("--header", "x-session-id:s", "--json")).stdout)["first"] == "pinned"
    assert "pinned" not in (await explain()).stdout
    assert "NAME:VALUE" in (await explain("--header", "nonsense")).stderr


async def test_two_pickers_with_one_redis_agree(start_pair, start_engines, make_redis):
    redis = make_redis()
    engines = await start_engines(3)
    sticky = {
        "sources": SOURCES,
        "backend": "redis",
        "redis": {"address": f"127.0.0.1:{redis.port}", "budgetSeconds": 0.3},
    }
    (one, first), (two, second) = [await start_pair(engines, sticky, scrape=OFTEN) for _ in range(2)]

    async def connected():
        metrics = [await picker.metrics() for picker in (one, two)]
        return all(samples("sticky_redis_connects_total") for samples in metrics)

    await until(connected)
    # A burst of new sessions at both pickers at once: once it is over, both know one endpoint for each.
    sessions = [f"s-{number}" for number in range(12)]

    def asked(port, session):
        return engine_of(port, headers=[("x-session-id", session)])

    await asyncio.gather(*(asked(port, session) for session in sessions for port in (first, second)))
    homes = [await asked(first, session) for session in sessions]
    assert [await asked(second, session) for session in sessions] == homes
    assert len(set(homes)) > 1
    async with redis.client() as client:
        keys = [key async for key in client.scan_iter("kthena/sticky/*")]
        assert len(keys) == len(sessions)
        assert {(await client.hgetall(key))["address"] for key in keys} == set(homes)
        assert all(0 < left <= 300 for left in [await client.ttl(key) for key in keys])

    # An endpoint that goes, or is saturated, takes its sessions along; both pickers agree where they go.
    saturated = next(engine for engine in engines if engine.address == homes[0])
    saturated.waiting = 1000

    async def noticed():
        metrics = [await picker.metrics() for picker in (one, two)]
        return all(samples("endpoint_waiting_requests", address=saturated.address) == 1000 for samples in metrics)

    await until(noticed)
    moved = [await asked(first, session) for session in sessions]
    assert saturated.address not in moved
    kept = [(home, now) for home, now in zip(homes, moved, strict=True) if home != saturated.address]
    assert kept
    assert all(home == now for home, now in kept)
    saturated.waiting = 0
    assert [await asked(second, session) for session in sessions] == moved

    # Without Redis each goes by what it knows, and says so; a picker that comes anew learns from Redis.
    redis.stall()
    assert [await asked(second, session) for session in sessions] == moved
    redis.kill()
    assert [await asked(first, session) for session in sessions] == moved
    metrics = await two.settled()
    assert sum(metrics.series("sticky_redis_lookups_total", "outcome").values()) > metrics(
        "sticky_redis_lookups_total", outcome="ok"
    )
    redis.start()

    async def told():
        assert [await asked(first, session) for session in sessions] == moved
        async with redis.client() as client:
            return await client.dbsize() == len(sessions)

    await until(told)
    await two.stop()
    await two.start()

    async def learnt():  # Envoy passes requests without a pick until it has found the picker again
        return [await asked(second, session) for session in sessions] == moved

    await until(connected)
    await until(learnt)
    for picker in (one, two):
        await picker.settled()


async def test_the_turn_after_the_binding_goes_to_who_holds_the_turns_before(start_picker, start_envoy_here):
    cost = StepCost(speed=200)
    running = [await start_engine(EngineSimConfig(name=f"sim-{number}", cost=cost, grace=0)) for number in range(4)]
    try:
        addresses = [engine.url.removeprefix("http://") for engine in running]
        config = {
            "endpoints": {"static": [{"address": address} for address in addresses]},
            "sessionSticky": {"sources": SOURCES, "sessionAffinitySeconds": 1},
        }
        picker = await start_picker(config)
        envoy = await start_envoy_here(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))
        messages = [{"role": "system", "content": "You are a helper. " * 50}]

        async def turn(number, session):
            messages.append({"role": "user", "content": f"question {number} " * 40})
            body = json.dumps({"model": "sim", "messages": messages, "max_tokens": 8}).encode()
            answer = await send(envoy.port, body, headers=[("x-session-id", session)])
            messages.append({"role": "assistant", "content": answer.seen["choices"][0]["message"]["content"]})
            usage = answer.seen["usage"]
            return answer.headers["x-engine"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]

        home, uncached = await turn(0, "s")
        for number in range(1, 5):
            engine, uncached = await turn(number, "s")
            assert engine == home
        await asyncio.sleep(1.2)
        engine, uncached_after = await turn(5, "s")
        assert (engine, uncached_after) == (home, pytest.approx(uncached, abs=32))
        metrics = await picker.settled()
        assert metrics.series("sticky_requests_total", "outcome") == {"bound": 2, "pinned": 4}
    finally:
        for each in running:
            await each.close()
