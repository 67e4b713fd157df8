"""One workload, one profile: everything happens in the order of simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf, isnan, nan
from random import Random
from typing import Any

import msgspec
import numpy as np

from picker.core.admission.saturation import saturation
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.kv_events.events import EventBatch
from picker.core.plugins.kvcache_aware import TOKENS, KvCacheProducer
from picker.core.prompts import Prompt
from picker.core.scheduling.decision import Reason
from picker.core.tickets import PrefillSignal, Ticket
from picker.core.tokens.prompt import TokenPrompt
from picker.sim.block_cache import key_tokens
from picker.sim.engine import Request
from picker.sim.limits import EngineLimits
from picker.simulate.fleet import LIMITS, SimulatedEngine
from picker.simulate.profiles import Profile
from picker.simulate.workload import TOKEN_BYTES, Session, Workload, packed, token_array

SAMPLE_SECONDS = 1.0
"""Between two looks at how evenly requests are spread."""

_ASKED = Decide({":path": b"/v1/completions"}, b"", BodyState.COMPLETE, None, None)
_ANSWERED = Finish(success=True, learned_on=LearnedOn.RESPONSE_BODY, status=200, served=None)


@dataclass(eq=False, slots=True)
class Sent:
    """A call that went to an engine. Times are in seconds; those that never came are NaN."""

    due: float
    engine: int
    prompt_tokens: int
    cached_tokens: int = 0
    """Of its prompt; known when the first token comes."""
    first: float = nan
    ended: float = nan

    @property
    def answered(self) -> bool:
        """Whether the whole answer came."""
        return not isnan(self.ended)


@dataclass(eq=False, slots=True)
class _UnderWay:
    """What is needed of a call until it ends."""

    sent: Sent
    ticket: Ticket
    session: Session
    number: int
    """Which call of its session."""


@dataclass(slots=True)
class Run:
    """What came of a workload with one profile."""

    workload: Workload
    engines: int
    sent: list[Sent] = field(default_factory=list)
    """Calls that went to an engine, in the order they were sent."""
    refused: Counter[str] = field(default_factory=Counter)
    """Others that were due in the measured time, by reason."""
    spreads: list[float] = field(default_factory=list)
    """Coefficient of variation, over engines, of the requests in each; every `SAMPLE_SECONDS` of the measured time."""
    idle_while_queued: float = 0.0
    """Seconds in which one engine had nothing to do while another had two or more requests waiting."""

    def measured(self) -> list[Sent]:
        """Calls that were due in the measured time and went to an engine."""
        warm = self.workload.warm
        return [sent for sent in self.sent if sent.due >= warm]


def replay(
    workload: Workload,
    profile: Profile,
    *,
    engines: int,
    seed: int,
    slow: Mapping[int, float] | None = None,
    stuck: frozenset[int] = frozenset(),
    limits: EngineLimits = LIMITS,
    told: Callable[[int], None] = lambda _: None,
) -> Run:
    """Replay a workload until every call that was sent has ended, stuck engines' aside.

    `slow` is added to what the workload says of engines, by number; `stuck` ones hang when the measured time begins.
    `told` is called with 1 for every call that is over, and with the number of those that will not be sent.
    """
    return _Replay(workload, profile, engines, seed, {**workload.slow, **(slow or {})}, stuck, limits, told).run()


class _Replay:
    def __init__(
        self,
        workload: Workload,
        profile: Profile,
        engines: int,
        seed: int,
        slow: Mapping[int, float],
        stuck: frozenset[int],
        limits: EngineLimits,
        told: Callable[[int], None],
    ) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._told = told
        self._limits = limits
        self._profile = profile
        self._run = Run(workload, engines)
        self._table = EndpointTable(stale_seconds=max(2.0, 3 * profile.scrape_seconds))
        self._director = Director(
            profile.build(limits.block_size),
            self._table,
            fallbacks=0,
            rng=Random(seed),
            timer=lambda: int(self._now * 1e9),
        )
        self._director.replace_endpoints(
            Endpoint(f"engine-{number}", f"10.0.{number // 256}.{number % 256}:8000") for number in range(engines)
        )
        producers = self._director.scheduler.producers
        self._knows = next((one for one in producers if isinstance(one, KvCacheProducer)), None)
        self._engines = [
            SimulatedEngine(
                number,
                limits,
                slow=slow.get(number, 1.0),
                stuck_at=workload.warm if number in stuck else inf,
                publish=None if self._knows is None else self._published,
            )
            for number in range(engines)
        ]
        self._under_way: dict[str, _UnderWay] = {}
        self._stepping = [False] * engines
        self._idle = [True] * engines
        self._queues = [False] * engines
        self._watched = 0.0
        if self._knows is not None:
            for number in range(engines):
                self._knows.index.open(number, "", 0.0, block_size=limits.block_size)

    def run(self) -> Run:
        for session in self._run.workload.sessions:
            self._at(session.start, self._arrive, session, 0, session.start)
        scrape = self._profile.scrape_seconds
        next_scrape, next_sample = 0.0, self._run.workload.warm
        while self._due:
            now, _, happen, arguments = heappop(self._due)
            while next_scrape <= now:
                self._now = next_scrape
                self._scrape()
                next_scrape += scrape
            while next_sample <= now and next_sample < self._run.workload.end:
                self._sample()
                next_sample += SAMPLE_SECONDS
            self._now = now
            happen(*arguments)
        return self._run

    def _at(self, time: float, happen: Callable[..., None], *arguments: Any) -> None:
        heappush(self._due, (time, next(self._order), happen, arguments))

    def _arrive(self, session: Session, number: int, due: float) -> None:
        workload = self._run.workload
        if due > workload.end:
            self._told(len(session.calls) - number)
            return
        if session.sheddable and saturation(self._table, self._table.slots, self._profile.admission) >= 1:
            self._refuse("saturated", session, number, due)
            return
        call = session.calls[number]
        tokens = packed((*call.prompt, call.answer))
        prompt_bytes = call.prompt_tokens * TOKEN_BYTES
        director = self._director
        text = tokens[:prompt_bytes]
        prepared = {}
        if self._knows is not None:
            prepared = {TOKENS: (TokenPrompt(token_array(text), call.model),)}
        request = msgspec.structs.replace(
            director.read(_ASKED),
            prompt=Prompt(call.model, (text,), stream=True),
            prepared=prepared,
            body_bytes=len(text),
        )
        decision = director.decide(_ASKED, request=request)
        if decision.reason is not Reason.ROUTED:
            self._refuse(str(decision.reason), session, number, due)
            return
        ticket = director.route(decision)
        engine = self._engines[decision.slot]
        name = f"{len(self._run.sent)}"
        content = key_tokens(token_array(tokens), self._limits.block_size)
        try:
            engine.submit(Request(name, content, call.prompt_tokens), self._now)
        except ValueError:
            ticket.finish(Finish(success=False, learned_on=LearnedOn.RESPONSE_BODY, status=400, served=None))
            self._refuse("too_long", session, number, due)
            return
        ticket.answered(200, self._now, body_follows=True)  # engines that stream send headers before they compute
        sent = Sent(due, engine.number, call.prompt_tokens)
        self._run.sent.append(sent)
        self._under_way[name] = _UnderWay(sent, ticket, session, number)
        if not self._stepping[engine.number]:
            self._begin(engine)
        self._watch(engine)

    def _refuse(self, reason: str, session: Session, number: int, due: float) -> None:
        """The session is over: a client whose call was refused does not go on."""
        if due >= self._run.workload.warm:
            self._run.refused[reason] += 1
        self._told(len(session.calls) - number)

    def _begin(self, engine: SimulatedEngine) -> None:
        end = engine.begin(self._now)
        self._stepping[engine.number] = end is not None
        if end is not None:
            heappush(self._due, (end, next(self._order), self._step_ended, (engine,)))

    def _step_ended(self, engine: SimulatedEngine) -> None:
        now = self._now
        output = engine.end(now)
        for member in output.first:
            call = self._under_way[member.request.id]
            call.sent.first = now
            call.sent.cached_tokens = member.cached_tokens or 0
            call.ticket.prefilled(now, PrefillSignal.RESPONSE_BODY)
        for member in output.finished:
            call = self._under_way.pop(member.request.id)
            call.sent.ended = now
            call.ticket.finish(_ANSWERED)
            self._told(1)
            session, following = call.session, call.number + 1
            if following < len(session.calls):
                due = now + session.calls[following].think
                self._at(due, self._arrive, session, following, due)
        self._begin(engine)
        self._watch(engine)

    def _published(self, number: int, batch: EventBatch, now: float) -> None:
        self._at(now + self._profile.event_lag, self._heard, number, batch)

    def _heard(self, number: int, batch: EventBatch) -> None:
        assert self._knows is not None  # noqa: S101  nobody publishes otherwise
        self._knows.index.apply(number, "", batch, self._now)

    def _scrape(self) -> None:
        table = self._table
        for engine in self._engines:
            table.observe(engine.number, engine.scrape(), self._now)
        table.expire(self._now)

    def _sample(self) -> None:
        requests = np.array([engine.requests for engine in self._engines])
        if requests.any():
            self._run.spreads.append(float(requests.std() / requests.mean()))

    def _watch(self, engine: SimulatedEngine) -> None:
        """Note whether an engine is idle, or queues; add up how long one did this while another did that."""
        number, idle, queues = engine.number, engine.idle, engine.waiting >= 2
        if idle == self._idle[number] and queues == self._queues[number]:
            return
        if True in self._queues and True in self._idle:
            self._run.idle_while_queued += self._now - self._watched
        self._watched = self._now
        self._idle[number], self._queues[number] = idle, queues
