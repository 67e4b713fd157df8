"""Bindings that pickers share, in a real Redis: first writer wins, Kthena's layout, and a Redis that is away."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from picker.core.kv_index.circuit import CircuitState
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Request
from picker.core.sticky import SHARED, Binding, Bindings
from picker.io.kv_index.redis_client import ClientSettings, Lookup, RedisClient
from picker.io.sticky.redis import BACKLOG, MOST_PENDING, RedisBindings

A, B, C = Binding("pod-a", "10.0.0.1:8000"), Binding("pod-b", "10.0.0.2:8000"), Binding("pod-c", "10.0.0.3:8000")
KEY = "kthena/sticky/" + "0" * 64
FAST = ClientSettings(budget=0.2, pause=0.05, most_pause=0.1, reconnect=0.01, most_reconnect=0.05)


@pytest.fixture
def start(redis_server, background, until):
    """Starts the bindings of one picker."""

    async def make(seconds=300.0, settings=FAST):
        client = RedisClient(redis_server.settings, settings, without="sessions are kept in memory")
        bindings = RedisBindings(client, Bindings(seconds, 1000), "deepseek", time.monotonic)
        background(client.run())
        await until(lambda: client.connected)
        return bindings

    return make


async def found(bindings, key=KEY):
    prepared = await bindings.begin(None, Request("", "", Prompt(), session=key), 1.0)
    return prepared.get(SHARED)


def bind(bindings, binding, instead_of=None, key=KEY):
    bindings.bind(key, binding, instead_of, time.monotonic())


def known(bindings, key=KEY):
    return bindings.find(key, time.monotonic())


async def test_what_one_picker_binds_another_finds_in_kthenas_layout(start, redis_server):
    ours, theirs = await start(), await start(12.2)
    assert await found(theirs) is None
    bind(ours, A)
    assert known(ours) == A
    await ours.settle()
    assert await found(theirs) == A
    async with redis_server.client() as redis:
        hash_ = {"modelServer": "deepseek", "pod": "pod-a", "prefillPod": "", "address": "10.0.0.1:8000"}
        assert await redis.hgetall(KEY) == hash_
        assert 298 <= await redis.ttl(KEY) <= 300
        bind(theirs, A)
        await theirs.settle()
        assert 12 <= await redis.ttl(KEY) <= 13
    assert ours.writes[Lookup.OK] == theirs.writes[Lookup.OK] == 1


async def test_the_first_writer_wins_and_the_others_adopt(start):
    pickers = [await start() for _ in range(3)]
    for picker, binding in zip(pickers, (A, B, C), strict=True):
        bind(picker, binding)
    await asyncio.gather(*(picker.settle() for picker in pickers))
    winner = await found(pickers[0])
    assert winner in (A, B, C)
    assert [known(picker) for picker in pickers] == [winner] * 3
    assert sum(picker.adopted for picker in pickers) == 2


async def test_an_endpoint_that_cannot_be_picked_is_replaced_once(start):
    one, two = await start(), await start()
    bind(one, A)
    await one.settle()
    bind(two, B, instead_of=A)
    await two.settle()
    bind(one, C, instead_of=A)
    await one.settle()
    assert await found(one) == B == known(one)


async def test_a_binding_is_released_by_who_made_it_only(start):
    one, two = await start(), await start()
    bind(one, A)
    await one.settle()
    two.release(KEY, B)
    await two.settle()
    assert await found(two) == A
    two.release(KEY, A)
    await two.settle()
    assert await found(two) is None


async def test_bindings_of_kthenas_routers_are_understood(start, redis_server):
    picker = await start()
    async with redis_server.client() as redis:
        await redis.hset(KEY, mapping={"modelServer": "deepseek", "pod": "pod-a"})
        await redis.expire(KEY, 10)
        assert await found(picker) == Binding("pod-a", "")
        bind(picker, A)
        await picker.settle()
        assert await redis.ttl(KEY) > 290
        bind(picker, B)
        await picker.settle()
        assert known(picker) == Binding("pod-a", "")
        bind(picker, B, instead_of=A)
        await picker.settle()
        assert (await redis.hgetall(KEY))["pod"] == "pod-b"


@pytest.mark.parametrize("junk", [{"other": "x"}, {"pod": ""}, {"pod": b"\xff"}])
async def test_junk_is_no_binding(start, redis_server, junk):
    picker = await start()
    async with redis_server.client() as redis:
        await redis.hset(KEY, mapping=junk)
        assert await found(picker) is None


async def test_while_redis_is_away_memory_counts_and_says_so(start, redis_server, until):
    picker = await start()
    bind(picker, A)
    await picker.settle()
    redis_server.kill()
    await until(lambda: not picker.client.connected)
    assert await found(picker) is None
    assert known(picker) == A
    bind(picker, A)
    await picker.settle()
    assert picker.lookups[Lookup.UNAVAILABLE] == picker.writes[Lookup.UNAVAILABLE] == 1
    redis_server.start()
    await until(lambda: picker.client.connected)
    assert await found(picker) is None
    bind(picker, A)
    await picker.settle()
    assert await found(picker) == A


async def test_a_stalled_redis_costs_the_budget_a_few_times(start, redis_server, until):
    picker = await start()
    redis_server.stall()
    loop = asyncio.get_running_loop()
    for _ in range(3):
        started = loop.time()
        assert await found(picker) is None
        assert loop.time() - started < 1
    assert picker.client.circuit.state(loop.time()) is CircuitState.OPEN
    assert await found(picker) is None
    assert (picker.lookups[Lookup.TIMEOUT], picker.lookups[Lookup.CIRCUIT_OPEN]) == (3, 1)
    redis_server.resume()
    await until(lambda: picker.client.connected)
    bind(picker, A)
    await picker.settle()
    assert await found(picker) == A


async def test_what_is_on_its_way_is_bounded(start):
    picker = await start(settings=msgspec.structs.replace(FAST, budget=10.0))  # a thousand scripts take a while
    for number in range(MOST_PENDING + 5):
        bind(picker, A, key=f"{KEY}{number}")
    assert picker.writes[BACKLOG] == 5
    await picker.settle()
    assert picker.writes[BACKLOG] == 5
    bind(picker, A)
    await picker.settle()
    assert await found(picker) == A
