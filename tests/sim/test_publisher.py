"""The publisher through real ZMQ sockets, against frames of real engines and the cache that it speaks of."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from picker.sim.block_cache import key_tokens
from picker.sim.config import EngineSimConfig
from picker.sim.engine import Engine, Request
from picker.sim.event_wire import encode_batch
from picker.sim.events import AllBlocksCleared, BlockRemoved, BlockStored
from picker.sim.launch import RunningEngine, start_engine
from picker.sim.limits import EngineLimits, StepCost
from picker.sim.publisher import EventFaults, KvEventPublisher, KvEventSettings, open_publishers, port_of

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
EVENTS = [
    BlockStored(((1 << 63) + 5, 7), None, tuple(range(100, 132)), 16, None, (None, None)),
    BlockStored((11,), 7, tuple(range(132, 148)), 16, "ad-7", (("ad-7",),)),
    BlockRemoved((11,)),
    AllBlocksCleared(),
]
END = b"\xff" * 8


@pytest.mark.parametrize(("form", "golden"), [("map", "vllm-0.30.0"), ("array", "vllm-0.20.0")])
def test_batches_are_byte_for_byte_those_of_the_engine(form: Any, golden: str) -> None:
    expected = (GOLDEN / f"{golden}.msgpack").read_bytes()
    encoded = encode_batch(EVENTS, 1.5, 0, lora_ids={"ad-7": 7}, form=form)
    assert msgspec.msgpack.decode(encoded) == msgspec.msgpack.decode(expected)
    assert encoded == expected


class Listener:
    """Plain sockets, as any subscriber would use them."""

    def __init__(self, context: zmq.asyncio.Context, publisher: KvEventPublisher) -> None:
        self.live = context.socket(zmq.SUB)
        self.live.subscribe(b"")
        self.live.connect(publisher.endpoint)
        self.replays = context.socket(zmq.DEALER)
        if publisher.replay_endpoint:
            self.replays.connect(publisher.replay_endpoint)

    async def next(self) -> list[bytes]:
        async with asyncio.timeout(5):
            return await self.live.recv_multipart()

    async def replay(self, start: int) -> list[list[bytes]]:
        """Return the replies without the end marker."""
        await self.replays.send_multipart([b"", start.to_bytes(8, "big")])
        replies = []
        async with asyncio.timeout(5):
            while (reply := await self.replays.recv_multipart())[-2] != END:
                replies.append(reply)
        self.end = reply
        return replies

    async def batches(self) -> list[Any]:
        return [msgspec.msgpack.decode(reply[-1]) for reply in await self.replay(0)]


@asynccontextmanager
async def serve(events: KvEventSettings, **settings: Any) -> AsyncIterator[tuple[RunningEngine, Any, Any]]:
    config = EngineSimConfig(**{"cost": StepCost(speed=500), "grace": 0.05, "kv_events": events, **settings})
    engine = await start_engine(config)
    context = zmq.asyncio.Context()
    try:
        async with aiohttp.ClientSession(engine.url) as session:

            async def post(path: str, body: Any = None, **headers: str) -> Any:
                async with session.post(path, json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            yield engine, post, lambda rank=0: Listener(context, engine.publishers[rank])
    finally:
        context.destroy(0)
        await engine.close()


def copies(batches: list[Any]) -> Counter[int]:
    """What a cache holds according to its events."""
    held: Counter[int] = Counter()
    for batch in batches:
        for event in batch[1]:
            match event["type"]:
                case "BlockStored":
                    held.update(event["block_hashes"])
                case "BlockRemoved":
                    held.subtract(event["block_hashes"])
                case "AllBlocksCleared":
                    held.clear()
    return +held


def prompt(number: int, length: int) -> list[int]:
    return [*range(1000 * (number % 5), 1000 * (number % 5) + 32), *range(7 * number, 7 * number + length)]


async def test_replayed_events_give_the_blocks_that_the_cache_holds() -> None:
    context = zmq.asyncio.Context()
    (publisher,) = open_publishers(KvEventSettings(), "127.0.0.1", 1, (), context)
    engine = Engine(EngineLimits(block_size=16, num_gpu_blocks=80), publish=publisher.publish)
    listener = Listener(context, publisher)
    for number in range(60):
        content = key_tokens(prompt(number, number * 7 % 150) + [number] * (number % 40 + 1), 16)
        for copy in "ab":  # at the same time, so that neither finds the other's blocks
            engine.submit(Request(f"{number}{copy}", content, len(content.tokens) - number % 40 - 1), number)
        while engine.next_step(number) is not None:
            engine.finish_step(number)
        if number % 20 == 10:
            engine.reset_prefix_cache()
    held = copies(await listener.batches())
    assert held == engine.cache.copies()
    assert max(held.values()) > 1, "no block with two copies: a weak example"
    assert engine.cache.evictions > 100
    publisher.close()
    context.destroy(0)


async def test_a_late_listener_gets_the_same_by_replay_as_one_that_listened() -> None:
    async with serve(KvEventSettings()) as (_, post, listen):
        early = listen()
        await asyncio.sleep(0.2)
        live = []
        for number in range(4):
            await post("/v1/completions", {"prompt": prompt(number, 40), "max_tokens": 1})
            live.append(await early.next())
        assert [frame[:2] for frame in live] == [[b"kv-events", n.to_bytes(8, "big")] for n in range(4)]
        late = listen()
        assert [reply[0] for reply in await late.replay(0)] == [b""] * 4
        assert [reply[1:] for reply in await late.replay(0)] == live
        assert [reply[1:] for reply in await late.replay(2)] == live[2:]
        assert late.end == [b"", b"", END, b""]
        assert await late.replay(4) == []


async def test_the_older_form_replays_without_topic() -> None:
    async with serve(KvEventSettings(form="array")) as (_, post, listen):
        await post("/v1/completions", {"prompt": prompt(0, 40), "max_tokens": 1})
        listener = listen()
        (reply,) = await listener.replay(0)
        assert reply[:2] == [b"", bytes(8)]
        assert msgspec.msgpack.decode(reply[2])[1][0][0] == "BlockStored"
        assert listener.end == [b"", END, b""]


async def test_a_reset_is_published_with_the_next_step() -> None:
    async with serve(KvEventSettings()) as (_, post, listen):
        await post("/v1/completions", {"prompt": prompt(0, 40), "max_tokens": 1})
        await post("/reset_prefix_cache")
        listener = listen()
        assert len(await listener.batches()) == 1
        await post("/v1/completions", {"prompt": prompt(0, 40), "max_tokens": 1})
        batches = await listener.batches()
        assert [event["type"] for event in batches[1][1]] == ["AllBlocksCleared", "BlockStored"]


async def test_the_replay_buffer_keeps_the_last_steps() -> None:
    async with serve(KvEventSettings(buffer_steps=3)) as (_, post, listen):
        for number in range(5):
            await post("/v1/completions", {"prompt": prompt(number, 40 + number), "max_tokens": 1})
        assert [int.from_bytes(reply[2], "big") for reply in await listen().replay(0)] == [2, 3, 4]


async def test_ranks_have_caches_ports_and_sequences_of_their_own() -> None:
    async with serve(KvEventSettings(), data_parallel_size=3) as (engine, post, listen):
        ports = [port_of(publisher.endpoint) for publisher in engine.publishers]
        assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
        body = {"prompt": prompt(0, 40), "max_tokens": 1}
        pin = {"X-data-parallel-rank": "2"}
        assert (await post("/v1/completions", body, **pin))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await post("/v1/completions", body, **pin))["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        for expected in (0, 0, 64, 64):  # each in turn: ranks 0 and 1 are cold
            usage = (await post("/v1/completions", body))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected
        for rank in range(3):
            batches = await listen(rank).batches()
            assert {batch[2] for batch in batches} == {rank}
            assert sum(copies(batches).values()) == 4
        async with aiohttp.ClientSession(engine.url) as session:
            async with session.get("/kv_event_sources") as response:
                assert sorted(await response.json()) == ["0", "1", "2"]
            async with session.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "3"}) as response:
                assert response.status == 400
            async with session.get("/metrics") as response:
                assert (await response.text()).count("vllm:num_requests_running{") == 3


async def test_a_restarted_engine_has_an_empty_cache_and_counts_from_zero() -> None:
    async with serve(KvEventSettings()) as (engine, post, listen):
        body = {"prompt": prompt(0, 40), "max_tokens": 1}
        for _ in range(3):
            await post("/v1/completions", body)
        endpoints = [publisher.endpoint for publisher in engine.publishers]
        await post("/sim/restart")
        assert [publisher.endpoint for publisher in engine.publishers] == endpoints
        assert engine.stats()["requests"] == 0
        listener = listen()
        assert await listener.replay(0) == []
        assert (await post("/v1/completions", body))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert [reply[2] for reply in await listener.replay(0)] == [bytes(8)]


async def test_a_restart_breaks_off_what_is_running() -> None:
    async with serve(KvEventSettings(), cost=StepCost(speed=0.5)) as (engine, post, _):
        async with aiohttp.ClientSession(engine.url) as session:
            request = asyncio.ensure_future(session.post("/v1/completions", json={"prompt": "a", "max_tokens": 500}))
            while not engine.stats()["running"]:
                await asyncio.sleep(0.01)
            await post("/sim/restart")
            async with await request as response:
                assert response.status == 500
        assert engine.stats()["running"] == 0
        assert (await post("/v1/completions", {"prompt": "a", "max_tokens": 1}))["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("faults", "sequences"),
    [
        (EventFaults(drop_every=3), [0, 1, 3, 4]),
        (EventFaults(repeat_every=3), [0, 1, 2, 2, 3, 4, 5, 5]),
        (EventFaults(swap_every=3), [0, 1, 3, 2, 4]),
    ],
)
async def test_faults_hit_live_frames_and_not_replays(faults: EventFaults, sequences: list[int]) -> None:
    async with serve(KvEventSettings()) as (_, post, listen):
        await post("/sim/kv_event_faults", msgspec.to_builtins(faults))
        listener = listen()
        await asyncio.sleep(1.0)
        for number in range(6):
            await post("/v1/completions", {"prompt": prompt(number, 40 + number), "max_tokens": 1})
        assert [int.from_bytes((await listener.next())[1], "big") for _ in sequences] == sequences
        assert len(await listener.replay(0)) == 6


async def test_a_port_in_use_is_an_error_and_leaves_nothing_behind() -> None:
    async with serve(KvEventSettings()) as (engine, _, _):
        taken = port_of(engine.publishers[0].endpoint)
        with pytest.raises(OSError, match=f"cannot listen for kv events on 127.0.0.1:{taken}"):
            await start_engine(EngineSimConfig(kv_events=KvEventSettings(taken, None)))
