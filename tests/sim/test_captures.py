"""The cache against recordings of a real vLLM 0.32: the same requests must hit, store and evict the same blocks.

The engine model is given each request's prompt and, as its answer, the tokens that the real engine's own events show
to have filled blocks. Tokens after the last full block are unknown, cannot be cached, and are replaced by zeros.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from picker.sim.block_cache import key_tokens
from picker.sim.engine import Engine, EngineLimits, Request
from picker.sim.events import BlockRemoved, BlockStored, KvEvent

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
Event = tuple[str, Any]


def exchanges(name: str) -> tuple[dict[str, Any], Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    """Return the capture's meta line, and its requests each with the events that followed it."""
    with gzip.open(CAPTURES / f"{name}-A.jsonl.gz", "rt") as file:
        meta, *lines = map(json.loads, file)
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for line in lines:
        if line["kind"] == "request":
            found.append((line, []))
        else:
            found[-1][1].extend(msgspec.msgpack.decode(base64.b64decode(line["payload"]))[1])
    return meta, iter(found)


class Recorded:
    """The recorded events in terms of what blocks hold: everything from the start of the prompt, and the namespace."""

    def __init__(self) -> None:
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.namespace_of: dict[int, tuple[str, ...]] = {}

    def read(self, events: list[dict[str, Any]]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if event["type"] == "BlockRemoved":
                out += [("removed", self.content(h)) for h in event["block_hashes"]]
                continue
            parent, size = event["parent_block_hash"], event["block_size"]
            for position, block in enumerate(event["block_hashes"]):
                tokens = tuple(event["token_ids"][position * size : (position + 1) * size])
                extra = event["extra_keys"][position] if event.get("extra_keys") else None
                self.prefix_of[block] = self.prefix_of[parent] + tokens if parent is not None else tokens
                self.namespace_of[block] = self.namespace_of[parent] if parent is not None else tuple(extra or ())
                out.append(("stored", self.content(block)))
                parent = block
        return out

    def content(self, block: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return self.prefix_of[block], self.namespace_of[block]


def simulated(events: list[KvEvent], seen: dict[int, Any]) -> list[Event]:
    """Put the model's events in the same terms."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, BlockRemoved):
            out += [("removed", seen[h]) for h in event.block_hashes]
        elif isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for position, block in enumerate(event.block_hashes):
                tokens = event.token_ids[position * event.block_size : (position + 1) * event.block_size]
                prefix, namespace = seen[parent] if parent is not None else ((), event.extra_keys[position] or ())
                seen[block] = (prefix + tokens, namespace)
                out.append(("stored", seen[block]))
                parent = block
    return out


@pytest.mark.parametrize("name", ["evict", "chat", "lora"])
def test_every_request_hits_stores_and_evicts_what_the_real_engine_did(name: str) -> None:
    meta, recorded_requests = exchanges(name)
    published: list[KvEvent] = []
    engine = Engine(
        EngineLimits(block_size=meta["block_size"], num_gpu_blocks=meta["num_gpu_blocks"]),
        publish=lambda batch, _: published.extend(batch),
    )
    recorded = Recorded()
    seen: dict[int, Any] = {}
    expected_cached, predicted_cached = [], []
    for number, (line, frames) in enumerate(recorded_requests):
        prompt, body = line["prompt_token_ids"], line["body"]
        expected_events = recorded.read(frames)
        answer = max(
            (prefix[len(prompt) :] for kind, (prefix, _) in expected_events if kind == "stored"), key=len, default=()
        )
        tokens = [*prompt, *answer]
        tokens += [0] * (len(prompt) + line["completion_tokens"] - len(tokens))
        content = key_tokens(
            tokens,
            meta["block_size"],
            lora_name=body["model"] if body["model"] != meta["model"] else None,
            cache_salt=body.get("cache_salt"),
        )
        request = Request(str(number), content, len(prompt), read_cache="prompt_logprobs" not in body)
        member = engine.submit(request, 0.0)
        while (end := engine.next_step(0.0)) is not None:
            engine.finish_step(end)
        expected_cached.append(line["cached_tokens"])
        predicted_cached.append(member.cached_tokens)
        assert simulated(published, seen) == expected_events, f"request {number}"
        published.clear()
    assert predicted_cached == expected_cached
