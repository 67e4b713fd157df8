"""Streams between real servers and real clients, and clients against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from picker.core.block_index.index import BlockIndex
from picker.core.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from picker.core.kv_index.hash_index import HashIndex
from picker.core.kv_index.ownership import Ownership
from picker.io.kv_index.stream_client import ClientSettings
from picker.io.kv_index.stream_clients import StreamClients
from picker.io.kv_index.stream_server import REGISTER, StreamServer, StreamSettings

ONE_TO_FOUR = 4233425515844289900
FIVE_TO_EIGHT = 929962052233473060
BOTH = [ONE_TO_FOUR, FIVE_TO_EIGHT]


def stored(names, tokens, parent=None, **fields) -> BlockStored:
    return BlockStored(tuple(names), parent, tuple(tokens), len(tokens) // len(names), **fields)


class Sidecar:
    def __init__(self, **settings) -> None:
        self.ownership = Ownership("m")
        self.server = StreamServer(self.ownership, "pod.ns", StreamSettings(**settings))
        self.address = ""

    def apply(self, *events, rank=0) -> None:
        def change() -> None:
            changes = self.ownership.apply(rank, events, time.time())
            self.server.changed(changes, rank, EventBatch(1.0, events, rank))

        self.server.do(change)

    def begin(self, rank=0, since=0) -> None:
        self.server.do(lambda: self.server.begun(self.ownership.forget(rank, time.time()), rank, since))


@asynccontextmanager
async def served(handler, port=0):
    app = web.Application()
    app.router.add_post(REGISTER, handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def sidecar():
    it = Sidecar()
    async with served(it.server.register) as it.address:
        yield it
        it.server.stop()


class BlockFeed:
    """Applies an endpoint's own events to a block index, as one that is subscribed directly does."""

    def __init__(self, index: BlockIndex, slot: int) -> None:
        self.index, self.slot = index, slot
        self.since: dict[int, int] = {}

    def on_batch(self, batch, rank) -> None:
        assert batch.data_parallel_rank == rank
        self.index.apply(self.slot, "m", batch, 1.0)

    def on_restart(self, rank) -> None:
        self.since[rank] = 0
        self.index.restart(self.slot, rank)

    def on_incomplete(self, rank, since) -> None:
        self.since[rank] = since
        self.index.restart(self.slot, rank)


def picker(router="ns/router", *, engine=None, clock=time.time, started_at=None, most_blocks=1 << 20, **settings):
    index = HashIndex(most_blocks)
    settings = {"reconnect": 0.01, "most_reconnect": 0.05, **settings}
    return StreamClients(
        ClientSettings(router, **settings), index, engine, clock=clock, started_at=started_at or (lambda _: None)
    ), index


async def test_a_stream_begins_with_everything_and_goes_on_with_changes(sidecar, background, until):
    sidecar.apply(stored([1], [1, 2, 3, 4]))
    clients, index = picker()
    background(clients.run())
    clients.follow({3: ("pod", sidecar.address)})
    await until(lambda: index.match("m", BOTH, 8) == [(1, 8)])
    sidecar.apply(stored([2], [5, 6, 7, 8], parent=1))
    await until(lambda: index.match("m", BOTH, 8) == [(2, 8)])
    sidecar.apply(BlockRemoved((1,)))
    await until(lambda: index.match("m", [ONE_TO_FOUR], 8) == [])
    assert index.match("m", [FIVE_TO_EIGHT], 8) == [(1, 8)]
    sidecar.apply(AllBlocksCleared())
    await until(lambda: index.blocks == 0)


async def test_the_wire(sidecar):
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{sidecar.address}{REGISTER}", json={"router_id": "ns/r"}) as response,
    ):
        assert response.status == 200
        assert response.content_type == "application/x-ndjson"
        first = json.loads(await response.content.readline())
        assert first["events"] == [{"type": "snapshot", "block_hashes": [], "timestamps": []}]
        before = int(time.time())
        sidecar.apply(stored([1], [1, 2, 3, 4]))
        line = json.loads(await response.content.readline())
        assert (line["pod_identifier"], line["model_name"]) == ("pod.ns", "m")
        (event,) = line["events"]
        assert event == {"type": "stored", "block_hashes": [ONE_TO_FOUR], "timestamp": event["timestamp"]}
        assert before <= event["timestamp"] <= time.time()


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [(b"{", 400, "no registration"), (b'{"router_id": ""}', 400, "router_id must not be empty"), (b" " * 70_000, 400, "65536")],
)  # fmt: skip
async def test_registrations_that_make_no_sense(sidecar, body, status, detail):
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{sidecar.address}{REGISTER}", data=body) as response,
    ):
        assert response.status == status
        assert detail in (await response.json())["detail"]
    assert sidecar.server.counts["bad_request"] == 1
    assert sidecar.server.streams == 0


