"""A Redis that loses what was written while the sidecar stays connected: flushed, evicting, failed over."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from picker.core.kv_events.events import BlockRemoved, BlockStored
from picker.core.kv_index.ownership import Ownership
from picker.io.kv_index.redis_connection import RedisSettings
from picker.io.kv_index.redis_layout import Layout
from picker.io.kv_index.redis_losses import Losses, Marker
from picker.io.kv_index.redis_writer import RedisWriter, WriterSettings

POD = "pod-1.default"
MARKER = f"picker:kv:sidecar:{POD}"
FAST = {
    "timeout": 1.0,
    "reconnect": 0.01,
    "most_reconnect": 0.05,
    "look_every": 0.02,
    "batch": 100,
    "resync_pause": 0.1,
}


class Sidecar:
    def __init__(self, settings: RedisSettings, *, blocks: int = 0, **options) -> None:
        self.ownership = Ownership("qwen")
        self.writer = RedisWriter(settings, self.ownership, POD, "vllm", WriterSettings(**{**FAST, **options}))
        self.store(*range(blocks))

    def store(self, *names: int) -> None:
        self.apply(*[BlockStored((name,), None, (name, 0, 0, 0), 4) for name in names])

    def apply(self, *events) -> None:
        self.writer.note(self.ownership.apply(0, events, time.time()))

    @property
    def should(self) -> dict[str, str]:
        """What Redis should say, by the layout's own words."""
        holdings = self.ownership.holdings("qwen")
        return {f"matrix:kv:block:qwen@{block}": str(holding.stored_at) for block, holding in holdings}


async def owned(client) -> dict[str, str]:
    keys = [key async for key in client.scan_iter("matrix:kv:block:*", count=1000)]
    async with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hget(key, POD)
        return {key: value for key, value in zip(keys, await pipeline.execute(), strict=True) if value is not None}


async def settled(sidecar, client) -> bool:
    return await owned(client) == sidecar.should


@pytest.mark.parametrize("blocks", [1, 500])
async def test_a_flush_is_noticed_and_all_is_written_anew(redis_server, background, until, logs, blocks):
    sidecar = Sidecar(redis_server.settings, blocks=blocks)
    background(sidecar.writer.run())
    async with redis_server.client() as client:
        await until(lambda: sidecar.writer.in_step)
        assert await client.exists(MARKER)
        await client.flushall()
        await until(lambda: settled(sidecar, client))
        await until(lambda: client.exists(MARKER))
        await until(lambda: sidecar.writer.in_step)
        assert len(await client.keys(f"vllm:kv:block:{POD}@*")) == blocks
    assert sidecar.writer.counts["lost"] == 1
    assert sidecar.writer.counts["connects"] == 1
    (entry,) = [entry for entry in logs.entries if entry["log_level"] == "warning"]
    assert entry["event"] == "Redis has lost what was written; everything is written anew"
    assert "noeviction" in entry["remedy"]


async def test_a_replica_of_an_empty_one_that_takes_over_is_filled(make_redis, background, until):
    server, empty = make_redis(), make_redis()
    sidecar = Sidecar(server.settings, blocks=500)
    background(sidecar.writer.run())
    async with server.client() as client:
        await until(lambda: sidecar.writer.in_step)
        await client.execute_command("REPLICAOF", "127.0.0.1", str(empty.port))
        await until(lambda: is_empty(client))
        sidecar.apply(BlockRemoved((7,)))
        await client.execute_command("REPLICAOF", "NO", "ONE")
        await until(lambda: settled(sidecar, client))
        assert len(await owned(client)) == 499


async def is_empty(client) -> bool:
    return await client.dbsize() == 0


async def test_another_one_on_the_same_port_is_filled(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, blocks=500)
    background(sidecar.writer.run())
    await until(lambda: sidecar.writer.in_step)
    redis_server.kill()
    redis_server.start()
    async with redis_server.client() as client:
        await until(lambda: settled(sidecar, client))
    assert sidecar.writer.failures["broken"] == 1


