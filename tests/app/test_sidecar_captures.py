"""Recorded traffic of a real vLLM, sent again over a real ZMQ socket to real sidecars, and asked through both ways."""

from __future__ import annotations

import argparse
import base64
import gzip
import json
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from picker.app.sidecar import Sidecar
from picker.app.sidecar_settings import add_arguments, read_settings
from picker.core.block_hashes.context import HashContext
from picker.core.block_hashes.kthena import standardized
from picker.core.block_index.index import BlockIndex
from picker.core.kv_index.hash_index import HashIndex
from picker.core.kv_index.owners import Candidate
from picker.io.kv_index.redis_reader import ReaderSettings, RedisReader
from picker.io.kv_index.stream_client import ClientSettings
from picker.io.kv_index.stream_clients import StreamClients

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
POD = {b"pod.ns": Candidate(0)}


class Feed:
    def __init__(self, index: BlockIndex, model: str) -> None:
        self.index, self.model, self.batches = index, model, 0

    def on_batch(self, batch, _) -> None:
        self.batches += 1
        self.index.apply(0, self.model, batch, 1.0)

    def on_restart(self, rank) -> None:
        self.index.restart(0, rank)

    def on_incomplete(self, rank, _) -> None:
        self.index.restart(0, rank)


@asynccontextmanager
async def running(endpoint: str, topic: str, model: str, environment: dict[str, str]):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["-E", "vllm", "-H", "127.0.0.1", "-P", "0", "-I", "pod.ns", "-N", model]
    sources = {"VLLM_ZMQ_ENDPOINT": endpoint, "VLLM_ZMQ_TOPIC_FILTER": topic}
    sidecar = Sidecar(read_settings(parser.parse_args(options), {**sources, **environment}))
    await sidecar.start()
    try:
        yield sidecar
    finally:
        await sidecar.stop()


@pytest.mark.parametrize(
    ("name", "wrong", "wrong_by_hash"),
    [
        ("evict", 0, {}),
        ("bytes", 0, {}),
        ("lora", 0, {}),
        ("chat", 0, {"salted": 16}),  # the hash knows of no salt: such prompts are not looked up
        ("hybrid", 0, {"plain": 44}),  # nor of windows
        ("restart", 2, {"plain": 2}),  # the first request after a restart or a clear, which nobody can foretell
    ],
)
async def test_recordings(name, wrong, wrong_by_hash, redis_server, background, until):
    with gzip.open(CAPTURES / f"{name}-A.jsonl.gz", "rt") as recorded:
        meta, *lines = [json.loads(line) for line in recorded]
    model, size = meta["model"], meta["block_size"]
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)  # a PUB that says who has subscribed
    publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
    publisher.bind("tcp://127.0.0.1:*")
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    index = BlockIndex()
    feed = Feed(index, model)
    clients = StreamClients(ClientSettings("ns/router"), HashIndex(), lambda _: feed)
    reader = RedisReader(redis_server.settings, ReaderSettings(budget=1.0))
    for part in (clients, reader):
        background(part.run())
    redis = {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis_server.port)}
    errors: Counter[str] = Counter()
    errors_by_hash: Counter[str] = Counter()
    async with (
        running(endpoint, meta["topic"], model, {"KV_EVENT_SYNC_MODE": "memory"}) as streaming,
        running(endpoint, meta["topic"], model, redis) as writing,
    ):
        clients.follow({0: ("pod", f"127.0.0.1:{streaming.port}")})
        ranks = [streaming.subscriber.ranks[0], writing.subscriber.ranks[0]]
        await until(lambda: all(rank.connected for rank in ranks) and reader.connected and clients.counts["lines"])
        for _ in ranks:
            await publisher.recv()
        sent = 0
        for line in lines:
            if line["kind"] == "frame":
                topic, payload = base64.b64decode(line["topic"]), base64.b64decode(line["payload"])
                await publisher.send_multipart([topic, line["seq"].to_bytes(8, "big"), payload])
                sent += 1
            elif line["kind"] == "request":
                await until(lambda sent=sent: all(rank.counts["batches"] == sent for rank in ranks))
                await until(lambda sent=sent: feed.batches == sent and writing.redis.in_step)
                body, tokens = line["body"], line["prompt_token_ids"]
                salt, reads = body.get("cache_salt"), body.get("prompt_logprobs") is None
                adapter = None if body["model"] == model else body["model"]
                prompt = index.prompt(model, tokens, adapter=adapter, cache_salt=salt, reads_cache=reads)
                predicted = index.predict(prompt, 0).cached_tokens
                errors["wrong"] += predicted != line["cached_tokens"]
                by_hash = 0
                if reads and not salt:
                    hashes = standardized(tokens[: (len(tokens) - 1) // size * size], size, HashContext())
                    found = await reader.lookup(body["model"], hashes, POD)
                    by_hash = found.groups[0][0] * size if found.groups else 0
                if by_hash != line["cached_tokens"]:
                    errors_by_hash["salted" if salt else "plain"] += 1
    publisher.close(0)
    context.term()
    assert errors["wrong"] == wrong
    assert errors_by_hash == wrong_by_hash