async def test_a_token_is_asked_for(background, until):
    sidecar = Sidecar(token="secret")
    async with served(sidecar.server.register) as address, aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Basic secret"}):
            async with session.post(
                f"http://{address}{REGISTER}", json={"router_id": "r"}, headers=headers
            ) as response:
                assert response.status == 401
        clients, index = picker(token="secret")
        background(clients.run())
        sidecar.apply(stored([1], [1, 2, 3, 4]))
        clients.follow({0: ("pod", address)})
        await until(lambda: index.blocks == 1)
        wrong, _ = picker("other", token="guess")
        background(wrong.run())
        wrong.follow({0: ("pod", address)})
        await until(lambda: wrong.counts["status_401"] >= 1)
        assert "bearer token" in wrong.streams[0].error
        sidecar.server.stop()


async def test_an_idle_stream_has_a_pulse_and_a_silent_one_is_opened_anew(background, until):
    lively, silent = Sidecar(heartbeat=0.05), Sidecar(heartbeat=60)
    async with served(lively.server.register) as one, served(silent.server.register) as other:
        clients, _ = picker(silence=0.3)
        background(clients.run())
        clients.follow({0: ("a", one), 1: ("b", other)})
        await until(lambda: clients.counts["silent"] >= 2)
        assert clients.streams[0].opened == 1
        assert clients.streams[1].opened >= 2
        lively.server.stop()
        silent.server.stop()


async def test_one_router_has_one_stream(sidecar, until):
    async with aiohttp.ClientSession() as session:
        url = f"http://{sidecar.address}{REGISTER}"
        async with session.post(url, json={"router_id": "r"}) as first:
            await first.content.readline()
            async with session.post(url, json={"router_id": "r"}) as second:
                await second.content.readline()
                assert await first.content.read() == b""
                await until(lambda: sidecar.server.streams == 1)
                sidecar.apply(stored([1], [1, 2, 3, 4]))
                assert b"stored" in await second.content.readline()
    await until(lambda: sidecar.server.streams == 0)
    assert sidecar.server.counts == {"registered": 2, "replaced": 1, "closed": 1}


async def test_two_registrations_of_one_router_at_once_leave_one_stream(sidecar, until):
    async with aiohttp.ClientSession() as session:
        url = f"http://{sidecar.address}{REGISTER}"
        responses = await asyncio.gather(*[session.post(url, json={"router_id": "r"}) for _ in range(8)])
        await until(lambda: sidecar.server.streams == 1)
        for response in responses:
            response.close()


async def test_there_are_only_so_many_streams(until):
    sidecar = Sidecar(most_streams=3)
    async with served(sidecar.server.register) as address, aiohttp.ClientSession() as session:
        url = f"http://{address}{REGISTER}"
        opened = [await session.post(url, json={"router_id": f"r{n}"}) for n in range(3)]
        async with session.post(url, json={"router_id": "r3"}) as refused:
            assert refused.status == 503
        opened[0].close()
        await until(lambda: sidecar.server.streams == 2)
        async with session.post(url, json={"router_id": "r3"}) as accepted:
            assert accepted.status == 200
        for response in opened:
            response.close()


async def stalled_reader(address: str, limit: int = 4096):
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    body = b'{"router_id":"slow"}'
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (REGISTER.encode(), len(body), body))
    await writer.drain()
    await reader.readuntil(b"snapshot")
    writer.transport.pause_reading()
    return writer


async def test_a_router_that_does_not_read_is_ended_and_disturbs_no_other(sidecar, background, until):
    clients, index = picker()
    background(clients.run())
    clients.follow({0: ("pod", sidecar.address)})
    slow = await stalled_reader(sidecar.address)
    await until(lambda: sidecar.server.streams == 2)
    blocks = 0
    started = time.monotonic()
    while sidecar.server.streams == 2:
        sidecar.apply(
            stored(range(blocks, blocks + 4000), [token for n in range(blocks, blocks + 4000) for token in (n, 1)])
        )
        blocks += 4000
        await asyncio.sleep(0.02)
        assert time.monotonic() - started < 20
    assert sidecar.server.counts["stalled"] == 1
    await until(lambda: index.blocks == blocks)
    slow.close()


