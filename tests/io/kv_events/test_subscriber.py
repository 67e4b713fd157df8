"""The subscriber against publishers on real ZMQ sockets that come late, lose frames, die and lie."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from picker.core.kv_events.events import EventBatch
from picker.core.kv_events.sequence_limits import SequenceLimits
from picker.io.kv_events.rank import RankSubscription
from picker.io.kv_events.source import KvEventSource, SubscriberSettings
from picker.io.kv_events.subscriber import KvEventSubscriber
from picker.sim.events import BlockStored
from picker.sim.publisher import EventFaults, KvEventSettings, open_publishers

QUICK = SubscriberSettings(
    SequenceLimits(replay_idle=0.3, replay_total=3, retry=0.2, quiet=0.5, reorder=0.05), reconnect=0.02
)


class Index:
    """What a consumer knows: for each rank, the stored hashes since it last had to forget."""

    def __init__(self, ranks: int = 1) -> None:
        self.held: list[list[int]] = [[] for _ in range(ranks)]
        self.history: list[Any] = []

    def on_batch(self, batch: EventBatch, rank: int) -> None:
        for event in batch.events:
            self.held[rank] += event.block_hashes  # type: ignore[union-attr]

    def on_restart(self, rank: int) -> None:
        self.held[rank] = []
        self.history.append(("restart", rank))

    def on_incomplete(self, rank: int, since: int) -> None:
        self.held[rank] = []
        self.history.append(("incomplete", rank, since))


def event(number: int) -> BlockStored:
    return BlockStored((number,), None, (1,), 1, None, (None,))


class Scene:
    """Publishers, a subscriber, and its index."""

    def __init__(self, settings: KvEventSettings, ranks: int = 1) -> None:
        self.context = zmq.asyncio.Context()
        self.publishers = open_publishers(settings, "127.0.0.1", ranks, (), self.context)
        self.index = Index(ranks)
        self._task: asyncio.Task[None] | None = None

    def publish(self, *numbers: int, rank: int = 0) -> None:
        for number in numbers:
            self.publishers[rank].publish([event(number)], 0)

    def subscribe(self, settings: SubscriberSettings = QUICK, **source: Any) -> RankSubscription:
        first = self.publishers[0]
        where = {"endpoint": first.endpoint, "replay_endpoint": first.replay_endpoint or None}
        where |= {"ranks": len(self.publishers), **source}
        self.subscriber = KvEventSubscriber(KvEventSource(**where), self.index, settings=settings)
        self._task = asyncio.create_task(self.subscriber.run())
        return self.subscriber.ranks[0]

    async def until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    assert self._task is None or not self._task.done(), self._task
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError((self.index.held, self.index.history, self.subscriber.stats())) from None

    async def connected(self) -> None:
        await self.until(lambda: all(rank.connected and not rank._tracker.filling for rank in self.subscriber.ranks))

    async def holds(self, *numbers: int, rank: int = 0) -> None:
        await self.until(lambda: self.index.held[rank] == list(numbers))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            assert self._task.cancelled(), self._task
        for publisher in self.publishers:
            publisher.close()
        self.context.destroy(0)


@asynccontextmanager
async def scene(ranks: int = 1, **settings: Any) -> AsyncIterator[Scene]:
    made = Scene(KvEventSettings(**settings), ranks)
    try:
        yield made
    finally:
        await made.close()


async def quietly_subscribed(stage: Scene, **source: Any) -> RankSubscription:
    """Subscribe without a replay, and wait until frames arrive."""
    rank = stage.subscribe(**source)
    await stage.until(lambda: rank.connected)
    await asyncio.sleep(0.1)  # the subscription reaches the publisher after the handshake
    return rank


@pytest.mark.parametrize("form", ["map", "array"])
async def test_a_late_subscriber_gets_all_from_the_replay_buffer(form: Any) -> None:
    async with scene(form=form) as stage:
        stage.publish(*range(20))
        rank = stage.subscribe()
        await stage.holds(*range(20))
        await stage.connected()
        stage.publish(20, 21)
        await stage.holds(*range(22))
        assert (rank.complete, rank.incomplete_since, rank.last_seq) == (True, None, 21)
        assert stage.index.history == []
        assert rank.counts["replays"] == 1
        assert rank.lag is not None
        assert 0 <= rank.lag < 5


async def test_a_buffer_that_begins_later_makes_the_index_incomplete() -> None:
    async with scene(buffer_steps=5) as stage:
        stage.publish(*range(20))
        rank = stage.subscribe()
        await stage.holds(15, 16, 17, 18, 19)
        assert (rank.complete, rank.incomplete_since) == (False, 15)
        assert stage.index.history == [("incomplete", 0, 15)]


async def test_an_engine_that_has_not_published_yet_is_complete() -> None:
    async with scene() as stage:
        rank = stage.subscribe()
        await stage.connected()
        assert (rank.complete, rank.last_seq) == (True, None)
        stage.publish(0)
        await stage.holds(0)
        assert stage.index.history == []


async def test_the_engine_may_start_after_the_subscriber() -> None:
    async with scene() as stage:
        publisher = stage.publishers[0]
        publisher.close()
        rank = stage.subscribe()
        await asyncio.sleep(0.2)
        assert not rank.connected
        await publisher.restart()
        await stage.connected()
        stage.publish(1)
        await stage.holds(1)
        assert rank.complete


@pytest.mark.parametrize(
    "faults",
    [
        EventFaults(drop_every=3),
        EventFaults(corrupt_every=4),
        EventFaults(swap_every=3),
        EventFaults(repeat_every=2),
        EventFaults(drop_every=5, swap_every=3, repeat_every=2, corrupt_every=7),
    ],
)
async def test_lost_damaged_repeated_and_swapped_frames_change_nothing(faults: EventFaults) -> None:
    async with scene(faults=faults) as stage:
        rank = stage.subscribe()
        await stage.connected()
        for number in range(60):
            stage.publish(number)
            if number % 7 == 0:
                await asyncio.sleep(0.01)
        await stage.holds(*range(60))  # the last ones may be lost: silence makes it ask
        assert rank.complete
        assert stage.index.history == []
        assert rank.dropped["undecodable"] == 0 or faults.corrupt_every
        assert rank.counts["gaps"] == 0 or faults.drop_every or faults.swap_every or faults.corrupt_every


async def test_live_frames_wait_for_a_slow_replay() -> None:
    async with scene(faults=EventFaults(replay_pause=0.02)) as stage:
        stage.publish(*range(20))
        rank = stage.subscribe()
        await stage.until(lambda: len(stage.index.held[0]) > 3)
        stage.publish(20, 21, 22)
        await asyncio.sleep(0.1)
        assert rank._tracker.filling
        assert stage.index.held[0] == list(range(len(stage.index.held[0])))
        await stage.holds(*range(23))
        assert rank.complete


async def test_a_replay_buffer_too_short_for_the_gap_loses_what_came_before() -> None:
    async with scene(buffer_steps=3) as stage:
        rank = stage.subscribe()
        await stage.connected()
        stage.publish(0, 1)
        await stage.holds(0, 1)
        stage.publishers[0].faults = EventFaults(drop_every=1)
        stage.publish(*range(2, 12))
        stage.publishers[0].faults = EventFaults()
        stage.publish(12)
        await stage.holds(10, 11, 12)
        assert stage.index.history == [("incomplete", 0, 10)]
        assert (rank.complete, rank.incomplete_since, rank.counts["losses"]) == (False, 10, 1)
        stage.publish(13)
        await stage.holds(10, 11, 12, 13)


@pytest.mark.parametrize("published", [0, 1, 5, 9])
async def test_a_restarted_engine_is_noticed_whatever_it_has_published_meanwhile(published: int) -> None:
    async with scene() as stage:
        rank = stage.subscribe()
        await stage.connected()
        stage.publish(0, 1, 2, 3, 4)
        await stage.holds(0, 1, 2, 3, 4)
        publisher = stage.publishers[0]
        publisher.close()
        publisher._begin()
        stage.publish(*range(100, 100 + published))  # while nobody can connect
        await publisher._reopen()
        await stage.holds(*range(100, 100 + published))
        await stage.connected()
        stage.publish(200)
        await stage.holds(*range(100, 100 + published), 200)
        assert rank.complete
        assert rank.counts["restarts"] == 1
        assert stage.index.history == [("restart", 0)]
        assert rank.counts["connects"] == 2


async def test_a_broken_connection_to_a_living_engine_loses_nothing() -> None:
    async with scene() as stage:
        rank = stage.subscribe()
        await stage.connected()
        stage.publish(0, 1)
        await stage.holds(0, 1)
        publisher = stage.publishers[0]
        await publisher._reopen()
        stage.publish(2)  # nobody is connected yet
        await stage.until(lambda: rank.counts["connects"] == 2)
        await stage.holds(0, 1, 2)
        assert rank.complete
        assert rank.counts["restarts"] == 0
        assert stage.index.history == []


async def test_without_replay_a_gap_or_a_new_connection_leaves_the_index_incomplete() -> None:
    async with scene(replay_port=None) as stage:
        rank = await quietly_subscribed(stage)
        stage.publish(0, 1)
        await stage.holds(0, 1)
        assert rank.complete
        stage.publishers[0].faults = EventFaults(drop_every=1)
        stage.publish(2)
        stage.publishers[0].faults = EventFaults()
        stage.publish(3, 4)
        await stage.holds(3, 4)
        assert (rank.complete, rank.incomplete_since) == (False, 3)
        await stage.publishers[0].restart()
        await stage.until(lambda: rank.counts["connects"] == 2)
        await stage.holds()
        await asyncio.sleep(0.1)
        stage.publish(5)
        await stage.holds(5)
        assert rank.complete


async def test_a_replay_endpoint_that_is_dead_delays_but_does_not_stop() -> None:
    async with scene() as stage:
        stage.publish(*range(5))
        with zmq.Socket(zmq.Context.instance(), zmq.ROUTER) as silent:
            port = silent.bind_to_random_port("tcp://127.0.0.1")
            rank = stage.subscribe(replay_endpoint=f"tcp://127.0.0.1:{port}")
            await stage.until(lambda: rank.connected)
            await asyncio.sleep(0.1)
            stage.publish(5)
            await stage.holds(5)
            assert (rank.complete, rank.incomplete_since) == (False, 5)
            stage.publish(6)
            await stage.holds(5, 6)


async def test_what_a_dead_replay_endpoint_had_is_fetched_when_it_lives_again() -> None:
    async with scene() as stage:
        stage.publish(*range(5))
        router, publisher = stage.publishers[0]._router, stage.publishers[0]
        assert router is not None
        assert publisher._replays is not None
        publisher._replays.cancel()
        rank = stage.subscribe()
        await stage.until(lambda: rank.connected)
        await asyncio.sleep(0.1)
        stage.publish(5)
        await stage.holds(5)
        publisher._replays = asyncio.create_task(publisher._serve_replays(router))
        await stage.holds(*range(6))
        assert rank.complete
        stage.publish(6)
        await stage.holds(*range(7))


async def test_ranks_are_followed_separately() -> None:
    async with scene(ranks=3) as stage:
        stage.publish(1, 2, rank=0)
        stage.publish(3, rank=2)
        stage.subscribe()
        await stage.holds(1, 2, rank=0)
        await stage.holds(3, rank=2)
        await stage.connected()
        stage.publish(4, rank=1)
        await stage.holds(4, rank=1)
        assert [rank.last_seq for rank in stage.subscriber.ranks] == [1, 0, 0]
        await stage.publishers[1].restart()
        await stage.holds(rank=1)
        assert stage.index.held == [[1, 2], [], [3]]
        assert stage.index.history == [("restart", 1)]
        assert sorted(stage.subscriber.stats()) == ["0", "1", "2"]


class RawPublisher:
    """A PUB socket that sends what it is told."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.socket = zmq.Socket(context, zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)


