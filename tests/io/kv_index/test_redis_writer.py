"""The sidecar's side of Redis, with a real redis-server that dies, stalls, fills up and asks for passwords."""

from __future__ import annotations

import asyncio
import time

import pytest

from picker.core.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored
from picker.core.kv_index.ownership import Ownership
from picker.io.kv_index.redis_connection import RedisConnection, RedisSettings, RedisUnavailableError
from picker.io.kv_index.redis_stale import delete_stale_owners
from picker.io.kv_index.redis_writer import RedisWriter, WriterSettings

POD = "pod-1.default"
MARKER = f"picker:kv:sidecar:{POD}"
ONE_TO_FOUR = 4233425515844289900
FIVE_TO_EIGHT = 929962052233473060
FAST = WriterSettings(timeout=0.3, reconnect=0.01, most_reconnect=0.05)


def stored(names, tokens, parent=None, **fields) -> BlockStored:
    return BlockStored(tuple(names), parent, tuple(tokens), len(tokens) // len(names), **fields)


class Sidecar:
    def __init__(self, settings: RedisSettings, *, pod=POD, engine="vllm", model="qwen", options=FAST) -> None:
        self.ownership = Ownership(model)
        self.pod = pod
        self.writer = RedisWriter(settings, self.ownership, pod, engine, options)

    def apply(self, *events) -> None:
        self.writer.note(self.ownership.apply(0, events, time.time()))


async def owned(client, pod=POD) -> dict[str, str]:
    found = {}
    async for key in client.scan_iter("matrix:kv:block:*"):
        if await client.type(key) == "hash" and (value := await client.hget(key, pod)):
            found[key.removeprefix("matrix:kv:block:")] = value
    return found


async def test_the_layout_is_kthenas(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings)
    background(sidecar.writer.run())
    before = int(time.time())
    sidecar.apply(stored([111, 222], range(1, 9)))
    await until(lambda: sidecar.writer.in_step)
    async with redis_server.client() as client:
        assert sorted(await client.keys("*")) == sorted(
            [
                f"matrix:kv:block:qwen@{ONE_TO_FOUR}",
                f"matrix:kv:block:qwen@{FIVE_TO_EIGHT}",
                f"vllm:kv:block:{POD}@111",
                f"vllm:kv:block:{POD}@222",
                MARKER,
            ]
        )
        ((pod, at),) = (await client.hgetall(f"matrix:kv:block:qwen@{ONE_TO_FOUR}")).items()
        assert pod == POD
        assert before <= int(at) <= time.time()
        assert await client.ttl(f"matrix:kv:block:qwen@{ONE_TO_FOUR}") == -1
        assert await client.get(f"vllm:kv:block:{POD}@111") == str(ONE_TO_FOUR)
        assert 86_390 <= await client.ttl(f"vllm:kv:block:{POD}@111") <= 86_400

        sidecar.apply(BlockRemoved((111,)))
        await until(lambda: sidecar.writer.in_step)
        assert sorted(await client.keys("*")) == sorted(
            [f"matrix:kv:block:qwen@{FIVE_TO_EIGHT}", f"vllm:kv:block:{POD}@222", MARKER]
        )
        sidecar.apply(AllBlocksCleared())
        await until(lambda: sidecar.writer.in_step)
        assert await client.keys("*") == [MARKER]


async def test_sglangs_names_are_signed(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, engine="sglang", pod="pod-1")
    background(sidecar.writer.run())
    sidecar.apply(stored([111], [1, 2, 3, 4]), stored([2**64 - 5], [5, 6, 7, 8]))
    await until(lambda: sidecar.writer.in_step)
    async with redis_server.client() as client:
        assert await client.get("sglang:kv:block:pod-1@111") == str(ONE_TO_FOUR)
        assert await client.get("sglang:kv:block:pod-1@-5") == str(FIVE_TO_EIGHT)


async def test_others_under_the_same_key_stay(redis_server, background, until):
    key = f"matrix:kv:block:qwen@{ONE_TO_FOUR}"
    sidecar = Sidecar(redis_server.settings)
    background(sidecar.writer.run())
    async with redis_server.client() as client:
        await client.hset(key, "pod-2.default", "5")
        sidecar.apply(stored([1], [1, 2, 3, 4]))
        await until(lambda: sidecar.writer.in_step)
        sidecar.apply(stored([2], [1, 2, 3, 4], parent=9), BlockRemoved((1,)))
        await until(lambda: sidecar.writer.in_step)
        assert (await client.hgetall(key)).keys() == {POD, "pod-2.default"}
        sidecar.apply(BlockRemoved((2,)))
        await until(lambda: sidecar.writer.in_step)
        assert await client.hgetall(key) == {"pod-2.default": "5"}


async def test_values_can_name_the_medium(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, options=WriterSettings(media=True))
    background(sidecar.writer.run())
    sidecar.apply(stored([1], [1, 2, 3, 4]), stored([1], [1, 2, 3, 4], medium="CPU"))
    async with redis_server.client() as client:
        await until(lambda: sidecar.writer.in_step)
        assert (await owned(client))[f"qwen@{ONE_TO_FOUR}"].endswith("|GPU")
        sidecar.apply(BlockRemoved((1,), medium="GPU"))
        await until(lambda: sidecar.writer.in_step)
        assert (await owned(client))[f"qwen@{ONE_TO_FOUR}"].endswith("|CPU")


async def test_what_a_predecessor_left_is_deleted(redis_server, background, until):
    model = "org/[model]*?"
    async with redis_server.client() as client:
        for number in range(2000):
            await client.hset(f"matrix:kv:block:{model}@{number}", POD, "5")
        await client.hset(f"matrix:kv:block:{model}@7", "pod-2.default", "5")
        await client.hset("matrix:kv:block:adapter@7", POD, "5")
        await client.set("matrix:kv:block:of-another-type@1", "x")
        sidecar = Sidecar(redis_server.settings, model=model)
        background(sidecar.writer.run())
        sidecar.apply(stored([1], [1, 2, 3, 4]))
        await until(lambda: sidecar.writer.in_step)
        assert (await owned(client)).keys() == {f"{model}@{ONE_TO_FOUR}"}
        assert await owned(client, "pod-2.default") == {f"{model}@7": "5"}
        assert sidecar.writer.counts["swept"] == 2001


async def test_a_redis_that_comes_back_empty_is_filled_again(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings)
    background(sidecar.writer.run())
    sidecar.apply(stored([1], [1, 2, 3, 4]))
    await until(lambda: sidecar.writer.in_step)
    redis_server.kill()
    await until(lambda: not sidecar.writer.connected)
    sidecar.apply(stored([2], [5, 6, 7, 8], parent=1))
    redis_server.start()
    await until(lambda: sidecar.writer.in_step)
    async with redis_server.client() as client:
        assert (await owned(client)).keys() == {f"qwen@{ONE_TO_FOUR}", f"qwen@{FIVE_TO_EIGHT}"}


async def test_a_stalled_redis_gets_what_it_missed(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings)
    background(sidecar.writer.run())
    sidecar.apply(stored([1], [1, 2, 3, 4]))
    await until(lambda: sidecar.writer.in_step)
    redis_server.stall()
    sidecar.apply(BlockRemoved((1,)), stored([2], [5, 6, 7, 8]))
    await until(lambda: sidecar.writer.failures["timeout"] >= 2)
    redis_server.resume()
    await until(lambda: sidecar.writer.in_step)
    async with redis_server.client() as client:
        assert (await owned(client)).keys() == {f"qwen@{FIVE_TO_EIGHT}"}
    assert sidecar.writer.counts["resyncs"] == 1


async def test_too_many_changes_are_dropped_and_all_is_written_anew(redis_server, background, until):
    options = WriterSettings(timeout=0.3, reconnect=0.01, most_reconnect=0.05, most_changed=100, batch=64)
    sidecar = Sidecar(redis_server.settings, options=options)
    background(sidecar.writer.run())
    await until(lambda: sidecar.writer.in_step)
    redis_server.stall()
    for number in range(500):
        sidecar.apply(stored([number], [number, 0]))
        assert sidecar.writer.behind <= 100
    sidecar.apply(*[BlockRemoved((number,)) for number in range(0, 500, 2)])
    redis_server.resume()
    await until(lambda: sidecar.writer.in_step)
    assert sidecar.writer.counts["overflows"] >= 1
    expected = {f"qwen@{block}" for block, _ in sidecar.ownership.holdings("qwen")}
    assert len(expected) == 250
    async with redis_server.client() as client:
        assert (await owned(client)).keys() == expected


async def test_a_full_redis_takes_deletions_now_and_the_rest_when_it_can(make_redis, background, until):
    server = make_redis("--maxmemory-policy", "noeviction")
    sidecar = Sidecar(server.settings)
    background(sidecar.writer.run())
    sidecar.apply(stored([1], [1, 2, 3, 4]))
    await until(lambda: sidecar.writer.in_step)
    async with server.client() as client:
        await client.config_set("maxmemory", "1")
        sidecar.apply(BlockRemoved((1,)), stored([2], [5, 6, 7, 8]))
        await until(lambda: sidecar.writer.counts["refused_oom"] >= 1)
        assert await owned(client) == {}
        await client.config_set("maxmemory", "0")
        await until(lambda: sidecar.writer.in_step)
        assert (await owned(client)).keys() == {f"qwen@{FIVE_TO_EIGHT}"}


async def test_a_key_of_another_type_stops_nothing(redis_server, background, until):
    async with redis_server.client() as client:
        await client.set(f"matrix:kv:block:qwen@{ONE_TO_FOUR}", "x")
        sidecar = Sidecar(redis_server.settings)
        background(sidecar.writer.run())
        sidecar.apply(stored([1, 2], range(1, 9)))
        await until(lambda: sidecar.writer.in_step)
        assert (await owned(client)).keys() == {f"qwen@{FIVE_TO_EIGHT}"}
    assert sidecar.writer.counts["refused_wrongtype"] >= 1


async def test_passwords(make_redis, background, until):
    server = make_redis("--requirepass", "secret")
    wrong = RedisSettings("127.0.0.1", server.port, password="guess")
    with pytest.raises(RedisUnavailableError, match=r"127\.0\.0\.1:\d+: WRONGPASS"):
        await RedisConnection.open(wrong)
    with pytest.raises(RedisUnavailableError, match="NOAUTH"):
        await RedisConnection.open(server.settings)
    sidecar = Sidecar(RedisSettings("127.0.0.1", server.port, db=3, username="default", password="secret"))
    background(sidecar.writer.run())
    sidecar.apply(stored([1], [1, 2, 3, 4]))
    await until(lambda: sidecar.writer.in_step)
    async with server.client(password="secret", db=3) as client:
        assert (await owned(client)).keys() == {f"qwen@{ONE_TO_FOUR}"}


async def test_a_sidecar_that_leaves_takes_its_ownership_along(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings)
    task = background(sidecar.writer.run())
    sidecar.apply(stored([1, 2], range(1, 9)))
    await until(lambda: sidecar.writer.in_step)
    task.cancel()
    assert await sidecar.writer.withdraw(2.0)
    async with redis_server.client() as client:
        assert await client.keys("*") == []
    redis_server.kill()
    assert not await sidecar.writer.withdraw(0.5)


async def test_what_those_that_are_gone_left_is_deleted_after_a_day(redis_server):
    now = 1_700_000_000
    async with redis_server.client() as client:
        key = "matrix:kv:block:m@1"
        values = {"old.ns": now - 90_000, "tier.ns": f"{now - 90_000}|CPU", "day.ns": now - 86_400, "odd.ns": "soon"}
        await client.hset(key, mapping=values)
        await client.hset("matrix:kv:block:m@2", "old.ns", now - 86_401)
        await client.set("matrix:kv:block:m@3", "x")
        connection = await RedisConnection.open(redis_server.settings)
        assert await delete_stale_owners(connection, clock=lambda: now) == 3
        connection.close()
        assert (await client.hgetall(key)).keys() == {"day.ns", "odd.ns"}
        assert await client.exists("matrix:kv:block:m@2") == 0


async def test_a_peer_that_does_not_speak_redis_is_an_error():
    async def greet(_, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(RedisUnavailableError, match="Protocol"):
        await RedisConnection.open(RedisSettings("127.0.0.1", port))
    server.close()
    await server.wait_closed()


async def test_four_sidecars_and_a_redis_that_dies_in_between(redis_server, background, until):
    sidecars = [Sidecar(redis_server.settings, pod=f"pod-{number}.ns") for number in range(4)]
    for sidecar in sidecars:
        background(sidecar.writer.run())
    for step in range(120):
        for number, sidecar in enumerate(sidecars):
            sidecar.apply(stored([step], [step, 0], parent=step - 1 if step else None))
            if step % (number + 2) == 1:
                sidecar.apply(BlockRemoved((step - 1,)))
        if step == 40:
            redis_server.kill()
        if step == 80:
            redis_server.start()
        await asyncio.sleep(0.002)
    await until(lambda: all(sidecar.writer.in_step for sidecar in sidecars))
    async with redis_server.client() as client:
        for sidecar in sidecars:
            expected = {f"qwen@{block}" for block, _ in sidecar.ownership.holdings("qwen")}
            assert (await owned(client, sidecar.pod)).keys() == expected