async def test_a_queue_that_is_full_ends_its_stream(until):
    sidecar = Sidecar(queue_bytes=1000, stalled=30)
    async with served(sidecar.server.register) as address:
        slow = await stalled_reader(address)
        await until(lambda: sidecar.server.streams == 1)
        sidecar.apply(stored(range(500), range(1000)))
        assert sidecar.server.counts == {"registered": 1}
        slow.close()
        await until(lambda: sidecar.server.counts["queue_full"] == 1)


async def test_a_stream_that_ends_takes_its_blocks_along(background, until):
    sidecar = Sidecar()
    sidecar.apply(stored([1], [1, 2, 3, 4]))
    clients, index = picker()
    background(clients.run())
    async with served(sidecar.server.register) as address:
        clients.follow({0: ("pod", address)})
        await until(lambda: index.blocks == 1)
        sidecar.server.stop()
    await until(lambda: index.match("m", [ONE_TO_FOUR], 1) == [])
    await until(lambda: index.blocks == 0)
    async with served(sidecar.server.register, int(address.rpartition(":")[2])):
        await until(lambda: index.match("m", [ONE_TO_FOUR], 1) == [(1, 1)])
        clients.follow({})
        await until(lambda: index.blocks == 0)
        assert clients.streams == {}


async def test_a_slot_that_gets_another_endpoint_begins_anew(background, until):
    one, other = Sidecar(), Sidecar()
    one.apply(stored([1], [1, 2, 3, 4]))
    other.apply(stored([1], [5, 6, 7, 8]))
    clients, index = picker()
    background(clients.run())
    async with served(one.server.register) as first, served(other.server.register) as second:
        clients.follow({0: ("a", first)})
        await until(lambda: index.match("m", [ONE_TO_FOUR], 1))
        clients.follow({0: ("b", second)})
        await until(lambda: index.match("m", [FIVE_TO_EIGHT], 1))
        assert index.match("m", [ONE_TO_FOUR], 1) == []
        one.server.stop()
        other.server.stop()


async def test_endpoints_that_share_an_address_are_not_streamed_from(sidecar, background, until):
    clients, index = picker()
    background(clients.run())
    sidecar.apply(stored([1], [1, 2, 3, 4]))
    clients.follow({0: ("a", sidecar.address), 1: ("b", sidecar.address)})
    await asyncio.sleep(0.1)
    assert (clients.streams, clients.shared_address) == ({}, 2)
    clients.follow({1: ("b", sidecar.address)})
    await until(lambda: index.match("m", [ONE_TO_FOUR], 3) == [(1, 2)])
    assert clients.shared_address == 0


async def test_times_from_the_future_are_capped_and_a_slot_has_only_so_many_blocks(background, until):
    now = 1_000_000.0
    line = {
        "model_name": "m",
        "events": [{"type": "snapshot", "block_hashes": [1, 2, 3, 4], "timestamps": [now + 999, 5, now - 50, 0]}],
    }

    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(json.dumps(line).encode() + b"\n")
        await asyncio.sleep(30)

    clients, index = picker(clock=lambda: now, most_blocks=3)
    background(clients.run())
    async with served(handler) as address:
        clients.follow({0: ("pod", address)})
        await until(lambda: index.counts["evicted"] == 1)
        assert [bool(index.match("m", [block], 1)) for block in (1, 2, 3, 4)] == [True, False, True, True]
        assert index.expire(now, 10) == 1
        assert index.expire(now + 1, 10) == 2


class FailsOnce(BlockFeed):
    """Cannot take the first batch."""

    batches = 0

    def on_batch(self, batch, rank) -> None:
        self.batches += 1
        if self.batches == 1:
            raise ZeroDivisionError
        super().on_batch(batch, rank)


async def test_an_error_of_ours_ends_a_stream_and_not_the_streaming(sidecar, background, until, logs):
    sidecar.apply(stored([1, 2], range(1, 9)))
    handler = FailsOnce(BlockIndex(), 0)
    clients, _ = picker(engine=lambda _: handler)
    background(clients.run())
    clients.follow({0: ("pod", sidecar.address)})
    await until(lambda: handler.batches >= 2)
    assert clients.streams[0].opened == 2
    (entry,) = [entry for entry in logs.entries if entry["log_level"] == "error"]
    assert (entry["part"], entry["address"]) == ("kv_stream", sidecar.address)


