"""Requests that keep coming while something happens."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.support.bodies import chat
from tests.support.http_client import Answer, RawClient

PATH = "/v1/chat/completions?bytes=600&chunks=3&every=0.005"
_numbers = itertools.count()


@dataclass
class Load:
    """What became of the requests: answers by status, and errors of connections, by the tag of the request."""

    answers: Counter[int] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that got no good answer, with what they got."""
    served_by: Counter[str] = field(default_factory=Counter)
    begun: set[str] = field(default_factory=set)
    """Tags of all requests so far, those under way included."""

    @property
    def total(self) -> int:
        return sum(self.answers.values())

    async def more(self, count: int) -> None:
        """Wait for so many further answers."""
        wanted = self.total + count
        async with asyncio.timeout(20):
            while self.total < wanted:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def load(
    port: int, *, workers: int = 12, path: str = PATH, body: Callable[[int], bytes] | None = None
) -> AsyncIterator[Load]:
    """Keep `workers` requests going at any time, each worker on one connection for as long as that lasts."""
    result, running = Load(), True
    make = body or (lambda number: chat(f"load {number % 7} " * 40))

    async def work() -> None:
        client: RawClient | None = None
        while running:
            number = next(_numbers)
            tag = f"load-{number}"
            result.begun.add(tag)
            try:
                client = client or await RawClient.connect(port)
                answer: Answer = await client.request(make(number), path=path, headers=[("x-tag", tag)])
            except (OSError, EOFError, TimeoutError) as error:
                result.answers[0] += 1
                result.errors[tag] = repr(error)
                if client is not None:
                    client.abort()
                client = None
                continue
            result.answers[answer.status] += 1
            result.served_by[answer.headers.get("x-engine", "")] += 1
            if answer.status != 200:
                result.errors[tag] = f"{answer.status} {answer.body[:200]!r}"
            if answer.headers.get("connection") == "close":
                await client.close()
                client = None
        if client is not None:
            await client.close()

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    try:
        yield result
    finally:
        running = False
        await asyncio.gather(*tasks)
