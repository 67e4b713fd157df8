"""Recorded traffic: one JSON object a line, in Mooncake's format or as chat requests.

Mooncake: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, a number for each
512 tokens of the prompt that is the same exactly when they and all before them are. Tokens that no number covers are
unique. Chat requests: `timestamp`, and the body of a request as `body` (or its fields beside the timestamp), with
`output_length`, or else the limit of the body, for the length of the answer; four bytes of text count as a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from picker.core.prompts import parse
from picker.simulate.workload import Call, FreshTokens, Piece, Session, Workload

MOONCAKE_BLOCK = 512
MOST_TOKENS = 10_000_000
"""Of one prompt or answer."""
ANSWER_TOKENS = 256
"""Of a chat request that says nothing of its answer."""
MOST_LINE_BYTES = 64 * 1024 * 1024

_ABSENT = msgspec.Raw()

_Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
_Time = Annotated[float, Meta(ge=-1e15, le=1e15)]


class _Mooncake(Struct):
    timestamp: _Time
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: Annotated[list[int], Meta(max_length=MOST_TOKENS // MOONCAKE_BLOCK + 1)]


class _Chat(Struct):
    timestamp: _Time
    path: str = ""
    body: msgspec.Raw = _ABSENT
    output_length: _Tokens | None = None


class _Body(Struct):
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    max_tokens: Any = None
    max_completion_tokens: Any = None


class _Kind(Struct):
    """What tells the two apart."""

    hash_ids: msgspec.Raw = _ABSENT


class TraceError(ValueError):
    """No line of a trace can be used."""


class Trace(Struct, frozen=True):
    """What a trace holds. `skipped` has, by reason, how many lines could not be used, `first` the first of them."""

    workload: Workload
    skipped: dict[str, int] = {}
    first: str = ""


def read(name: str, lines: Iterable[bytes], *, speed: float = 1.0, requests: int | None = None) -> Trace:
    """Read a trace, its times divided by `speed`, up to so many requests. Nothing is left out of what is measured.

    Lines that cannot be used are skipped and counted; empty ones are ignored. Raises TraceError, with what is wrong with
    the first, when none can be used.
    """
    reader = _Reader()
    skipped: Counter[str] = Counter()
    first = ""
    arrivals: list[tuple[float, Call]] = []
    for number, line in enumerate(lines, 1):
        if requests is not None and len(arrivals) >= requests:
            break
        if not line.strip():
            continue
        try:
            arrivals.append(reader.line(line))
        except _UnusableError as error:
            skipped[error.reason] += 1
            first = first or f"line {number}: {error}"
    if not arrivals:
        raise TraceError(first or "has no lines; give a JSON object with a timestamp and a request in each")
    arrivals.sort(key=lambda one: one[0])
    began = arrivals[0][0]
    sessions = [Session((time - began) / 1000 / speed, (call,)) for time, call in arrivals]
    return Trace(Workload(name, sessions, 0.0, sessions[-1].start), dict(skipped), first)


class _UnusableError(Exception):
    def __init__(self, reason: str, said: str) -> None:
        super().__init__(said)
        self.reason = reason


class _Reader:
    def __init__(self) -> None:
        self._fresh = FreshTokens()
        self._blocks: dict[int, range] = {}

    def line(self, line: bytes) -> tuple[float, Call]:
        """The time, in milliseconds, and the call of a line."""
        if len(line) > MOST_LINE_BYTES:
            raise _UnusableError("too_long", f"has more than {MOST_LINE_BYTES} bytes; leave it out")
        try:
            kind = msgspec.json.decode(line, type=_Kind)
            if bytes(kind.hash_ids):
                return self._mooncake(msgspec.json.decode(line, type=_Mooncake))
            return self._chat(msgspec.json.decode(line, type=_Chat), line)
        except msgspec.ValidationError as error:
            raise _UnusableError("wrong_field", f"{error}; see the formats in docs/simulate.md") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _UnusableError("no_json", f"{error}; give one JSON object a line") from None

    def _mooncake(self, line: _Mooncake) -> tuple[float, Call]:
        pieces: list[Piece] = []
        left = line.input_length
        for block in line.hash_ids:
            if not left:
                break
            tokens = self._blocks.get(block)
            if tokens is None:
                tokens = self._blocks[block] = self._fresh.take(MOONCAKE_BLOCK)
            pieces.append(tokens[:left])
            left -= len(pieces[-1])
        if left:
            pieces.append(self._fresh.take(left))
        return line.timestamp, Call(tuple(pieces), self._fresh.take(line.output_length))

    def _chat(self, line: _Chat, raw: bytes) -> tuple[float, Call]:
        body = bytes(line.body) or raw
        fields = msgspec.json.decode(body, type=_Body)
        completion = bool(bytes(fields.prompt)) and not bytes(fields.messages)
        prompt = parse(line.path or ("/v1/completions" if completion else "/v1/chat/completions"), body)
        if not prompt.texts:
            raise _UnusableError(f"prompt_{prompt.unused}", f"no prompt can be read of it: {prompt.unused}")
        answer = line.output_length or _limit(fields.max_completion_tokens) or _limit(fields.max_tokens)
        call = Call((prompt.texts[0],), self._fresh.take(answer or ANSWER_TOKENS), model=prompt.model)
        return line.timestamp, call


def _limit(value: Any) -> int | None:
    return value if isinstance(value, int) and 1 <= value <= MOST_TOKENS else None
