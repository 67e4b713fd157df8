"""From the cache of an engine, over real sockets with faults and restarts, to what a subscriber believes it holds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
import zmq.asyncio

from picker.core.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from picker.core.kv_events.sequence_limits import SequenceLimits
from picker.io.kv_events.source import KvEventSource, SubscriberSettings
from picker.io.kv_events.subscriber import KvEventSubscriber
from picker.sim.block_cache import key_tokens
from picker.sim.engine import Engine, Request
from picker.sim.limits import EngineLimits
from picker.sim.publisher import EventFaults, KvEventSettings, open_publishers

SETTINGS = SubscriberSettings(
    SequenceLimits(replay_idle=0.5, replay_total=3, retry=0.2, quiet=0.3, reorder=0.05), reconnect=0.02
)
LIMITS = EngineLimits(block_size=16, num_gpu_blocks=60)


class Copies:
    """Counts the copies of every block, as told."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def on_batch(self, batch: EventBatch, _rank: int) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    self.held.update(event.block_hashes)
                case BlockRemoved():
                    self.held.subtract(event.block_hashes)
                case AllBlocksCleared():
                    self.held.clear()

    def on_restart(self, _rank: int) -> None:
        self.held.clear()

    def on_incomplete(self, _rank: int, _since: int) -> None:
        self.held.clear()  # an engine that restarts in the middle of a replay leaves it unfinished, for a while


@pytest.mark.parametrize("seed", range(3))
async def test_faults_and_restarts_end_in_what_the_cache_holds(seed: int) -> None:
    rng = random.Random(seed)
    context = zmq.asyncio.Context()
    (publisher,) = open_publishers(KvEventSettings(), "127.0.0.1", 1, (), context)
    engine = Engine(LIMITS, publish=publisher.publish)
    copies = Copies()
    subscriber = KvEventSubscriber(
        KvEventSource(publisher.endpoint, publisher.replay_endpoint), copies, settings=SETTINGS, context=context
    )
    task = asyncio.create_task(subscriber.run())
    for number in range(300):
        publisher.faults = EventFaults(
            drop_every=rng.choice([0, 2, 5]), repeat_every=rng.choice([0, 3]), corrupt_every=rng.choice([0, 0, 4])
        )
        start = rng.randrange(8) * 1000
        length = rng.randrange(20, 300)
        content = key_tokens(range(start, start + length), LIMITS.block_size)
        engine.submit(Request(str(number), content, length - 1), 0)
        while engine.next_step(0) is not None:
            engine.finish_step(0)
        if rng.random() < 0.05:
            engine.reset_prefix_cache()
        if rng.random() < 0.01:
            await publisher.restart()
            engine = Engine(LIMITS, publish=publisher.publish)
        if rng.random() < 0.3:
            await asyncio.sleep(0.001 * rng.randrange(20))
    publisher.faults = EventFaults()
    (rank,) = subscriber.ranks
    engine.submit(Request("last", key_tokens(range(40), LIMITS.block_size), 33), 0)  # publishes a pending reset
    while engine.next_step(0) is not None:
        engine.finish_step(0)
    async with asyncio.timeout(30):
        while not rank.complete or +copies.held != engine.cache.copies():
            await asyncio.sleep(0.01)
    assert rank.complete
    assert rank.counts["replays"] > 1
    assert rank.counts["handler_errors"] == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    publisher.close()
    context.destroy(0)