def payload(number: int) -> bytes:
    batch = [time.time(), [["BlockStored", [number], None, [1], 1]], 0]
    return msgspec.msgpack.encode(batch)


@asynccontextmanager
async def raw(settings: SubscriberSettings = QUICK, **source: Any) -> AsyncIterator[tuple[Scene, RawPublisher, Any]]:
    async with scene(replay_port=None) as stage:
        publisher = RawPublisher(stage.context)
        rank = await quietly_subscribed(stage, settings=settings, endpoint=publisher.endpoint, **source)
        try:
            yield stage, publisher, rank
        finally:
            publisher.socket.close(0)


async def test_messages_that_no_engine_sends_are_counted() -> None:
    async with raw() as (stage, publisher, rank):
        publisher.send(b"t", b"1234567", payload(1))
        publisher.send(b"t", b"\xff" * 8, payload(2))
        publisher.send(b"t", bytes(8), payload(3), b"more")
        publisher.send(b"t", bytes(8), payload(4))
        publisher.send(b"t", (1).to_bytes(8, "big"), b"\xc1nonsense")
        publisher.send(b"t", (2).to_bytes(8, "big"), payload(5))
        await stage.holds(5)
        assert rank.dropped == {"malformed": 3, "undecodable": 1}
        assert rank.incomplete_since == 2


