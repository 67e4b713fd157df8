"""What it costs to know which session a request belongs to: its chain, from a body that was parsed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from statistics import median

from msgspec import Struct

from bench.report import Row, progress
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.plugins.session_prefix_cache import SessionPrefixCacheArgs, SessionPrefixCacheProducer
from picker.core.prefix_cache.hashing import block_hashes
from picker.core.prompts import Prompt, parse
from picker.core.scheduling.api import Candidates, Request
from picker.core.sessions.frames import CHUNK
from picker.core.sessions.reader import ChainReader

_PATH = "/v1/chat/completions"
_KIB = 1024
_SIZES = (1 * _KIB, 4 * _KIB, 32 * _KIB, 256 * _KIB, 1024 * _KIB)
_MESSAGE = 1600
"""Characters of a message, some 400 tokens."""
_LETTERS = "etaoin shrdlu cmfwyp vbgkqjxz, ETAOIN. 0123456789\n"

Messages = list[dict[str, str]]


class _Costs(Struct, frozen=True):
    """Microseconds of CPU."""

    unseen: float
    """A conversation of which nothing was read before."""
    seen: float
    """The same again."""
    grown: float
    """The same and some messages more, a sixteenth at least, for the first time."""
    turn: float
    """These messages alone, for the first time."""
    flat: float
    """Hashing the text of the conversation in blocks of the same size, as `prefix-cache` does."""


def run() -> list[Row]:
    rows: list[Row] = []
    for size in _SIZES:
        progress(f"sessions: conversations of {size // _KIB} KiB")
        costs = _measure(size, times=200 if size <= 32 * _KIB else 40)
        what = f"session chain, {size // _KIB} KiB"
        rows += [
            Row(f"{what}, seen before", "", costs.seen, "us", 60.0 if size == 32 * _KIB else None),
            Row(
                f"{what} and a turn: what the turn adds / the turn alone",
                f"{costs.grown - costs.seen:.1f} / {costs.turn:.1f} us",
                (costs.grown - costs.seen) / costs.turn,
                "x",
                1.2 if size <= 256 * _KIB else None,
            ),
            Row(
                f"{what} and a turn / all of it unseen",
                f"{costs.grown:.1f} / {costs.unseen:.1f} us",
                costs.grown / costs.unseen,
                "x",
            ),
            Row(
                f"{what}, unseen / its text hashed in blocks",
                f"{costs.unseen:.1f} / {costs.flat:.1f} us",
                costs.unseen / costs.flat,
                "x",
            ),
        ]
    match, pick = _producer(32 * _KIB)
    rows.append(Row("session-prefix-cache-producer, 32 KiB, 8 endpoints: match", "chain and look-up", match, "us"))
    rows.append(Row("session-prefix-cache-producer, 32 KiB, 8 endpoints: pick, end", "claimed, kept", pick, "us"))
    return rows


class _Texts:
    """Texts that never come twice."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._text = "".join(self._rng.choices(_LETTERS, k=4 << 20))

    def messages(self, size: int) -> Messages:
        """A conversation of so many bytes, or a little less."""
        found: Messages = []
        while size > 0:
            length = min(size, _MESSAGE)
            at = self._rng.randrange(len(self._text) - length)
            found.append({"role": ("user", "assistant")[len(found) % 2], "content": self._text[at : at + length]})
            size -= length + 40
        return found


def _prompt(messages: Messages) -> Prompt:
    return parse(_PATH, json.dumps({"model": "m", "messages": messages}).encode())


def _measure(size: int, times: int) -> _Costs:
    texts, reader = _Texts(size), ChainReader()
    costs: list[tuple[float, ...]] = []
    for _ in range(times):
        messages, turn = texts.messages(size), texts.messages(max(2 * _MESSAGE, size // 16))
        text = _prompt(messages).texts[0]
        unseen, seen, grown = (_read(reader, some) for some in (messages, messages, [*messages, *turn]))
        costs.append((
            unseen,
            seen,
            grown,
            _read(reader, turn),
            _cost(block_hashes, "m", text, CHUNK, 1 << 30),
        ))  # fmt: skip
    # Whatever else runs on the machine only adds to a cost.
    return _Costs(*map(min, zip(*costs, strict=True)))


def _producer(size: int, times: int = 200) -> tuple[float, float]:
    """Microseconds to match a conversation that grew by a turn, and from the pick to the end of its request."""
    producer = SessionPrefixCacheProducer(SessionPrefixCacheArgs())
    table = EndpointTable()
    table.replace(Endpoint(name=f"pod-{n}", address=f"10.0.0.{n + 1}:8000") for n in range(8))
    candidates, texts, rng = Candidates(table, table.slots, table.mask), _Texts(size), random.Random(1)
    costs: list[tuple[float, float]] = []

    def request(messages: Messages) -> Request:
        return Request("id", _PATH, _prompt(messages))

    for _ in range(times):
        messages = texts.messages(size)
        for slot in range(8):
            some = request(messages[: len(messages) - slot])
            match = producer.match(some, candidates, rng)
            assert match is not None
            match.picked(slot).confirm(slot)
        grown = request([*messages, *texts.messages(2 * _MESSAGE)])
        started = time.thread_time_ns()
        match = producer.match(grown, candidates, rng)
        assert match is not None
        matched = time.thread_time_ns()
        match.picked(0).confirm(0)
        costs.append(((matched - started) / 1000, (time.thread_time_ns() - matched) / 1000))
    found, kept = zip(*costs, strict=True)
    return median(found), median(kept)


def _read(reader: ChainReader, messages: Messages) -> float:
    """What reading a chain costs right after the body was parsed, as it is in a decision."""
    prompt = _prompt(messages)
    return _cost(reader.read, _PATH, prompt)


def _cost(what: Callable[..., object], *args: object) -> float:
    started = time.thread_time_ns()
    what(*args)
    return (time.thread_time_ns() - started) / 1000
