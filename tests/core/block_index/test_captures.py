"""Recorded traffic of a real vLLM: every request's `cached_tokens` predicted from the events before it."""

import base64
import gzip
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from picker.core.block_index.index import BlockIndex
from picker.core.block_index.prediction import Prediction
from picker.core.block_index.prompt import Prompt
from picker.core.kv_events.decode import decode
from picker.core.kv_events.events import EventBatch

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
SLOT = 5


@dataclass
class Replay:
    """An index that follows one recording."""

    name: str
    index: BlockIndex = field(default_factory=BlockIndex)
    after_control: int = 0

    def __post_init__(self) -> None:
        with gzip.open(CAPTURES / f"{self.name}-A.jsonl.gz", "rt") as lines:
            self.lines = [json.loads(line) for line in lines]
        self.model = self.lines[0]["model"]

    def prompt(self, request: dict[str, Any]) -> Prompt:
        body = request["body"]
        return self.index.prompt(
            self.model,
            array("I", request["prompt_token_ids"]),
            adapter=None if body["model"] == self.model else body["model"],
            cache_salt=body.get("cache_salt"),
            reads_cache=body.get("prompt_logprobs") is None,
        )

    def apply(self, line: dict[str, Any]) -> None:
        self.index.apply(SLOT, self.model, decode(base64.b64decode(line["payload"])), line["t"])

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield each request at its time, with all events applied that were there."""
        for line in self.lines[1:]:
            if line["kind"] == "frame":
                if line["seq"] == 0:
                    self.index.restart(SLOT, 0)  # what the subscriber tells: numbers start again
                self.apply(line)
            elif line["kind"] == "request":
                yield line
                self.after_control = 0
            else:
                self.after_control = 1


def predict(replay: Replay, request: dict[str, Any]) -> int:
    return replay.index.predict(replay.prompt(request), SLOT).cached_tokens


@pytest.mark.parametrize(
    ("name", "requests"), [("evict", 150), ("chat", 99), ("lora", 148), ("hybrid", 120), ("bytes", 60)]
)
def test_every_sequential_request_is_exact(name: str, requests: int):
    replay = Replay(name)
    wrong = [
        (request["t"], request["cached_tokens"], predicted)
        for request in replay.requests()
        if (predicted := predict(replay, request)) != request["cached_tokens"]
    ]
    assert wrong == []
    assert sum(line["kind"] == "request" for line in replay.lines) == requests
    (stats,) = replay.index.stats()
    assert (stats.evicted, stats.orphans, stats.dropped) == (0, 0, {})


def test_a_restart_and_a_reset_cannot_be_foretold_and_all_else_is_exact():
    replay = Replay("restart")
    wrong, requests, resets = 0, 0, 0
    for request in replay.requests():
        requests += 1
        predicted = predict(replay, request)
        if replay.after_control:
            resets += 1
            assert request["cached_tokens"] == 0
        elif predicted != request["cached_tokens"]:
            wrong += 1
    assert (requests, resets, wrong) == (80, 2, 0)


def test_scheduling_sees_what_is_predicted():
    replay = Replay("lora")
    hits = 0
    for request in replay.requests():
        prompt = replay.prompt(request)
        cached = replay.index.predict(prompt, SLOT).cached_tokens
        assert replay.index.match(prompt, 1 << SLOT) == ([(cached, 1 << SLOT)] if cached else [])
        assert replay.index.match(prompt, 0b11) == []
        hits += cached > 0
    assert hits > 20


def events_until(lines: list[dict[str, Any]], deadline: float) -> Iterator[EventBatch]:
    """Yield events one by one: an engine schedules requests between the events of one batch."""
    for line in lines:
        if line["kind"] == "frame" and line["t"] <= deadline:
            for event in decode(base64.b64decode(line["payload"])).events:
                yield EventBatch(line["t"], (event,))


def test_under_concurrency_only_events_on_their_way_make_a_difference():
    """An engine looks into its cache between a request's arrival and its answer, so it knows events that we do not.

    Where the prediction is wrong it is right after some of the events that came until a moment after the answer.
    """
    replay = Replay("concurrent")
    errors: list[int] = []
    unexplained = 0
    for number, request in enumerate(replay.lines):
        if request["kind"] == "frame":
            replay.apply(request)
        elif request["kind"] == "request":
            truth = request["cached_tokens"]
            errors.append(predict(replay, request) - truth)
            if errors[-1]:
                later = Replay("concurrent")
                for batch in events_until(replay.lines[:number], request["t"]):
                    later.index.apply(SLOT, later.model, batch, 0.0)
                for batch in events_until(replay.lines[number:], request["t_done"] + 0.1):
                    later.index.apply(SLOT, later.model, batch, 0.0)
                    if predict(later, request) == truth:
                        break
                else:
                    unexplained += 1
    assert len(errors) == 200
    assert unexplained == 0
    assert max(errors) == 0, "nothing was promised that was not there"
    assert errors.count(0) == 193


def test_nothing_is_known_of_others():
    replay = Replay("evict")
    for request in replay.requests():
        prompt = replay.prompt(request)
    assert replay.index.predict(prompt, SLOT + 1) == Prediction(0, complete=False)
    assert replay.index.predict(prompt, SLOT, rank=3) == Prediction(0, complete=False)