async def test_an_error_of_the_index_does_not_end_its_sweeping(background, until):
    """A clock that fails once; what was stored a day ago is forgotten all the same."""
    errors = []

    def clock():
        if not errors:
            raise ZeroDivisionError
        return 200_000.0

    def failed(where, error):
        errors.append((where, type(error)))

    index = HashIndex()
    index.store(0, "m", [1, 2], [1.0, 199_999.0])
    background(StreamClients(ClientSettings("ns/router"), index, clock=clock, failed=failed).run())
    await until(lambda: index.blocks_of(0) == 1)
    assert errors == [("kv_stream_index", ZeroDivisionError)]


async def test_what_is_from_before_the_engines_start_is_nobodys(background, until):
    def line(*blocks, kind="snapshot"):
        hashes, times = zip(*blocks, strict=True)
        event = {"type": kind, "block_hashes": hashes, "timestamps": times}
        return json.dumps({"model_name": "m", "events": [event]}).encode() + b"\n"

    lines = asyncio.Queue()

    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while chunk := await lines.get():
            await response.write(chunk)
        return response

    started = {3: None}
    clients, index = picker(clock=lambda: 1000.0, started_at=started.get)
    background(clients.run())

    def known() -> list[int]:
        return [block for block in range(1, 7) if index.match("m", [block], 8)]

    async with served(handler) as address:
        clients.follow({3: ("pod", address)})
        # The sidecar goes on as its engine restarts, and then the picker learns when that was.
        lines.put_nowait(line((1, 500), (2, 700)))
        lines.put_nowait(line((3, 600), (4, 601), kind="stored"))
        await until(lambda: known() == [1, 2, 3, 4])
        started[3] = 600.0
        await until(lambda: known() == [2, 4])
        assert index.counts["before_start"] == 2
        # Another stream begins with what the sidecar still believes.
        lines.put_nowait(b"")
        await until(lambda: clients.counts["ended"] == 1)
        lines.put_nowait(line((1, 500), (2, 700), (5, 600), (6, 600.5)))
        await until(lambda: known() == [2, 6])
        assert clients.counts["before_start"] == 2
        started[3] = 700.0
        await until(lambda: known() == [])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"events":[{"type":"stored","block_hashes":[1,"2"]}]}\n', "malformed"),
        (b'{"events":[{"type":"stored","block_hashes":[1],"timestamps":[]}]}\n', "timestamps"),
        (b"<html>\n", "malformed"),
        (b"x" * (9 << 20), "line_too_long"),
        (b"", "ended"),
    ],
)
async def test_a_stream_that_cannot_be_understood_is_opened_anew(answer, reason, background, until):
    good = b'{"model_name":"m","events":[{"type":"snapshot","block_hashes":[1],"timestamps":[5]}]}\n'

    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(good)
        await response.write(answer)
        return response

    clients, index = picker()
    background(clients.run())
    async with served(handler) as address:
        clients.follow({0: ("pod", address)})
        await until(lambda: clients.counts[reason] >= 2)
        clients.follow({})
        await until(lambda: index.blocks == 0)


async def test_a_sidecar_in_another_mode_says_so(background, until):
    async def handler(_):
        return web.json_response({"detail": "Runtime is not in memory KV event sync mode"}, status=409)

    clients, _ = picker()
    background(clients.run())
    async with served(handler) as address:
        clients.follow({0: ("pod", address)})
        await until(lambda: clients.counts["status_409"] >= 1)
        assert "Runtime is not in memory KV event sync mode" in clients.streams[0].error


async def test_events_during_a_snapshot_come_after_it(sidecar, background, until):
    """Thousands of blocks make a snapshot that is taken in slices, while the engine goes on."""
    blocks = 30_000
    sidecar.apply(*[stored([n], [n, 7]) for n in range(blocks)])
    clients, index = picker()
    background(clients.run())
    clients.follow({0: ("pod", sidecar.address)})
    while not clients.streams or not clients.streams[0].connected:
        sidecar.apply(BlockRemoved((blocks - 1,)), stored([blocks], [blocks, 7]))
        blocks += 1
        await asyncio.sleep(0)
    expected = sidecar.ownership.held
    await until(lambda: index.blocks == expected)
    held = [block for block, _ in sidecar.ownership.holdings("m")]
    assert index.match("m", held, 1) == [(len(held), 1)]


