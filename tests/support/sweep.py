"""The same requests through any Envoy: every size that matters, plain and streamed, all at once."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.bodies import chat_of
from tests.support.engine import PIECE, Engine, Seen, answer_bytes
from tests.support.http_client import Answer, send
from tests.support.picker_process import PickerProcess

MEBIBYTE = 1 << 20
SIZES = (0, 1, 62_000, 62_001, 64 * 1024, MEBIBYTE, 10 * MEBIBYTE)
_numbers = itertools.count()


@dataclass(frozen=True)
class Exchange:
    """One request with body and answer of `size` bytes; `streamed`: both in chunks, without a content-length."""

    size: int
    streamed: bool
    body: bytes
    answer: Answer
    seen: Seen
    decision: dict[str, Any]

    def check(self) -> None:
        """Nothing was lost, changed or sent elsewhere than the picker said."""
        assert self.answer.status == 200
        assert self.answer.body == answer_bytes(self.size)
        assert self.seen.complete
        assert (self.seen.length, self.seen.sha256) == (self.size, hashlib.sha256(self.body).hexdigest())
        for length, encoding in (
            (self.seen.all("content-length"), self.seen.all("transfer-encoding")),
            ([v for k, v in self.answer.fields if k == "content-length"], self.chunked_answer),
        ):
            assert (length, encoding) in (([str(self.size)], []), ([], ["chunked"]))
        assert self.decision["reason"] == "routed"
        assert self.seen.engine.address == self.decision["destination"]["address"] == self.answer.headers["x-engine"]

    @property
    def chunked_answer(self) -> list[str]:
        return [value for name, value in self.answer.fields if name == "transfer-encoding"]

    @property
    def summary(self) -> tuple[Any, ...]:
        """All that has to be the same whatever carries ext_proc."""
        framing = (*self.seen.all("content-length"), *self.seen.all("transfer-encoding"), *self.chunked_answer)
        return self.size, self.streamed, self.answer.status, framing, self.decision["prompt_unused"]


async def sweep(
    port: int, picker: PickerProcess, engines: Sequence[Engine], sizes: Iterable[int] = SIZES
) -> list[Exchange]:
    """Send every size twice, plain and streamed, all at the same time."""

    async def one(size: int, streamed: bool) -> tuple[int, bool, bytes, Answer, Seen]:
        number = next(_numbers)
        body = chat_of(size, number)
        pieces = [body[at : at + PIECE] for at in range(0, size, PIECE)]
        path = f"/v1/chat/completions?bytes={size}&chunks={5 if streamed else 0}"
        answer = await send(port, pieces if streamed else body, path=path, headers=[("x-tag", f"sweep-{number}")])
        seen = next(found for engine in engines if (found := engine.seen.pop(f"sweep-{number}", None)))
        return size, streamed, body, answer, seen

    sent = await asyncio.gather(*(one(size, streamed) for size in sizes for streamed in (False, True)))
    decisions = {decision["request_id"]: decision for decision in await picker.decisions()}
    return [Exchange(*parts, decisions[parts[-1].request_id]) for parts in sent]