async def test_a_flush_during_a_broken_connection_is_noticed(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, blocks=50, look_every=3600.0)
    background(sidecar.writer.run())
    async with redis_server.client() as client:
        await until(lambda: sidecar.writer.in_step and sidecar.writer.counts["resyncs"] == 1)
        await client.flushall()
        await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await until(lambda: settled(sidecar, client))
    assert sidecar.writer.counts["connects"] == 2


async def test_a_tenth_of_the_keys_comes_back(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, blocks=2000, resync_pause=3600.0)
    background(sidecar.writer.run())
    async with redis_server.client() as client:
        await until(lambda: sidecar.writer.in_step)
        for _ in range(2):  # all at once, and slice by slice
            gone = random.Random(1).sample(sorted(sidecar.should), 200)
            assert await client.delete(*gone) == 200
            await until(lambda: settled(sidecar, client))
    assert sidecar.writer.counts["resyncs"] == 2
    assert sidecar.writer.counts["connects"] == 1


async def test_a_few_keys_come_back_without_writing_everything(redis_server, background, until, logs):
    sidecar = Sidecar(redis_server.settings, blocks=1000)
    background(sidecar.writer.run())
    async with redis_server.client() as client:
        await until(lambda: sidecar.writer.in_step)
        written = sidecar.writer.counts["written"]
        gone = list(sidecar.should)[::200]
        assert await client.delete(*gone) == 5
        changed = list(sidecar.should)[1]
        await client.hset(changed, POD, "1")
        await until(lambda: settled(sidecar, client))
        assert sidecar.writer.counts["written"] == written + 6
        assert (sidecar.writer.counts["missing"], sidecar.writer.counts["altered"]) == (5, 1)
        # Every round says what it missed; the keys may have gone in the middle of one.
        await until(lambda: sum(entry.get("blocks", 0) for entry in logs.entries) == 5)
    assert sidecar.writer.counts["resyncs"] == 1


async def test_a_redis_that_evicts_is_told_again_what_it_lost(make_redis, background, until):
    server = make_redis("--maxmemory-policy", "allkeys-random")
    sidecar = Sidecar(server.settings, blocks=2000)
    background(sidecar.writer.run())
    async with server.client() as client:
        await until(lambda: sidecar.writer.in_step)
        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", used - 100_000)
        await until(lambda: sidecar.writer.counts["missing"] > 10)
        await client.config_set("maxmemory", 0)
        await until(lambda: settled(sidecar, client))


async def test_one_that_is_flushed_all_the_time_is_not_filled_all_the_time(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, blocks=300, resync_pause=3600.0)
    background(sidecar.writer.run())
    async with redis_server.client() as client:
        await until(lambda: sidecar.writer.in_step)
        while sidecar.writer.counts["lost"] < 20:
            await client.flushall()
        await until(lambda: settled(sidecar, client))  # slice by slice
    assert sidecar.writer.counts["resyncs"] == 2


async def test_a_flush_while_all_is_written_is_noticed(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, blocks=3000)
    background(sidecar.writer.run())
    async with redis_server.client() as client:
        await until(lambda: sidecar.writer.counts["written"] > 1000)
        await client.flushall()
        await until(lambda: sidecar.writer.counts["lost"] == 1)
        await until(lambda: settled(sidecar, client))


async def test_a_busy_sidecar_looks_too_and_takes_nothing_unwritten_for_lost(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, blocks=100, look_every=0.0, batch=10)
    background(sidecar.writer.run())
    await until(lambda: sidecar.writer.in_step)
    for step in range(200):
        sidecar.store(*range(step * 10, step * 10 + 10))
        sidecar.apply(BlockRemoved(tuple(range(step * 10, step * 10 + 5))))
        await asyncio.sleep(0)
    await until(lambda: not sidecar.writer.behind)
    assert sidecar.writer.counts.keys().isdisjoint({"lost", "usurped"})
    assert (sidecar.writer.counts["missing"], sidecar.writer.counts["altered"]) == (0, 0)
    async with redis_server.client() as client:
        await client.flushall()
        async with asyncio.timeout(8):
            while not sidecar.writer.counts["lost"]:  # events do not stop meanwhile
                sidecar.store(1)
                await asyncio.sleep(0)
        await until(lambda: settled(sidecar, client))


