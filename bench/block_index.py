"""What the block index costs: events applied, memory, lookups, forgetting."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.kv_events import BLOCK, RUN, frame, full_cache, stores
from bench.report import Row
from picker.core.block_index.index import BlockIndex
from picker.core.kv_events.decode import decode
from picker.core.kv_events.events import BlockStored, EventBatch

_BLOCK_US = 1e6 / 300_000
_PROMPTS = 20

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def frames(blocks: int, seed: int, run: int = RUN) -> list[bytes]:
    return [frame(store) for store in stores(blocks, seed, run=run)]


def best(measure: Callable[[], float], times: int = 3) -> float:
    return min(measure() for _ in range(times))


def rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def seconds_to_apply(index: BlockIndex, published: Sequence[bytes]) -> float:
    start = time.process_time()
    for payload in published:
        index.apply(0, MODEL, decode(payload), 0.0)
    return time.process_time() - start


def churn(blocks: int) -> tuple[list[bytes], list[bytes]]:
    """Return the frames that fill a cache of so many blocks, and those of as many more, when it is full."""
    held = blocks // RUN
    published = list(full_cache(stores(2 * blocks, 1), held))
    return published[:held], published[held:]


def seconds_to_churn(filling: Sequence[bytes], full: Sequence[bytes]) -> float:
    index = BlockIndex()
    seconds_to_apply(index, filling)
    return seconds_to_apply(index, full)


def seconds_to_begin(blocks: int, at_once: int) -> float:
    """Measure an engine's first stores, so many blocks in each."""
    published = frames(blocks, 4, at_once)
    index = BlockIndex()
    took = seconds_to_apply(index, published)
    if sum(source.blocks for source in index.stats()) != blocks:
        raise RuntimeError("blocks are missing; nothing was measured")
    return took


def bytes_per_pair(blocks: int, endpoints: int, *, shared: bool) -> float:
    """Measure how much this process grows; stores are made one at a time and dropped."""
    index = BlockIndex()
    for store in stores(20 * RUN, 1):
        index.apply(endpoints, MODEL, decode(frame(store)), 0.0)
    before = rss()
    if shared:
        for store in stores(blocks, 2):
            for slot in range(endpoints):
                index.apply(slot, MODEL, decode(frame(store)), 0.0)
    else:
        for slot in range(endpoints):
            for store in stores(blocks // endpoints, 2 + slot):
                index.apply(slot, MODEL, decode(frame(store)), 0.0)
    pairs = sum(source.blocks for source in index.stats() if source.slot < endpoints)
    return (rss() - before) / pairs


def memory(blocks: int, endpoints: int, *, shared: bool) -> float:
    """Measure in a process of its own."""
    arguments = [
        sys.executable,
        "-m",
        "bench.block_index",
        str(blocks),
        str(endpoints),
        *(["shared"] if shared else []),
    ]
    return float(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def longest_slice(blocks: int) -> tuple[float, int]:
    """Return the 99th percentile of the seconds of one slice of forgetting a full endpoint, and how many slices it took."""
    index = BlockIndex()
    seconds_to_apply(index, frames(blocks, 3))
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
    """Return the seconds of one lookup of 4,096 tokens, never looked up before, that one endpoint in four holds in full.

    The others hold one block.
    """
    rng = random.Random(9)
    index = BlockIndex()
    prompts = [array("I", rng.choices(range(128_000), k=4096)) for _ in range(_PROMPTS)]
    for tokens in prompts:
        hashes = tuple(rng.getrandbits(64) for _ in range(len(tokens) // BLOCK))
        for slot in range(endpoints):
            most = 1 if slot % 4 else len(hashes)
            stored = BlockStored(hashes[:most], None, tuple(tokens[: most * BLOCK]), BLOCK)
            index.apply(slot, MODEL, EventBatch(0.0, (stored,), 0), 0.0)
    everyone = (1 << endpoints) - 1
    start = time.process_time()
    for tokens in prompts:
        index.match(index.prompt(MODEL, tokens), everyone)
    return (time.process_time() - start) / _PROMPTS


def rows() -> list[Row]:
    """Measure everything; takes two minutes."""
    blocks = 320_000
    stored = frames(blocks, 1)
    store = best(lambda: seconds_to_apply(BlockIndex(), stored)) / blocks * 1e6
    filling, full = churn(blocks // 2)
    dropped = best(lambda: seconds_to_churn(filling, full)) / (2 * RUN * len(full)) * 1e6
    apart = memory(1_000_000, 8, shared=False)
    together = memory(1_000_000, 8, shared=True)
    slowest, slices = longest_slice(320_000)
    whole = best(lambda: seconds_to_begin(8_192, 8_192))
    parts = best(lambda: seconds_to_begin(8_192, RUN))
    return [
        Row("KV events from frame to index, new blocks", f"{1e6 / store:,.0f} blocks/s", store, "us/block", _BLOCK_US),
        Row(
            "the same in full caches, stored or dropped",
            f"{1e6 / dropped:,.0f} blocks/s",
            dropped,
            "us/block",
            _BLOCK_US,
        ),
        Row("block index, 1,000,000 blocks over 8 endpoints", "", apart, "B per block and endpoint", 120),
        Row("the same blocks on each of 8 endpoints", "", together, "B per block and endpoint", 120),
        Row("forgetting 320,000 blocks, slices' p99", f"{slices} slices", slowest * 1e3, "ms", 1),
        Row(
            "an engine's first 8,192 blocks in one event / 16 in each",
            f"{whole * 1e3:.1f} / {parts * 1e3:.1f} ms",
            whole / parts,
            "x",
            2,
        ),
        *map(prediction, (8, 512)),
    ]


def prediction(endpoints: int) -> Row:
    took = best(lambda: seconds_to_predict(endpoints))
    return Row(f"4,096 tokens looked up on {endpoints} endpoints", "", took * 1e6, "us", 1000)


if __name__ == "__main__":
    print(bytes_per_pair(int(sys.argv[1]), int(sys.argv[2]), shared="shared" in sys.argv))
