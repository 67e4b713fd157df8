"""KV events of busy engines, as vLLM encodes them.

Run as a script it publishes them over ZMQ, 16 blocks dropped and 16 stored in each frame, as engines with full caches
do; both count. Prints its ports as a JSON list and publishes until it is ended; while it is stopped, nothing piles up.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import count

import uvloop
import zmq

from picker.sim.event_wire import encode_batch
from picker.sim.events import BlockRemoved, BlockStored, KvEvent

BLOCK = 16
RUN = 16
"""Blocks in one store."""

_CYCLE = 1_200
"""Frames of one engine, published over and over; half of them hold what is not dropped yet."""
_TICK_SECONDS = 0.002


def stores(blocks: int, seed: int, conversations: int = 200, run: int = RUN) -> Iterator[BlockStored]:
    """Yield stores of 16 blocks, or of `run`: so many conversations at a time that take turns, each of eight stores on average."""
    rng = random.Random(seed)
    ends: list[int | None] = [None] * conversations
    for _ in range(blocks // run):
        turn = rng.randrange(conversations)
        hashes = tuple(rng.getrandbits(64) for _ in range(run))
        tokens = tuple(rng.choices(range(128_000), k=run * BLOCK))
        yield BlockStored(hashes, ends[turn], tokens, BLOCK, None, (None,) * run)
        ends[turn] = hashes[-1] if rng.random() < 7 / 8 else None


def frame(*events: KvEvent) -> bytes:
    """Return what one step of an engine publishes."""
    return encode_batch(events, time.time(), 0, lora_ids={}, form="map")


def full_cache(stored: Iterable[BlockStored], held: int) -> Iterator[bytes]:
    """Yield the frames of a cache that has room for `held` stores, and from then on drops a block for each new one.

    As engines do, it drops the end of what was used least recently.
    """
    by_end: OrderedDict[int, list[BlockStored]] = OrderedDict()
    left = held
    for new in stored:
        parent = new.parent_block_hash
        if parent is not None and parent not in by_end:
            continue  # nobody goes on where the end is dropped
        conversation = [] if parent is None else by_end.pop(parent)
        removals: list[KvEvent] = []
        if left:
            left -= 1
        else:
            _, victim = by_end.popitem(last=False)
            removals = [BlockRemoved((digest,)) for digest in reversed(victim.pop().block_hashes)]
            if victim:
                end = victim[-1].block_hashes[-1]
                by_end[end] = victim
                by_end.move_to_end(end, last=False)
        conversation.append(new)
        by_end[new.block_hashes[-1]] = conversation
        yield frame(*removals, new)


def _cycle(seed: int) -> list[bytes]:
    stored = list(stores(_CYCLE * RUN, seed, conversations=20))
    return list(full_cache(stored * 2, _CYCLE // 2))[-_CYCLE:]


async def _publish(engines: int, blocks_per_second: float) -> None:
    with zmq.Context() as context:
        sockets = [context.socket(zmq.PUB) for _ in range(engines)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
        cycles = [_cycle(seed) for seed in range(engines)]
        print(json.dumps(ports), flush=True)
        pause = 2 * RUN / blocks_per_second
        due = time.monotonic()
        for number in count():
            now = time.monotonic()
            if due - now > _TICK_SECONDS:
                await asyncio.sleep(due - now)
            due = max(due, now - 0.1) + pause
            engine, sequence = number % engines, number // engines
            payload = cycles[engine][sequence % len(cycles[engine])]
            sockets[engine].send_multipart((b"kv-events", sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK)


if __name__ == "__main__":
    uvloop.run(_publish(int(sys.argv[1]), float(sys.argv[2])))
