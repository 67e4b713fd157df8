"""The cache against recordings of a real vLLM 0.32: the same requests must hit, store and evict the same blocks.

The engine model is given each request's prompt and, as its answer, the tokens that the real engine's own events show
to have filled blocks. Tokens after the last full block are unknown, cannot be cached, and are replaced by zeros.
"""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from picker.sim.block_cache import key_tokens
from picker.sim.engine import Engine, Request
from picker.sim.events import BlockRemoved, BlockStored, KvEvent
from picker.sim.limits import EngineLimits

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
Event = tuple[str, Any]


def read(name: str) -> tuple[dict[str, Any], list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    """Return a capture's meta line, and its requests and interventions each with the events that followed."""
    with gzip.open(CAPTURES / f"{name}-A.jsonl.gz", "rt") as file:
        meta, *lines = map(json.loads, file)
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for line in lines:
        if line["kind"] == "frame":
            found[-1][1].extend(msgspec.msgpack.decode(base64.b64decode(line["payload"]))[1])
        else:
            found.append((line, []))
    return meta, found


class Recorded:
    """The recorded events in terms of what blocks hold: everything from the start of the prompt, and the namespace."""

    def __init__(self) -> None:
        self.content: dict[int | bytes, tuple[tuple[int, ...], tuple[str, ...]]] = {}

    def read(self, events: list[dict[str, Any]]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if event["type"] == "AllBlocksCleared":
                out.append(("cleared", ((), ())))
                continue
            if event["type"] == "BlockRemoved":
                out += [("removed", self.content[block]) for block in event["block_hashes"]]
                continue
            parent, size = event["parent_block_hash"], event["block_size"]
            for position, block in enumerate(event["block_hashes"]):
                tokens = tuple(event["token_ids"][position * size : (position + 1) * size])
                extra = event["extra_keys"][position] if event.get("extra_keys") else None
                prefix, namespace = self.content[parent] if parent is not None else ((), tuple(extra or ()))
                self.content[block] = prefix + tokens, namespace
                out.append(("stored", self.content[block]))
                parent = block
        return out


class Simulated:
    """The model under the same requests, its events in the same terms."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self.meta = meta
        self.content: dict[int, Any] = {}
        self.published: list[KvEvent] = []
        self.start()

    def start(self) -> None:
        limits = EngineLimits(block_size=self.meta["block_size"], num_gpu_blocks=self.meta["num_gpu_blocks"])
        self.engine = Engine(limits, publish=lambda batch, _: self.published.extend(batch))

    def serve(self, line: dict[str, Any], answer: tuple[int, ...]) -> tuple[int | None, list[Event]]:
        """Run one request alone. Returns the cached tokens it reported, and the events."""
        prompt, body = line["prompt_token_ids"], line["body"]
        unknown = [0] * (line["completion_tokens"] - len(answer))
        content = key_tokens(
            [*prompt, *answer, *unknown],
            self.meta["block_size"],
            lora_name=body["model"] if body["model"] != self.meta["model"] else None,
            cache_salt=body.get("cache_salt"),
        )
        request = Request("only", content, len(prompt), read_cache="prompt_logprobs" not in body)
        member = self.engine.submit(request, 0.0)
        while (end := self.engine.next_step(0.0)) is not None:
            self.engine.finish_step(end)
        events = list(self.events())
        self.published.clear()
        return member.cached_tokens, events

    def events(self) -> list[Event]:
        out: list[Event] = []
        for event in self.published:
            if isinstance(event, BlockRemoved):
                out += [("removed", self.content[block]) for block in event.block_hashes]
            elif isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                for position, block in enumerate(event.block_hashes):
                    tokens = event.token_ids[position * size : (position + 1) * size]
                    start = ((), event.extra_keys[position] or ())
                    prefix, namespace = self.content[parent] if parent is not None else start
                    self.content[block] = (prefix + tokens, namespace)
                    out.append(("stored", self.content[block]))
                    parent = block
            else:
                out.append(("cleared", ((), ())))
        return out


@pytest.mark.parametrize(
    ("name", "requests"), [("evict", 150), ("chat", 99), ("lora", 148), ("bytes", 60), ("restart", 80)]
)
def test_every_request_hits_stores_and_evicts_what_the_real_engine_did(name: str, requests: int) -> None:
    meta, lines = read(name)
    recorded, simulated = Recorded(), Simulated(meta)
    served = 0
    for line, frames in lines:
        if line["kind"] == "control":
            if line["action"] == "engine_start":
                simulated.start()
            elif line["action"] == "reset_prefix_cache":
                assert simulated.engine.reset_prefix_cache()
            continue
        expected = recorded.read(frames)
        beyond = [prefix[len(line["prompt_token_ids"]) :] for kind, (prefix, _) in expected if kind == "stored"]
        cached_tokens, events = simulated.serve(line, max(beyond, key=len, default=()))
        assert cached_tokens == line["cached_tokens"], f"request {served}"
        assert events == expected, f"request {served}"
        served += 1
    assert served == requests
