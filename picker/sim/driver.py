"""The clock of a served engine: one task that takes the steps in real time and wakes who waits for tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from picker.sim.engine import Engine, Request, Running
from picker.sim.metrics import INTER_TOKEN_BUCKETS, TIME_TO_FIRST_TOKEN_BUCKETS, Histogram

CATCH_UP = 0.05
"""Seconds of lateness that are made up by starting the next step when the last one should have ended.

A timer is up to a millisecond late, which would otherwise make every step longer. Beyond that the machine is too slow
for the speed that was asked for, and the engine is as fast as it can be."""


class EngineDeadError(Exception):
    """The engine's task failed; no request will ever be answered."""


class Generation:
    """The requests of one call, from submission to the last token."""

    def __init__(self, members: Sequence[Running], *, streaming: bool) -> None:
        self.members = members
        self.streaming = streaming
        self.unfinished = len(members)
        self.dead = False
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Wait for more tokens when streaming, for all of them otherwise. Raises EngineDeadError."""
        await self._news.wait()
        self._news.clear()
        if self.dead:
            raise EngineDeadError

    def tell(self) -> None:
        """Wake the waiter."""
        self._news.set()


class Driver:
    """Runs an engine. `run` is the task; the rest is called from request handlers on the same loop."""

    def __init__(self, engine: Engine) -> None:
        self._clock = asyncio.get_running_loop().time
        self._work = asyncio.Event()
        self._begin(engine)

    def _begin(self, engine: Engine) -> None:
        self.engine = engine
        self.dead = False
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(INTER_TOKEN_BUCKETS)
        self.counts: Counter[str] = Counter(submitted=0, finished=0, aborted=0, prompt_tokens=0, generated_tokens=0)
        self._generations: dict[str, Generation] = {}
        self._flowing: dict[Generation, None] = {}  # streams that get tokens

    def restart(self, engine: Engine) -> None:
        """Go on with a new engine that knows nothing; every request of the old one fails."""
        self._fail_all()
        self._begin(engine)

    def start(self, requests: Sequence[Request], *, streaming: bool) -> Generation:
        """Submit the requests of a call. Raises EngineDeadError, and ValueError as `Engine.submit` does."""
        if self.dead:
            raise EngineDeadError
        now = self._clock()
        members = [self.engine.submit(request, now) for request in requests]
        generation = Generation(members, streaming=streaming)
        for member in members:
            self._generations[member.request.id] = generation
            self.counts["prompt_tokens"] += member.request.prompt_tokens
        self.counts["submitted"] += len(members)
        self._work.set()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Abort what is not finished of a call."""
        self._flowing.pop(generation, None)
        for member in generation.members:
            if self._generations.pop(member.request.id, None) is not None:
                self.engine.abort(member.request.id)
                self.counts["aborted"] += 1

    async def run(self) -> None:
        """Drive the engine until cancelled. When that fails, every request fails too, now and from now on."""
        try:
            await self._steps()
        except Exception:
            self.dead = True
            self._fail_all()
            raise

    def _fail_all(self) -> None:
        for generation in self._generations.values():
            generation.dead = True
            generation.tell()

    async def _steps(self) -> None:
        start = last = self._clock()
        while True:
            engine = self.engine
            end = engine.next_step(start)
            if end is None:
                self._work.clear()
                await self._work.wait()
                start = last = self._clock()
                continue
            await asyncio.sleep(max(0.0, end - self._clock()))
            if self.engine is not engine:
                start = last = self._clock()
                continue
            self._finish(end, last)
            last = end
            now = self._clock()
            start = end if now - end < CATCH_UP else now

    def _finish(self, end: float, last: float) -> None:
        output = self.engine.finish_step(end)
        self.counts["generated_tokens"] += output.tokens
        self.inter_token.observe(end - last, output.tokens - len(output.first))
        for member in output.first:
            self.time_to_first_token.observe(max(0.0, end - member.arrived))
            generation = self._generations[member.request.id]
            if generation.streaming:
                self._flowing[generation] = None
        for generation in self._flowing:
            generation.tell()
        for member in output.finished:
            generation = self._generations.pop(member.request.id)
            generation.unfinished -= 1
            self.counts["finished"] += 1
            if not generation.unfinished:
                self._flowing.pop(generation, None)
                generation.tell()
