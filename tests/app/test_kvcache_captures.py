"""Recorded traffic of a real vLLM, sent again over a real ZMQ socket to pickers of all three index modes."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from picker.core.block_hashes.registry import HashName
from picker.core.endpoints import Endpoint, KvEvents
from picker.core.plugins.kvcache_args import IndexMode, RedisArgs
from picker.io.kvcache.oracle import Oracle
from tests.app.test_sidecar_captures import running
from tests.io.test_kv_runtime import become, make

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
NOBODY_KNOWS = {"restart": {"over": 2}}
"""The first requests after a restart and after a clear, of which events tell only later."""
KTHENAS_HASH = {
    **NOBODY_KNOWS,
    "chat": {"under": 16},  # prompts with a salt are never looked up
    "hybrid": {"over": 44},  # it knows of no windows
}


@pytest.mark.parametrize(
    ("name", "protocol"),
    [
        *((name, HashName.KTHENA) for name in ("evict", "bytes", "lora", "chat", "hybrid", "restart")),
        ("chat", HashName.LLM_D_XXH64),
        ("chat", HashName.VLLM_SHA256),
    ],
)
async def test_every_prediction_is_what_vllm_reported(name, protocol, redis_server, background, until):
    with gzip.open(CAPTURES / f"{name}-A.jsonl.gz", "rt") as recorded:
        meta, *lines = [json.loads(line) for line in recorded]
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)  # a PUB that says who has subscribed
    publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
    publisher.bind("tcp://127.0.0.1:*")
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    where = {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis_server.port), "KV_EVENT_HASH_PROTOCOL": protocol}
    redis = RedisArgs(address=f"127.0.0.1:{redis_server.port}", budget_seconds=5.0)
    async with (
        running(endpoint, meta["topic"], meta["model"], {"KV_EVENT_SYNC_MODE": "memory"}) as streaming,
        running(endpoint, meta["topic"], meta["model"], where) as writing,
    ):
        pod = Endpoint(
            "pod",
            "127.0.0.1:9",
            "ns",
            model=meta["model"],
            runtime=f"127.0.0.1:{streaming.port}",
            kv_events=KvEvents(endpoint, topic=meta["topic"]),
        )
        runtimes = {}
        for mode in IndexMode:
            director, runtime = make(
                index_mode=mode, block_size_to_hash=meta["block_size"], hash_protocol=protocol, redis=redis
            )
            become(director, runtime, pod)
            background(runtime.run())
            runtimes[mode] = runtime
        oracles = {
            mode: Oracle(lambda runtime=runtime: runtime.chain, lambda runtime=runtime: runtime)
            for mode, runtime in runtimes.items()
        }
        for _ in range(3):
            await asyncio.wait_for(publisher.recv(), 5)
        await until(lambda: all(one.chain and one.sources.is_connected(0) for one in runtimes.values()))
        await until(lambda: all(one.chain.settings.names.base for one in runtimes.values()))
        direct, memory = runtimes[IndexMode.DIRECT].sources, runtimes[IndexMode.MEMORY].sources
        sent, errors = 0, {mode: Counter() for mode in IndexMode}

        def arrived() -> bool:
            counts = (
                direct.events["batches"],
                memory.stats(0)["batches"],
                writing.subscriber.ranks[0].counts["batches"],
            )
            return all(count == sent for count in counts) and writing.redis.in_step

        for line in lines:
            if line["kind"] == "frame":
                parts = [base64.b64decode(line["topic"]), line["seq"].to_bytes(8, "big")]
                await publisher.send_multipart([*parts, base64.b64decode(line["payload"])])
                sent += 1
            elif line["kind"] == "request":
                await until(arrived)
                body = {key: line["body"][key] for key in line["body"] if key not in ("messages", "prompt")}
                request = json.dumps({**body, "token_ids": line["prompt_token_ids"]}).encode()
                for mode, oracle in oracles.items():
                    error = (await oracle.predict(request))["predicted_cached_tokens"] - line["cached_tokens"]
                    errors[mode]["over" if error > 0 else "under"] += error != 0
    publisher.close(0)
    context.term()
    assert +errors[IndexMode.DIRECT] == +errors[IndexMode.MEMORY] == Counter(NOBODY_KNOWS.get(name, {}))
    by_hashes = KTHENAS_HASH if protocol is HashName.KTHENA else {}
    assert +errors[IndexMode.REDIS] == Counter(by_hashes.get(name, {}))
