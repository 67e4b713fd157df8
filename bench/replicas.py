"""Several pickers before the same engines, in simulated time: what sharing picks is worth, without a machine's noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.prompts import Prompt
from picker.core.scheduling.scheduler import Scheduler
from picker.core.sharing.replicas import Replicas
from picker.core.tickets import PrefillSignal, Ticket
from picker.sim.block_cache import key_tokens
from picker.sim.engine import Request
from picker.simulate.fleet import LIMITS, SimulatedEngine
from picker.simulate.workload import TOKEN_BYTES, Session, Workload, packed, token_array

BATCH_SECONDS = 0.02
CHANNEL_SECONDS = 0.002
"""From one picker's batch to another's knowing of it."""
_SCRAPE_SECONDS = 0.2
_ASKED = Decide({":path": b"/v1/completions"}, b"", BodyState.COMPLETE, None, None)
_ANSWERED = Finish(success=True, learned_on=LearnedOn.RESPONSE_BODY, status=200, served=None)


class Outcome(Struct):
    """One request. Times are in seconds from when it was due."""

    prompt_tokens: int
    known_tokens: float
    """The most of it that its picker knew of any engine."""
    cached_tokens: int = 0
    first_token: float = 0.0


def replay(
    workload: Workload, build: Callable[[], Scheduler], *, engines: int, pickers: int, sharing: bool, seed: int = 1
) -> list[Outcome]:
    """Send a workload, each request through a picker by chance, until all that was sent has ended."""
    return _Replay(workload, build, engines, pickers, sharing, seed).run()


def cached_rate(outcomes: Sequence[Outcome]) -> float:
    """The share of prompt tokens that came from caches."""
    return sum(one.cached_tokens for one in outcomes) / sum(one.prompt_tokens for one in outcomes)


class _UnderWay(Struct):
    outcome: Outcome
    due: float
    ticket: Ticket
    session: Session
    number: int


class _Replay:
    def __init__(
        self,
        workload: Workload,
        build: Callable[[], Scheduler],
        engines: int,
        pickers: int,
        sharing: bool,
        seed: int,
    ) -> None:
        self._workload = workload
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._rng = Random(seed)
        self._engines = [SimulatedEngine(n, LIMITS, slow=1.0, stuck_at=float("inf")) for n in range(engines)]
        self._stepping = [False] * engines
        self._outcomes: list[Outcome] = []
        self._under_way: dict[str, _UnderWay] = {}
        self._pickers = [self._picker(build(), number, engines) for number in range(pickers)]
        self._replicas = [Replicas(director, f"picker-{n}") for n, director in enumerate(self._pickers)]
        if sharing:
            for director, replicas in zip(self._pickers, self._replicas, strict=True):
                director.sharing = replicas

    def _picker(self, scheduler: Scheduler, number: int, engines: int) -> Director:
        timer = lambda: int(self._now * 1e9)  # noqa: E731
        director = Director(scheduler, EndpointTable(), fallbacks=0, rng=Random(number), timer=timer)
        director.replace_endpoints(Endpoint(f"engine-{n}", f"10.0.0.{n}:8000") for n in range(engines))
        return director

    def run(self) -> list[Outcome]:
        for session in self._workload.sessions:
            self._at(session.start, self._arrive, session, 0)
        next_scrape = next_batch = 0.0
        while self._due:
            while (other := min(next_scrape, next_batch)) <= self._due[0][0]:
                self._now = other
                if other == next_batch:
                    self._tell()
                    next_batch += BATCH_SECONDS
                else:
                    self._scrape()
                    next_scrape += _SCRAPE_SECONDS
            self._now, _, happen, arguments = heappop(self._due)
            happen(*arguments)
        return self._outcomes

    def _at(self, time: float, happen: Callable[..., None], *arguments: Any) -> None:
        heappush(self._due, (time, next(self._order), happen, arguments))

    def _tell(self) -> None:
        for sender, director in zip(self._replicas, self._pickers, strict=True):
            if director.sharing is not None:
                sender.expire(self._now)
                for message in sender.flush(self._now):
                    self._at(self._now + CHANNEL_SECONDS, self._hear, message)

    def _hear(self, message: bytes) -> None:
        for replicas in self._replicas:
            replicas.receive(message, self._now)

    def _scrape(self) -> None:
        for engine in self._engines:
            metrics = engine.scrape()
            for director in self._pickers:
                director.table.observe(engine.number, metrics, self._now)

    def _arrive(self, session: Session, number: int) -> None:
        if self._now > self._workload.end:
            return
        call = session.calls[number]
        tokens = packed((*call.prompt, call.answer))
        text = tokens[: call.prompt_tokens * TOKEN_BYTES]
        director = self._rng.choice(self._pickers)
        prompt = Prompt("", (text,), stream=True)
        request = msgspec.structs.replace(director.read(_ASKED), prompt=prompt, body_bytes=len(text))
        decision = director.decide(_ASKED, request=request)
        work = decision.work
        assert work is not None
        outcome = Outcome(call.prompt_tokens, work.prompt - float(work.uncached.min()))
        name = str(len(self._outcomes))
        self._outcomes.append(outcome)
        engine = self._engines[decision.slot]
        self._under_way[name] = _UnderWay(outcome, self._now, director.route(decision), session, number)
        content = key_tokens(token_array(tokens), LIMITS.block_size)
        engine.submit(Request(name, content, call.prompt_tokens), self._now)
        self._under_way[name].ticket.answered(200, self._now)
        if not self._stepping[engine.number]:
            self._begin(engine)

    def _begin(self, engine: SimulatedEngine) -> None:
        end = engine.begin(self._now)
        self._stepping[engine.number] = end is not None
        if end is not None:
            self._at(end, self._step_ended, engine)

    def _step_ended(self, engine: SimulatedEngine) -> None:
        output = engine.end(self._now)
        for member in output.first:
            call = self._under_way[member.request.id]
            call.outcome.first_token = self._now - call.due
            call.outcome.cached_tokens = member.cached_tokens or 0
            call.ticket.prefilled(self._now, PrefillSignal.RESPONSE_BODY)
        for member in output.finished:
            call = self._under_way.pop(member.request.id)
            call.ticket.finish(_ANSWERED)
            following = call.number + 1
            if following < len(call.session.calls):
                self._at(self._now + call.session.calls[following].think, self._arrive, call.session, following)
        self._begin(engine)
