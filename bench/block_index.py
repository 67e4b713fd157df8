"""What the block index costs: events applied, memory, lookups, forgetting. Run it, or call `rows()`."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from picker.core.block_index.index import BlockIndex
from picker.core.kv_events.events import BlockRemoved, BlockStored, EventBatch

Row = tuple[str, str, str, bool]
"""What, measured, budget, kept."""

BLOCK = 16
RUN = 16
"""Blocks in one store."""
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def conversations(blocks: int, seed: int) -> Iterator[BlockStored]:
    """Yield stores of 16 blocks, each the continuation of one before or a new prompt."""
    rng = random.Random(seed)
    ends: list[int] = []
    for _ in range(blocks // RUN):
        parent = ends.pop(rng.randrange(len(ends))) if len(ends) > 200 else None
        hashes = tuple(rng.getrandbits(64) for _ in range(RUN))
        ends.append(hashes[-1])
        tokens = tuple(rng.choices(range(128_000), k=RUN * BLOCK))
        yield BlockStored(hashes, parent, tokens, BLOCK, medium="GPU", group_idx=0)


def batches(blocks: int, seed: int) -> list[EventBatch]:
    return [EventBatch(0.0, (store,), 0) for store in conversations(blocks, seed)]


def best(measure: Callable[[], float], times: int = 3) -> float:
    return min(measure() for _ in range(times))


def rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def seconds_to_store(stored: list[EventBatch]) -> float:
    index = BlockIndex()
    start = time.process_time()
    for batch in stored:
        index.apply(0, MODEL, batch, 0.0)
    return time.process_time() - start


def seconds_to_churn(stored: list[EventBatch]) -> float:
    """Blocks come and go, one removal event for each, as in a full cache."""
    index = BlockIndex()
    half = len(stored) // 2
    churn = []
    for old, new in zip(stored[:half], stored[half:], strict=True):
        (gone,) = old.events
        assert isinstance(gone, BlockStored)
        removals = tuple(BlockRemoved((digest,), "GPU", 0) for digest in gone.block_hashes)
        churn.append(EventBatch(0.0, (*removals, *new.events), 0))
    for batch in stored[:half]:
        index.apply(0, MODEL, batch, 0.0)
    start = time.process_time()
    for batch in churn:
        index.apply(0, MODEL, batch, 0.0)
    return time.process_time() - start


def bytes_per_pair(blocks: int, endpoints: int, *, shared: bool) -> float:
    """Measure how much this process grows; stores are made one at a time and dropped."""
    index = BlockIndex()
    for store in conversations(20 * RUN, 1):
        index.apply(endpoints, MODEL, EventBatch(0.0, (store,), 0), 0.0)
    before = rss()
    if shared:
        for store in conversations(blocks, 2):
            for slot in range(endpoints):
                index.apply(slot, MODEL, EventBatch(0.0, (store,), 0), 0.0)
    else:
        for slot in range(endpoints):
            for store in conversations(blocks // endpoints, 2 + slot):
                index.apply(slot, MODEL, EventBatch(0.0, (store,), 0), 0.0)
    pairs = sum(source.blocks for source in index.stats() if source.slot < endpoints)
    return (rss() - before) / pairs


def memory(blocks: int, endpoints: int, *, shared: bool) -> float:
    """Measure in a process of its own."""
    arguments = [sys.executable, __file__, str(blocks), str(endpoints), *(["shared"] if shared else [])]
    return float(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def conversation_turns() -> tuple[float, float]:
    """Return the seconds of looking up 100,000 tokens at first, and again after a turn of 500 tokens was added.

    Of two endpoints one has just stored the first turn when it is looked up, as is usual; the other goes on with other
    work, but drops nothing.
    """
    rng = random.Random(7)
    first, grown = [], []
    for _ in range(9):
        tokens = array("I", rng.choices(range(128_000), k=100_000))
        more = tokens + array("I", rng.choices(range(128_000), k=500))
        index = BlockIndex()
        hashes = tuple(rng.getrandbits(64) for _ in range(len(tokens) // BLOCK))
        index.apply(0, MODEL, EventBatch(0.0, (BlockStored(hashes[:200], None, tuple(tokens[:3200]), BLOCK),), 0), 0.0)
        start = time.process_time()
        index.match(index.prompt(MODEL, tokens), 0b11)
        first.append(time.process_time() - start)
        rest = BlockStored(hashes[200:], hashes[199], tuple(tokens[3200:]), BLOCK)
        index.apply(0, MODEL, EventBatch(0.0, (rest,), 0), 0.0)
        index.match(index.prompt(MODEL, tokens), 0b11)
        index.apply(1, MODEL, EventBatch(0.0, (BlockStored((1,), None, (1,) * BLOCK, BLOCK),), 0), 0.0)
        start = time.process_time()
        groups = index.match(index.prompt(MODEL, more), 0b11)
        grown.append(time.process_time() - start)
        assert groups == [(100_000, 1)]
    return min(first), min(grown)


def longest_slice(blocks: int) -> tuple[float, int]:
    """Return the median seconds of one slice of forgetting a full endpoint, and how many slices it took."""
    index = BlockIndex()
    for batch in batches(blocks, 3):
        index.apply(0, MODEL, batch, 0.0)
    start = time.process_time()
    index.forget(0)
    slices = [time.process_time() - start]
    left = True
    while left:
        start = time.process_time()
        left = index.sweep()
        slices.append(time.process_time() - start)
    return sorted(slices)[int(len(slices) * 0.99)], len(slices)


def seconds_to_predict(endpoints: int) -> float:
    """Return the seconds of one lookup of 4,096 tokens that one endpoint in four holds in full."""
    rng = random.Random(9)
    index = BlockIndex()
    tokens = array("I", rng.choices(range(128_000), k=4096))
    hashes = tuple(rng.getrandbits(64) for _ in range(len(tokens) // BLOCK))
    for slot in range(endpoints):
        stored = BlockStored(hashes, None, tuple(tokens), BLOCK)
        if slot % 4:
            stored = BlockStored(hashes[:1], None, tuple(tokens[:BLOCK]), BLOCK)
        index.apply(slot, MODEL, EventBatch(0.0, (stored,), 0), 0.0)
    everyone = (1 << endpoints) - 1
    start = time.process_time()
    for _ in range(200):
        index.match(index.prompt(MODEL, tokens), everyone)
    return (time.process_time() - start) / 200


def rows() -> list[Row]:
    """Measure everything; takes about a minute."""
    blocks = 320_000
    stored = batches(blocks, 1)
    store = blocks / best(lambda: seconds_to_store(stored))
    churn = blocks / 2 / best(lambda: seconds_to_churn(stored))
    apart = memory(1_000_000, 8, shared=False)
    together = memory(1_000_000, 8, shared=True)
    first, grown = conversation_turns()
    slowest, slices = longest_slice(320_000)
    return [
        ("decoded stores of 16 blocks applied, new blocks", f"{store:,.0f} blocks/s", ">= 600,000", store >= 600_000),
        ("the same in a full cache, one removal for each", f"{churn:,.0f} blocks/s", ">= 300,000", churn >= 300_000),
        ("1,000,000 blocks spread over 8 endpoints", f"{apart:.0f} B per (block, endpoint)", "<= 120", apart <= 120),
        (
            "1,000,000 blocks on each of 8 endpoints",
            f"{together:.0f} B per (block, endpoint)",
            "<= 120",
            together <= 120,
        ),
        (
            "100,000 tokens, grown by a turn of 500",
            f"1/{first / grown:.0f} ({grown * 1e6:.0f} us after {first * 1e6:.0f} us)",
            "<= 1/20",
            grown <= first / 20,
        ),
        (
            "forgetting 320,000 blocks, 99th percentile of slices",
            f"{slowest * 1e3:.2f} ms ({slices} slices)",
            "<= 1 ms",
            slowest <= 0.001,
        ),
        *map(prediction, (8, 512)),
    ]


def prediction(endpoints: int) -> Row:
    took = best(lambda: seconds_to_predict(endpoints))
    return (f"4,096 tokens looked up on {endpoints} endpoints", f"{took * 1e6:.0f} us", "<= 1 ms", took <= 0.001)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(bytes_per_pair(int(sys.argv[1]), int(sys.argv[2]), shared="shared" in sys.argv))
    else:
        for name, measured, budget, kept in rows():
            print(f"{name:58} {measured:36} {budget:12} {'ok' if kept else 'MISSED'}")
