"""Recorded traffic of a real vLLM: what streams and standalone hashes make of it."""

from __future__ import annotations

import base64
import gzip
import json
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picker.core.block_hashes.prompts import PromptHashes
from picker.core.block_hashes.registry import HashName
from picker.core.block_index.index import BlockIndex
from picker.core.kv_events.decode import decode
from picker.core.kv_index.hash_index import HashIndex
from picker.core.kv_index.ownership import Cleared, Ownership, Removed
from picker.core.kv_index.stream_protocol import extension_line, parse_line
from picker.core.tokens.prompt import TokenPrompt

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
LOST = {"evict": 0, "chat": 0, "lora": 0, "hybrid": 0, "bytes": 0, "restart": 2}
"""Requests that nobody can foretell: the first after the engine restarted, or cleared its cache."""


class Follower:
    """Follows a recording with an ownership, an index of its hashes, and a block index."""

    def __init__(self, name: str, protocol: HashName = HashName.KTHENA, seed: str = "") -> None:
        with gzip.open(CAPTURES / f"{name}-A.jsonl.gz", "rt") as lines:
            self.meta, *self.lines = [json.loads(line) for line in lines]
        self.model, self.block_size = self.meta["model"], self.meta["block_size"]
        self.ownership = Ownership(self.model, protocol=protocol, seed=seed)
        self.names = PromptHashes(protocol, seed)
        self.hashes = HashIndex()
        self.blocks = BlockIndex()

    def requests(self) -> Iterator[dict[str, Any]]:
        for line in self.lines:
            if line["kind"] == "frame":
                if line["seq"] == 0:
                    self.tell(self.ownership.forget(0, line["t"]))
                    self.blocks.restart(0, 0)
                batch = decode(base64.b64decode(line["payload"]))
                self.tell(self.ownership.apply(0, batch.events, line["t"]))
                self.blocks.apply(0, self.model, batch, line["t"])
            elif line["kind"] == "request":
                yield line

    def tell(self, changes) -> None:
        for change in changes.changes:
            if isinstance(change, Cleared):
                self.hashes.clear(0, change.model)
                while self.hashes.sweep(1000):
                    pass
            elif isinstance(change, Removed):
                self.hashes.remove(0, change.model, change.hashes)
            else:
                self.hashes.store(0, change.model, change.hashes, [change.timestamp] * len(change.hashes))

    def begin_anew(self) -> None:
        """Be a picker that connects just now."""
        self.blocks = BlockIndex()
        for events in self.ownership.replay(0, 7):
            (message,) = parse_line(extension_line(rank=0, ts=1.0, events=events))
            self.blocks.apply(0, self.model, message.batch, 1.0)

    def predict(self, request: dict[str, Any]) -> int:
        body = request["body"]
        prompt = self.blocks.prompt(
            self.model,
            request["prompt_token_ids"],
            adapter=None if body["model"] == self.model else body["model"],
            cache_salt=body.get("cache_salt"),
            reads_cache=body.get("prompt_logprobs") is None,
        )
        return self.blocks.predict(prompt, 0).cached_tokens

    def predict_by_hashes(self, request: dict[str, Any]) -> int:
        body = request["body"]
        prompt = TokenPrompt(
            array("I", request["prompt_token_ids"]),
            self.model,
            lora=None if body["model"] == self.model else body["model"],
            cache_salt=body.get("cache_salt"),
            reads_cache=body.get("prompt_logprobs") is None,
        )
        model = self.names.model(prompt)
        found = [] if model is None else self.hashes.match(model, self.names.hashes(prompt, self.block_size), 1)
        return found[0][0] * self.block_size if found else 0


@pytest.mark.parametrize("name", LOST)
def test_a_picker_that_connects_at_any_time_predicts_exactly(name):
    follower = Follower(name)
    wrong = 0
    for number, request in enumerate(follower.requests()):
        if number % 5 == 0:
            follower.begin_anew()
        wrong += follower.predict(request) != request["cached_tokens"]
    assert wrong == LOST[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("evict", {"plain exact": 150}),
        ("chat", {"plain exact": 80, "salted exact": 3, "salted under": 16}),
        ("lora", {"plain exact": 131, "salted exact": 17}),
        ("bytes", {"plain exact": 60}),
        ("restart", {"plain exact": 78, "plain over": LOST["restart"]}),
        ("hybrid", {"plain exact": 76, "plain over": 44}),
    ],
)
def test_standalone_hashes_are_exact_where_they_can_be(name, expected):
    """They know nothing of salts, and say too little of prompts with one; and too much where groups have windows."""
    assert errors_by_hashes(Follower(name)) == expected


def errors_by_hashes(follower: Follower) -> Counter[str]:
    errors: Counter[str] = Counter()
    for request in follower.requests():
        error = follower.predict_by_hashes(request) - request["cached_tokens"]
        kind = "salted" if request["body"].get("cache_salt") else "plain"
        errors[f"{kind} {'over' if error > 0 else 'under' if error else 'exact'}"] += 1
    return errors


@pytest.mark.parametrize("protocol", [HashName.LLM_D_CBOR_FNV, HashName.LLM_D_XXH64])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("evict", {"plain exact": 150}),
        ("chat", {"plain exact": 80, "salted exact": 19}),
        ("lora", {"plain exact": 131, "salted exact": 17}),
        ("bytes", {"plain exact": 60}),
        ("restart", {"plain exact": 78, "plain over": LOST["restart"]}),
        ("hybrid", {"plain exact": 76, "plain over": 44}),
    ],
)
def test_chained_hashes_know_salts_and_adapters(name, protocol, expected):
    assert errors_by_hashes(Follower(name, protocol, seed="of this fleet")) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("evict", {"plain exact": 150}),
        ("chat", {"plain exact": 80, "salted exact": 19}),
        ("restart", {"plain exact": 78, "plain over": LOST["restart"]}),
    ],
)
def test_the_engines_own_hashes_are_computed_from_requests(name, expected):
    assert errors_by_hashes(Follower(name, HashName.VLLM_SHA256)) == expected


def test_the_engines_own_hashes_of_adapters_need_what_is_not_known():
    errors = errors_by_hashes(Follower("lora", HashName.VLLM_SHA256))
    assert "plain over" not in errors
    assert errors["plain under"] > 0
