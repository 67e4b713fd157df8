"""The picker's side of Redis: a real redis-server that dies, stalls and refuses."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from picker.core.kv_index.circuit import CircuitState
from picker.core.kv_index.owners import Candidate
from picker.io.kv_index.redis_connection import RedisSettings
from picker.io.kv_index.redis_reader import Lookup, ReaderSettings, RedisReader

PODS = {b"a.ns": Candidate(0, started_at=100), b"b.ns": Candidate(1)}
FAST = ReaderSettings(pause=0.05, most_pause=0.2, reconnect=0.01, most_reconnect=0.05)


async def fill(server, blocks) -> None:
    async with server.client() as client:
        for number, owners in blocks.items():
            await client.hset(f"matrix:kv:block:m@{number}", mapping=owners)


async def test_a_prompt_is_looked_up_in_one_go(redis_server, background, until):
    await fill(
        redis_server, {1: {"a.ns": "200", "b.ns": "200"}, 2: {"a.ns": "200", "b.ns": "5|CPU"}, 3: {"a.ns": "99"}}
    )
    reader = RedisReader(redis_server.settings, FAST)
    background(reader.run())
    await until(lambda: reader.connected)
    found = await reader.lookup("m", [1, 2, 3, 4], PODS)
    assert found.groups == [(2, 3)]
    assert found.weights == {1: pytest.approx(1.8)}
    assert (await reader.lookup("other", [1], PODS)).groups == []
    assert (await reader.lookup("m", [], PODS)).groups == []
    assert reader.owners == {"stale": 1}
    assert reader.outcomes[Lookup.OK] == 3


async def test_many_ask_at_once_over_one_connection(redis_server, background, until):
    await fill(redis_server, {number: {"a.ns": "200"} for number in range(300)})
    reader = RedisReader(redis_server.settings, replace(FAST, budget=5.0))  # however busy the machine is
    background(reader.run())
    await until(lambda: reader.connected)
    answers = await asyncio.gather(*[reader.lookup("m", range(n), PODS) for n in range(1, 60)])
    assert [answer.groups for answer in answers] == [[(n, 1)] for n in range(1, 60)]
    assert reader.connects == 1


async def test_keys_of_another_type_are_nobodys(redis_server, background, until):
    await fill(redis_server, {1: {"a.ns": "200"}})
    async with redis_server.client() as client:
        await client.set("matrix:kv:block:m@2", "x")
    reader = RedisReader(redis_server.settings, FAST)
    background(reader.run())
    await until(lambda: reader.connected)
    assert (await reader.lookup("m", [1, 2], PODS)).groups == [(1, 1)]
    assert reader.owners["malformed"] == 1


async def test_without_redis_there_is_no_waiting_and_it_heals(make_redis, background, until):
    server = make_redis()
    server.kill()
    reader = RedisReader(server.settings, FAST)
    background(reader.run())
    assert await reader.lookup("m", [1], PODS) is None
    server.start()
    await fill(server, {1: {"a.ns": "200"}})
    await until(lambda: reader.connected)
    assert (await reader.lookup("m", [1], PODS)).groups == [(1, 1)]
    server.kill()
    await until(lambda: not reader.connected)
    assert await reader.lookup("m", [1], PODS) is None
    assert reader.outcomes == {**dict.fromkeys(Lookup, 0), Lookup.OK: 1, Lookup.UNAVAILABLE: 2}


async def test_a_stalled_redis_costs_the_budget_a_few_times_and_heals(redis_server, background, until):
    await fill(redis_server, {1: {"a.ns": "200"}})
    reader = RedisReader(redis_server.settings, FAST)
    background(reader.run())
    await until(lambda: reader.connected)
    loop = asyncio.get_running_loop()
    redis_server.stall()
    for _ in range(3):
        started = loop.time()
        assert await reader.lookup("m", [1], PODS) is None
        assert loop.time() - started < 1
    assert reader.client.circuit.state(loop.time()) is CircuitState.OPEN
    for _ in range(1000):
        assert await reader.lookup("m", [1], PODS) is None
    assert reader.outcomes[Lookup.TIMEOUT] == 3
    assert reader.outcomes[Lookup.CIRCUIT_OPEN] == 1000
    await until(lambda: reader.client.circuit.opened >= 2)
    redis_server.resume()
    await until(lambda: reader.connected)
    assert (await reader.lookup("m", [1], PODS)).groups == [(1, 1)]


async def test_a_single_timeout_leaves_the_connection_in_step(redis_server, background, until):
    await fill(redis_server, {1: {"a.ns": "200"}, 2: {"b.ns": "200"}})
    reader = RedisReader(redis_server.settings, FAST)
    background(reader.run())
    await until(lambda: reader.connected)
    redis_server.stall()
    assert await reader.lookup("m", [1], PODS) is None
    redis_server.resume()
    assert (await reader.lookup("m", [2], PODS)).groups == [(1, 2)]
    assert reader.connects == 1


async def test_a_redis_that_refuses(make_redis, background, until):
    server = make_redis("--requirepass", "secret")
    reader = RedisReader(RedisSettings("127.0.0.1", server.port, password="guess"), FAST)
    background(reader.run())
    await asyncio.sleep(0.1)
    assert await reader.lookup("m", [1], PODS) is None
    assert reader.outcomes[Lookup.UNAVAILABLE] == 1

    reader = RedisReader(RedisSettings("127.0.0.1", server.port, password="secret"), FAST)
    background(reader.run())
    await until(lambda: reader.connected)
    async with server.client(password="secret") as client:
        await client.execute_command("ACL", "SETUSER", "default", "-hgetall")
        assert await reader.lookup("m", [1], PODS) is None
        assert reader.outcomes[Lookup.REFUSED] == 1
        await client.execute_command("ACL", "SETUSER", "default", "+hgetall")
    assert (await reader.lookup("m", [1], PODS)).groups == []


async def test_ownerships_that_nobody_keeps_true_are_deleted(redis_server, background, until):
    await fill(redis_server, {1: {"gone.ns": "200", "a.ns": str(int(time.time()))}})
    reader = RedisReader(redis_server.settings, ReaderSettings(collect_every=0.05))
    background(reader.run())
    await until(lambda: reader.collected == 1)
    async with redis_server.client() as client:
        assert (await client.hgetall("matrix:kv:block:m@1")).keys() == {"a.ns"}


async def test_deleting_them_goes_on_after_an_unexpected_error(redis_server, background, until):
    await fill(redis_server, {1: {"gone.ns": "200"}})
    errors = []

    def jitter():
        if not errors:
            raise ValueError("no luck")
        return 1.0

    settings = ReaderSettings(collect_every=0.05)
    failed = lambda where, error: errors.append((where, str(error)))  # noqa: E731
    reader = RedisReader(redis_server.settings, settings, jitter=jitter, failed=failed)
    background(reader.run())
    await until(lambda: reader.collected == 1)
    assert errors == [("redis_stale_owners", "no luck")]