async def test_frames_without_a_number_are_applied_as_they_come() -> None:
    async with raw() as (stage, publisher, rank):
        publisher.send(payload(1))
        publisher.send(b"t", payload(2))
        publisher.send(b"\xc1")
        publisher.send(payload(3))
        await stage.holds(1, 2, 3)
        assert rank.counts["unnumbered"] == 4
        assert rank.dropped == {"undecodable": 1}
        assert not rank.complete


async def test_frames_beyond_the_limit_are_refused() -> None:
    limits = msgspec.structs.replace(QUICK.limits, max_frame=1000)
    async with raw(SubscriberSettings(limits)) as (stage, publisher, rank):
        publisher.send(b"t", bytes(8), payload(1))
        await stage.holds(1)
        publisher.send(b"t", (1).to_bytes(8, "big"), bytes(1001))
        publisher.send(b"t", (2).to_bytes(8, "big"), payload(2))
        await stage.holds(2)
        assert rank.dropped == {"oversized": 1}


@pytest.mark.parametrize(("exact", "held", "dropped"), [(False, [1, 2], {}), (True, [1], {"topic": 1})])
async def test_topics_are_prefixes_unless_they_must_be_exact(exact: bool, held: list[int], dropped: Any) -> None:
    async with raw(topic="kv", exact_topic=exact) as (stage, publisher, rank):
        publisher.send(b"other", bytes(8), payload(0))
        publisher.send(b"kv", bytes(8), payload(1))
        publisher.send(b"kv-events", (1).to_bytes(8, "big"), payload(2))
        await stage.holds(*held)
        await stage.until(lambda: dict(rank.dropped) == dropped)


