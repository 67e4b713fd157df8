"""Sends a workload and measures what a client sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from picker.app.demo.workload import Session, Turn, Workload

MODEL = "sim"
ROUTE = "/v1/chat/completions"
_TIMEOUT = aiohttp.ClientTimeout(total=60)
_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one request."""

    engine: str
    """Name of the engine that answered; empty if none did."""
    lateness: float
    """Seconds between when the request was due and when it was sent: the load generator's own fault."""
    error: str | None = None
    """What went wrong. The fields below are zero then."""
    first_token: float = 0.0
    """Seconds from sending the request to the first piece of text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that came from the engine's cache, as the engine reports."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None

    @property
    def text(self) -> str:
        return "".join(choice.delta.content or "" for choice in self.choices)


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class _Answer:
    engine: str
    first_token: float
    text: str
    usage: _Usage


class _AnswerError(Exception):
    """An answer that is no good. The argument says why; `engine` who gave it."""

    def __init__(self, why: str, engine: str) -> None:
        super().__init__(why)
        self.engine = engine


async def send(url: str, workload: Workload, done: Callable[[Outcome], None]) -> list[Outcome]:
    """Send every session in its time to `url`, and wait for all answers; `done` is told of each one.

    Sessions start when they are due, however many are running. A session ends at its first failure, since its next
    question would need the answer; the questions left unasked count as errors.
    """
    outcomes: list[Outcome] = []

    def record(outcome: Outcome) -> None:
        outcomes.append(outcome)
        done(outcome)

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(url, connector=connector, timeout=_TIMEOUT) as client,
        asyncio.TaskGroup() as tasks,
    ):
        begin = time.perf_counter()
        for session in workload.sessions:
            prompt = workload.prompts[session.prompt]
            tasks.create_task(_converse(client, session, prompt, begin + session.start, record))
    return outcomes


async def _converse(
    client: aiohttp.ClientSession, session: Session, prompt: str, due: float, record: Callable[[Outcome], None]
) -> None:
    messages = [{"role": "system", "content": prompt}]
    for number, turn in enumerate(session.turns):
        due += turn.think
        await asyncio.sleep(due - time.perf_counter())
        lateness = time.perf_counter() - due
        messages.append({"role": "user", "content": turn.question})
        try:
            answer = await _ask(client, messages, turn)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, _AnswerError) as error:
            engine = error.engine if isinstance(error, _AnswerError) else ""
            record(Outcome(engine, lateness, f"{type(error).__name__}: {error}"))
            for _ in session.turns[number + 1 :]:
                record(Outcome("", 0.0, "not asked, since the answer before it failed"))
            return
        due = time.perf_counter()
        messages.append({"role": "assistant", "content": answer.text})
        details = answer.usage.prompt_tokens_details or _Details()
        prompt_tokens, cached_tokens = answer.usage.prompt_tokens, details.cached_tokens
        record(Outcome(answer.engine, lateness, None, answer.first_token, prompt_tokens, cached_tokens))


async def _ask(client: aiohttp.ClientSession, messages: list[dict[str, str]], turn: Turn) -> _Answer:
    body = msgspec.json.encode(
        {
            "model": MODEL,
            "messages": messages,
            "max_tokens": turn.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    sent = time.perf_counter()
    first_token: float | None = None
    received = b""
    async with client.post(ROUTE, data=body, headers={"content-type": "application/json"}) as response:
        engine = response.headers.get("x-engine", "")
        if response.status != 200:
            raise _AnswerError(f"status {response.status}: {(await response.text())[:200]}", engine)
        async for data in response.content.iter_any():
            received += data
            if first_token is None and any(chunk.text for chunk in _chunks(received)):
                first_token = time.perf_counter() - sent
    chunks = _chunks(received)
    usage = next((chunk.usage for chunk in reversed(chunks) if chunk.usage), None)
    if first_token is None or usage is None or not received.endswith(_DATA + _DONE + b"\n\n"):
        raise _AnswerError(f"the answer is not whole; it ends with {received[-200:]!r}", engine)
    return _Answer(engine, first_token, "".join(chunk.text for chunk in chunks), usage)


def _chunks(received: bytes) -> list[_Chunk]:
    """The chunks of a stream of server-sent events that have arrived in full."""
    events = received.split(b"\n\n")[:-1]
    return [_decode(event[len(_DATA) :]) for event in events if event[len(_DATA) :] != _DONE]
