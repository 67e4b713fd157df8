"""What happens to an engine, on its way to Redis and to routers."""

from __future__ import annotations

import json

import aiohttp
from aiohttp import web

from picker.core.kv_events.events import BlockRemoved, BlockStored, EventBatch
from picker.core.kv_index.ownership import Ownership
from picker.io.kv_index.feed import REFRESH_AFTER, OwnershipFeed
from picker.io.kv_index.redis_writer import RedisWriter
from picker.io.kv_index.stream_server import REGISTER, StreamServer

ONE_TO_FOUR = 4233425515844289900


class Recorder:
    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def on_batch(self, batch, rank) -> None:
        self.heard.append(("batch", rank, len(batch.events)))

    def on_restart(self, rank) -> None:
        self.heard.append(("restart", rank))

    def on_incomplete(self, rank, since) -> None:
        self.heard.append(("incomplete", rank, since))


def batch(*events) -> EventBatch:
    return EventBatch(1.0, events, 0)


async def test_what_is_held_for_long_is_said_again(redis_server, background, until):
    now = [1_700_000_000.0]
    ownership = Ownership("m")
    writer = RedisWriter(redis_server.settings, ownership, "pod.ns", "vllm")
    streams = StreamServer(ownership, "pod.ns")
    feed = OwnershipFeed(ownership, redis=writer, streams=streams, clock=lambda: now[0])
    background(writer.run())
    app = web.Application()
    app.router.add_post(REGISTER, streams.register)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    feed.on_batch(batch(BlockStored((1,), None, (1, 2, 3, 4), 4)), 0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}{REGISTER}"
    async with aiohttp.ClientSession() as session, session.post(url, json={"router_id": "r"}) as response:
        (event,) = json.loads(await response.content.readline())["events"]
        assert event == {"type": "snapshot", "block_hashes": [ONE_TO_FOUR], "timestamps": [1_700_000_000]}
        now[0] += REFRESH_AFTER
        feed.refresh()
        now[0] += 5
        feed.refresh()
        (event,) = json.loads(await response.content.readline())["events"]
        assert event == {"type": "stored", "block_hashes": [ONE_TO_FOUR], "timestamp": int(now[0])}
        await until(lambda: writer.in_step)
        async with redis_server.client() as client:
            assert await client.hgetall(f"matrix:kv:block:m@{ONE_TO_FOUR}") == {"pod.ns": str(int(now[0]))}
        feed.on_restart(0)
        (event,) = json.loads(await response.content.readline())["events"]
        assert event == {"type": "cleared"}
        await until(lambda: writer.in_step)
        async with redis_server.client() as client:
            assert await client.keys("matrix:kv:block:*") == []
    streams.stop()
    await runner.cleanup()


def test_others_hear_of_everything_too():
    recorder = Recorder()
    feed = OwnershipFeed(Ownership("m"), then=[recorder])
    feed.on_restart(0)
    feed.on_batch(batch(BlockRemoved((1,))), 0)
    feed.on_incomplete(1, 7)
    assert recorder.heard == [("restart", 0), ("batch", 0, 1), ("incomplete", 1, 7)]