async def test_a_consumer_that_fails_does_not_end_it() -> None:
    async with scene() as stage:
        apply = stage.index.on_batch

        def fail_once(_batch: EventBatch, _rank: int) -> None:
            stage.index.on_batch = apply  # type: ignore[method-assign]
            raise RuntimeError("no")

        stage.index.on_batch = fail_once  # type: ignore[method-assign]
        stage.publish(0, 1, 2)
        rank = stage.subscribe()
        await stage.holds(1, 2)
        assert rank.counts["handler_errors"] == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"endpoint": "tcp://*:5557"}, "give tcp://host:port"),
        ({"endpoint": "127.0.0.1:5557"}, "give tcp://host:port"),
        ({"endpoint": "tcp://127.0.0.1:0"}, "does not exist"),
        ({"endpoint": "tcp://127.0.0.1:65535", "ranks": 2}, "rank 1 would be at port 65536"),
        ({"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "inproc://x"}, "give tcp://host:port"),
        ({"endpoint": "ipc:///tmp/x", "ranks": 2}, "rank 0 only"),
        ({"endpoint": "tcp://127.0.0.1:1", "ranks": 0}, "ranks is 0"),
    ],
)
def test_sources_that_cannot_be_are_refused(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        KvEventSource(**source)


def test_host_names_and_ipv6_are_taken() -> None:
    source = KvEventSource("tcp://pod-0.engines.default.svc:5557", "tcp://[fd00::1]:5558", ranks=4)
    ranks = KvEventSubscriber(source, Index()).ranks
    assert ranks[3].endpoint == "tcp://pod-0.engines.default.svc:5560"
    assert ranks[3].replay_endpoint == "tcp://[fd00::1]:5561"