async def test_the_engines_own_events_make_the_same_block_index_as_a_subscription(sidecar, background, until):
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
    history = [
        (stored([11, 12, 13], range(1, 7), group_idx=0, kv_cache_spec_kind="full_attention"), stored([12, 13], [3, 4, 5, 6], parent=11, **window)),
        (stored([12], [3, 4], parent=11, group_idx=0, kv_cache_spec_kind="full_attention"),),
        (BlockRemoved((12, 11), group_idx=0), BlockRemoved((13,), group_idx=1)),
        (stored([21], [1, 2], extra_keys=(("salt",),), group_idx=0), stored([21], [1, 2], extra_keys=(("salt",),), **window)),
        (stored([31], [1, 2], lora_name="a", group_idx=0), stored([31], [1, 2], lora_name="a", **window)),
    ]  # fmt: skip
    after = [
        (stored([11], [1, 2], group_idx=0), stored([14], [7, 8], parent=13, group_idx=0)),
        (stored([13, 14], [5, 6, 7, 8], parent=12, **window),),
        (BlockRemoved((12,), group_idx=0),),
    ]
    direct, streamed = BlockIndex(), BlockIndex()
    feed, feeds = BlockFeed(direct, 0), []

    def engine(slot):
        feeds.append(BlockFeed(streamed, slot))
        return feeds[-1]

    def predictions(index):
        prompts = [
            index.prompt("m", tokens, adapter=adapter, cache_salt=salt)
            for tokens in ([1, 2, 9], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9])
            for adapter in (None, "a")
            for salt in (None, "salt")
        ]
        return [index.predict(prompt, 0).cached_tokens for prompt in prompts]

    sidecar.begin(rank=0)
    for events in history:
        sidecar.apply(*events)
        feed.on_batch(EventBatch(1.0, events, 0), 0)
    clients, index = picker(engine=engine)
    background(clients.run())
    clients.follow({0: ("pod", sidecar.address)})
    await until(lambda: clients.streams and clients.streams[0].extended)
    await until(lambda: streamed.stats() and streamed.stats()[0].blocks == direct.stats()[0].blocks)
    assert predictions(streamed) == predictions(direct)
    for events in after:
        sidecar.apply(*events)
        feed.on_batch(EventBatch(1.0, events, 0), 0)
        lines = clients.counts["lines"]
        await until(lambda lines=lines: clients.counts["lines"] > lines)
        assert predictions(streamed) == predictions(direct)
    assert any(predictions(direct))
    assert feeds[0].since == {0: 0}
    assert index.blocks == 0
    sidecar.begin(rank=0, since=9)
    await until(lambda: feeds[0].since == {0: 9})
    assert predictions(streamed) == [0] * len(predictions(streamed))


async def test_two_pickers_and_four_sidecars_at_once(background, until):
    sidecars = [Sidecar() for _ in range(4)]
    async with (
        served(sidecars[0].server.register) as a,
        served(sidecars[1].server.register) as b,
        served(sidecars[2].server.register) as c,
        served(sidecars[3].server.register) as d,
    ):
        endpoints = {slot: (slot, address) for slot, address in enumerate((a, b, c, d))}
        pickers = [picker(f"ns/router-{number}") for number in range(2)]
        for clients, _ in pickers:
            background(clients.run())
            clients.follow(endpoints)
        for step in range(200):
            for number, sidecar in enumerate(sidecars):
                sidecar.apply(stored([step], [step, 0], parent=step - 1 or None))
                if step % (number + 2) == 0 and step:
                    sidecar.apply(BlockRemoved((step - 1,)))
            await asyncio.sleep(0)
        for clients, index in pickers:
            expected = sum(sidecar.ownership.held for sidecar in sidecars)
            await until(lambda index=index, expected=expected: index.blocks == expected)
            for slot, sidecar in enumerate(sidecars):
                held = [block for block, _ in sidecar.ownership.holdings("m")]
                assert index.match("m", held, 1 << slot) == [(len(held), 1 << slot)]
            assert clients.counts["malformed"] == 0
        for sidecar in sidecars:
            assert sidecar.server.streams == 2
            sidecar.server.stop()
