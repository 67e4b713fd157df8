"""Dynamo's `RadixTree` on the same events and queries, where `ai-dynamo-runtime` is installed beside the picker.

It takes events as JSON, with a hash of each block's tokens that whoever feeds it computes; both are given to it here
as its own Python helpers do. Frames are decoded by the picker's decoder.
"""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.block_index import best, churn, frames, rss
from bench.kv_events import BLOCK, RUN, frame, stores
from bench.report import Row, progress
from picker.core.kv_events.decode import decode
from picker.core.kv_events.events import BlockRemoved, BlockStored, KvEvent

try:
    _core: Any = importlib.import_module("dynamo._core")
except ImportError:
    _core = None

_PROMPTS = 20
_ENCODE = msgspec.json.Encoder().encode


def event(number: int, one: KvEvent) -> bytes:
    """An event as the tree takes it."""
    data: dict[str, Any]
    if isinstance(one, BlockStored):
        hashes = _core.compute_block_hash_for_seq(list(one.token_ids), one.block_size)
        blocks = [
            {"block_hash": own, "tokens_hash": tokens} for own, tokens in zip(one.block_hashes, hashes, strict=True)
        ]
        data = {"stored": {"parent_hash": one.parent, "blocks": blocks}}
    elif isinstance(one, BlockRemoved):
        data = {"removed": {"block_hashes": one.block_hashes}}
    else:
        raise TypeError(one)
    return _ENCODE({"event_id": number, "data": data, "dp_rank": 0})


def prepared(published: Sequence[bytes]) -> list[bytes]:
    return [event(number, one) for number, payload in enumerate(published) for one in decode(payload).events]


def seconds_to_apply(tree: Any, events: Sequence[bytes]) -> float:
    start = time.process_time()
    for one in events:
        tree.apply_event(0, one)
    return time.process_time() - start


def seconds_from_frames(tree: Any, published: Sequence[bytes]) -> float:
    start = time.process_time()
    number = 0
    for payload in published:
        for one in decode(payload).events:
            number += 1
            tree.apply_event(0, event(number, one))
    return time.process_time() - start


def seconds_to_churn(filling: Sequence[bytes], full: Sequence[bytes]) -> float:
    tree = _core.RadixTree()
    seconds_from_frames(tree, filling)
    return seconds_from_frames(tree, full)


def bytes_per_pair(blocks: int, workers: int) -> float:
    """Measure how much this process grows by blocks that are spread over the workers."""
    tree = _core.RadixTree()
    before = rss()
    for worker in range(workers):
        for number, store in enumerate(stores(blocks // workers, 2 + worker)):
            (one,) = decode(frame(store)).events
            tree.apply_event(worker, event(number, one))
    return (rss() - before) / blocks


def seconds_to_query(workers: int) -> float:
    """Hash and look up 4,096 tokens, of which one worker in four holds all and the others one block."""
    rng = random.Random(9)
    tree = _core.RadixTree()
    prompts = [tuple(rng.choices(range(128_000), k=4096)) for _ in range(_PROMPTS)]
    for tokens in prompts:
        hashes = tuple(rng.getrandbits(64) for _ in range(len(tokens) // BLOCK))
        for worker in range(workers):
            most = 1 if worker % 4 else len(hashes)
            tree.apply_event(worker, event(0, BlockStored(hashes[:most], None, tokens[: most * BLOCK], BLOCK)))
    queries = [list(tokens) for tokens in prompts]
    start = time.process_time()
    for query in queries:
        tree.find_matches(_core.compute_block_hash_for_seq(query, BLOCK), False).scores  # noqa: B018  as routers do
    return (time.process_time() - start) / _PROMPTS


def rows() -> list[Row]:
    """Measure everything, or nothing where it is not installed."""
    if _core is None:
        progress("ai-dynamo-runtime is not installed: there is nothing to compare with")
        return []
    blocks = 320_000
    published = frames(blocks, 1)
    events = prepared(published)
    applied = best(lambda: seconds_to_apply(_core.RadixTree(), events)) / blocks * 1e6
    whole = best(lambda: seconds_from_frames(_core.RadixTree(), published)) / blocks * 1e6
    filling, full = churn(blocks // 2)
    dropped = best(lambda: seconds_to_churn(filling, full)) / (2 * RUN * len(full)) * 1e6
    command = [sys.executable, "-m", "bench.dynamo", "1000000", "8"]
    size = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rate = f"{1e6 / applied:,.0f} blocks/s"
    return [
        Row(
            "Dynamo RadixTree: KV events from frame to tree, new blocks",
            f"{1e6 / whole:,.0f} blocks/s",
            whole,
            "us/block",
        ),
        Row("Dynamo RadixTree: of that, events that are hashed and JSON already", rate, applied, "us/block"),
        Row(
            "Dynamo RadixTree: the same in full caches, stored or dropped",
            f"{1e6 / dropped:,.0f} blocks/s",
            dropped,
            "us/block",
        ),
        Row("Dynamo RadixTree: 1,000,000 blocks over 8 endpoints", "", size, "B per block and endpoint"),
        *map(query, (8, 512)),
    ]


def query(workers: int) -> Row:
    took = best(lambda: seconds_to_query(workers))
    return Row(f"Dynamo RadixTree: 4,096 tokens looked up on {workers} endpoints", "", took * 1e6, "us")


if __name__ == "__main__":
    print(bytes_per_pair(int(sys.argv[1]), int(sys.argv[2])))