async def test_two_sidecars_under_one_name_are_told(redis_server, background, until, logs):
    sidecars = [Sidecar(redis_server.settings, blocks=5, resync_pause=3600.0) for _ in range(2)]
    background(sidecars[0].writer.run())
    await until(lambda: sidecars[0].writer.in_step)
    background(sidecars[1].writer.run())
    await until(lambda: all(sidecar.writer.counts["usurped"] for sidecar in sidecars))
    warnings = [entry["remedy"] for entry in logs.entries if entry["log_level"] == "warning"]
    assert set(warnings) == {"another sidecar writes under the same --pod: give each its own"}
    assert [sidecar.writer.counts["resyncs"] for sidecar in sidecars] == [2, 2]


async def test_a_user_who_may_not_touch_the_marker_loses_nothing(make_redis, background, until):
    server = make_redis()
    async with server.client() as client:
        await client.execute_command(
            "ACL", "SETUSER", "sidecar", "on", ">secret", "~matrix:kv:block:*", "~vllm:kv:block:*", "+@all"
        )
        settings = RedisSettings("127.0.0.1", server.port, username="sidecar", password="secret")
        sidecar = Sidecar(settings, blocks=200)
        background(sidecar.writer.run())
        await until(lambda: sidecar.writer.in_step)
        await client.delete(next(iter(sidecar.should)))
        await until(lambda: sidecar.writer.counts["missing"] == 1)
        await until(lambda: settled(sidecar, client))
    assert sidecar.writer.counts["resyncs"] == 1


async def test_a_key_of_another_type_is_not_lost(redis_server, background, until):
    sidecar = Sidecar(redis_server.settings, blocks=3)
    background(sidecar.writer.run())
    async with redis_server.client() as client:
        await until(lambda: sidecar.writer.in_step)
        key = next(iter(sidecar.should))
        await client.set(key, "x")
        await asyncio.sleep(0.2)
        assert await client.get(key) == "x"
    assert not sidecar.writer.counts["missing"]
    assert not sidecar.writer.counts["altered"]


def losses(blocks: int, most: int) -> tuple[Ownership, Losses]:
    ownership = Ownership("m")
    ownership.apply(0, [BlockStored((name,), None, (name, 0), 2) for name in range(blocks)], 5.0)
    return ownership, Losses(Layout(ownership, "p.ns", "vllm", media=False), most)


def test_every_block_is_looked_at_once_in_a_round_and_never_more_than_so_many_at_once():
    ownership, one = losses(1000, 64)
    should = sorted(f"matrix:kv:block:m@{block}" for block, _ in ownership.holdings("m"))
    for _ in range(2):
        asked = []
        for look in range(16):  # 1000 / 64
            get, expire, *rest = one.questions(())
            assert get == ("GET", "picker:kv:sidecar:p.ns")
            assert expire == ("EXPIRE", "picker:kv:sidecar:p.ns", 86_400)
            assert len(rest) <= 64
            assert {(command, owner) for command, _, owner in rest} == {("HGET", "p.ns")}
            asked += [key for _, key, _ in rest]
            found = one.read([None, 0, *[None] * len(rest)])
            assert found.round_missing == (1000 if look == 15 else 0)
            assert found.missing == len(rest)
            assert found.marker is Marker.NONE
        assert sorted(asked) == should


def test_what_is_not_written_yet_is_not_asked_for():
    ownership, one = losses(10, 64)
    blocks = [("m", block) for block, _ in ownership.holdings("m")]
    assert len(one.questions(set(blocks[:4]))) == 2 + 6


@pytest.mark.parametrize(("missing", "of", "many"), [(8, 8, False), (9, 9, True), (9, 144, False), (10, 144, True)])
def test_many_are_a_sixteenth_and_more_than_a_few(missing, of, many):
    _, one = losses(of, 512)
    one.questions(())
    assert one.read([b"x", 1, *[None] * missing, *[b"5"] * (of - missing)]).many is many
