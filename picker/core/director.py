"""What happens to one request: decided, counted while it lasts, learnt from when it is over.

The director owns the mutable state of routing: endpoints, the scheduler in force, requests in flight. It does no
I/O; clock and randomness come in with the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from enum import StrEnum
from http import HTTPStatus
from math import isnan
from typing import Any

import msgspec

from picker.core.endpoints import Endpoint, EndpointTable
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.headers import REQUEST_ID
from picker.core.models import ModelSettings, Rewrites, Rewritten, model_of, replace_model
from picker.core.prompts import Prompt, Unused, parse
from picker.core.scheduling.api import Candidates, Learning, Preparation, Request, Rng, Timer
from picker.core.scheduling.decision import Decision, Reason
from picker.core.scheduling.scheduler import Asked, Scheduler
from picker.core.sticky import StickySessions
from picker.core.token_ratio import TokenRatio
from picker.core.usage import Usage

_UNUSED = {
    BodyState.NONE: Unused.NO_BODY,
    BodyState.STREAMED: Unused.BODY_MODE_STREAMED,
    BodyState.TRUNCATED: Unused.BODY_TRUNCATED,
}

_PLAIN = Scheduler((), (), ())

_ROUNDING = 1e-3
"""Fewer tokens than this are none: sums of what was added and taken away."""
_TELLING_TOKENS = 512.0
"""A prefill of fewer tokens says nothing of an endpoint's speed."""
_RATE_WEIGHT = 0.1
_FROM_ENVOY = frozenset((503, 504))
"""What Envoy answers by itself when an endpoint refuses connections or is too late."""


class PrefillSignal(StrEnum):
    """What told that a prompt was computed; best first, and the label of a counter."""

    KV_EVENTS = "kv_events"
    RESPONSE_BODY = "response_body"
    END = "end"


class Director:
    """Decides requests and learns from their ends. Every `Ticket` handed out has to be finished, once."""

    def __init__(self, scheduler: Scheduler, table: EndpointTable, *, fallbacks: int, rng: Rng, timer: Timer) -> None:
        self.scheduler = scheduler
        self.table = table
        self.fallbacks = fallbacks
        self.preparation: Preparation | None = None
        """Set while a producer in force needs one."""
        self.sticky: StickySessions | None = None
        """Set while sessions stick to endpoints."""
        self.decision_seconds = 0.1
        self._rng = rng
        self._timer = timer
        self.in_flight = 0
        self.prefill_signals: Counter[PrefillSignal] = Counter()
        self.token_ratio = TokenRatio()
        self.rewrites = Rewrites(ModelSettings())
        self._forgotten: dict[int, int] = {}
        self._forgets = 0

    def read(self, asked: Decide) -> Request:
        """Parse what was asked for into what a decision knows."""
        started = self._timer()
        headers = asked.headers
        path = headers.get(":path", b"").decode("latin-1")
        unused = _UNUSED.get(asked.body_state)
        prompt = (
            Prompt(unused=unused)
            if unused
            else parse(path, asked.body, content_encoding=headers.get("content-encoding", b""))
        )
        request_id = headers.get(REQUEST_ID, b"").decode("latin-1")
        session = "" if self.sticky is None else self.sticky.session(headers, prompt.model)
        return Request(
            request_id,
            path,
            prompt,
            started=started,
            parsed=self._timer(),
            body_bytes=len(asked.body),
            bytes_per_token=self.token_ratio.of(prompt.model),
            session=session,
        )

    def rewrite(self, asked: Decide) -> tuple[Decide, Rewritten | None]:
        """Have a request ask for the model that its name stands for, where there is such a one."""
        if not self.rewrites or asked.body_state is not BodyState.COMPLETE:
            return asked, None
        name = model_of(asked.body)
        target = None if name is None else self.rewrites.target(name, self._rng)
        body = None if target is None else replace_model(asked.body, target)
        if name is None or target is None or body is None:
            return asked, None
        return msgspec.structs.replace(asked, body=body), Rewritten(name, target)

    def now(self) -> float:
        """Monotonic seconds, of the clock of `Request.now`."""
        return self._timer() / 1e9

    @property
    def prepares(self) -> bool:
        """Whether any decision may have to wait for something."""
        return self.preparation is not None or (self.sticky is not None and self.sticky.lookup is not None)

    def prepare(self, asked: Decide, request: Request) -> list[Awaitable[Mapping[str, Any]]]:
        """Return what will give, within `decision_seconds`, all of `Request.prepared`; empty: there is nothing to wait for."""
        preparations = [self.preparation] if self.preparation is not None and request.prompt.unused is None else []
        if request.session and self.sticky is not None and self.sticky.lookup is not None:
            preparations.append(self.sticky.lookup)
        begun = (preparation.begin(asked, request, self.decision_seconds) for preparation in preparations)
        return [preparing for preparing in begun if preparing is not None]

    def decide(self, asked: Decide, fallbacks: int | None = None, request: Request | None = None) -> Decision:
        """Decide without any side effect. `fallbacks` limits those of the configuration; `request` was read before."""
        return self._decide(self.scheduler, self.read(asked) if request is None else request, asked, fallbacks)

    def refuse(self, asked: Decide, reason: Reason) -> Decision:
        """A decision against a request, for a reason that was found before it."""
        candidates = Candidates(self.table, self.table.slots, self.table.mask)
        now = self._timer()
        return self.scheduler.choose(Asked(self.read(asked), reason, now, 0, self._rng, self._timer, None), candidates)

    def decide_plainly(self, asked: Decide, fallbacks: int | None = None) -> Decision:
        """Decide by in-flight counts alone, without reading the prompt or asking any plugin."""
        now = self._timer()
        request = Request("", "", Prompt(unused=Unused.FAILED), started=now, parsed=now)
        return self._decide(_PLAIN, request, asked, fallbacks)

    def _decide(self, scheduler: Scheduler, request: Request, asked: Decide, fallbacks: int | None) -> Decision:
        most = self.fallbacks if fallbacks is None else min(fallbacks, self.fallbacks)
        pinned = self.sticky.pinned(request, self.table) if request.session and self.sticky is not None else None
        return scheduler.decide(
            request,
            self.table,
            subset=asked.subset,
            fallbacks=most,
            rng=self._rng,
            timer=self._timer,
            pinned=pinned,
        )

    def route(self, decision: Decision) -> Ticket:
        """Make a routed decision count: one more in flight, its tokens queued, its blocks visible to the next decision."""
        prefill = decision.prefill
        # What may fail comes first: a pick that cannot be learnt is not counted.
        apart = None if prefill is None else [match.picked(prefill.slot) for match in decision.matches.values()]
        learnings = [match.picked(decision.slot) for match in decision.matches.values()]
        if self.sticky is not None and (pin := self.sticky.bind(decision, self.table)) is not None:
            learnings.append(pin)
        self.scheduler.routed(decision)
        self.in_flight += 1
        there = None if prefill is None or apart is None else Ticket(self, prefill, self._forgets, apart)
        return Ticket(self, decision, self._forgets, learnings, there)

    def replace_endpoints(self, endpoints: Iterable[Endpoint]) -> tuple[int, int]:
        """Make these the endpoints; returns how many came and went. What went is forgotten everywhere.

        A slot is forgotten when it is filled, too, so that a request from before teaches its new endpoint nothing. An
        endpoint that stays, but whose container is another one, has restarted.
        """
        table = self.table
        before = {slot: table.endpoints[slot].started_at for slot in table.slots.tolist()}
        added, removed = table.replace(endpoints)
        for slot in (*removed, *added):
            self._note_forgetting(slot)
            for producer in self.scheduler.producers:
                producer.forget(slot)
        for slot in before.keys() - {*added, *removed}:
            started = table.endpoints[slot].started_at
            if started is not None and before[slot] not in {None, started}:
                self.restarted(slot)
        return len(added), len(removed)

    def restarted(self, slot: int) -> None:
        """Forget which prompts a slot holds: its engine restarted with an empty cache."""
        self._note_forgetting(slot)
        for producer in self.scheduler.producers:
            producer.restarted(slot)

    def _note_forgetting(self, slot: int) -> None:
        self._forgets += 1
        self._forgotten[slot] = self._forgets

    def served_by(self, finish: Finish, picked: int | None, routed_after: int) -> int | None:
        """The slot that holds the prompt of a request that succeeded, or None when none does.

        `picked` is where it was sent, if that endpoint is still there; `routed_after` how many times a slot had been
        forgotten when it was: an endpoint that came since then, or whose engine restarted, holds nothing of it.
        """
        slot = self.table.slot_of(finish.served) if finish.served else picked
        if slot is None or self._forgotten.get(slot, 0) > routed_after:
            return None
        return slot


class Ticket:
    """One request on its way: a count in flight, tokens to compute, and what was learnt for the time being.

    A request whose prompt is computed apart has a ticket within its ticket: the tokens are the prefill endpoint's, and
    its own count ends with the prefill.
    """

    __slots__ = (
        "_answered",
        "_director",
        "_generation",
        "_learnings",
        "_picked_at",
        "_prefill",
        "_queued_before",
        "_request",
        "_routed_after",
        "_slot",
        "_tokens",
        "_work",
    )

    def __init__(
        self,
        director: Director,
        decision: Decision,
        routed_after: int,
        learnings: Sequence[Learning],
        prefill: Ticket | None = None,
    ) -> None:
        table, slot = director.table, decision.slot
        self._director = director
        self._slot = slot
        self._prefill = prefill
        self._generation = table.generation[slot]
        self._routed_after = routed_after
        self._learnings = learnings
        self._request = decision.request
        self._picked_at = decision.request.now
        self._answered = False
        self._work = self._tokens = decision.tokens if prefill is None else 0.0
        self._queued_before = 0.0
        table.in_flight[slot] += 1
        table.health.sent(slot, self._picked_at)
        if self._tokens:
            self._queued_before = table.queued_tokens.item(slot)
            table.queued_tokens[slot] += self._tokens
        for learning in learnings:
            if (watch := getattr(learning, "watch", None)) is not None:
                watch(self)

    @property
    def _alive(self) -> bool:
        """Whether the endpoint that was picked is still there."""
        return self._director.table.generation[self._slot] == self._generation

    def answered(self, status: int | None, now: float) -> None:
        """Response headers came from the endpoint, or Envoy's own in its place."""
        self._answered = True
        if not self._alive:
            return
        health = self._director.table.health
        if status is not None and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            health.failed(self._slot)
            if status in _FROM_ENVOY:
                return  # perhaps in place of an endpoint that is silent
        else:
            health.answered(self._slot, now - self._picked_at)
        self._sign(now)

    def progress(self, tokens: float, now: float) -> None:
        """The endpoint has computed so many more of the prompt's tokens."""
        done = min(tokens, self._tokens)
        self._tokens -= done
        if self._alive:
            self._director.table.queued_tokens[self._slot] -= done
            self._sign(now)

    def prefilled(self, now: float, signal: PrefillSignal) -> None:
        """The prompt is computed. The first signal counts, further ones do nothing."""
        if self._prefill is not None:
            self._prefill.prefilled(now, signal)
            if signal is not PrefillSignal.END:
                self._end_prefill(success=True, now=now)
            return
        if not self._work:
            return
        table, slot = self._director.table, self._slot
        self._director.prefill_signals[signal] += 1
        if self._alive:
            left = table.queued_tokens.item(slot) - self._tokens
            table.queued_tokens[slot] = left if left > _ROUNDING else 0.0
            if signal is not PrefillSignal.END:
                self._observe_rate(now - self._picked_at)
                self._sign(now)
        self._work = self._tokens = 0.0

    def _observe_rate(self, seconds: float) -> None:
        """Learn how fast the endpoint computes prompts, from what it had to compute up to now."""
        work = self._queued_before + self._work
        if work < _TELLING_TOKENS or seconds <= 0:
            return
        rates, slot = self._director.table.prefill_rate, self._slot
        known = rates.item(slot)
        rates[slot] = work / seconds if isnan(known) else known + (work / seconds - known) * _RATE_WEIGHT

    def _sign(self, now: float) -> None:
        table = self._director.table
        table.health.alive(self._slot, now, table.in_flight.item(self._slot) - 1)

    def finish(self, finish: Finish, usage: Usage | None = None) -> None:
        """The request is over: count it out, and keep or undo what was learnt.

        What is kept belongs to the endpoint that served, wherever the pick went. An endpoint that is gone, that was
        never ours, that came later, or whose engine restarted meanwhile, learns nothing.
        """
        self._director.in_flight -= 1
        self._settle(finish, usage, self._director.now())

    def _end_prefill(self, *, success: bool, now: float) -> None:
        """The prefill endpoint has done its part, or will never."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            prefill._settle(Finish(success, LearnedOn.RESPONSE_BODY, None, None), None, now)  # noqa: SLF001  of its own kind

    def _settle(self, finish: Finish, usage: Usage | None, now: float) -> None:
        director = self._director
        table = director.table
        self.prefilled(now, PrefillSignal.END)
        self._end_prefill(success=finish.success, now=now)
        alive = self._alive
        if alive:
            if finish.success:
                self._sign(now)
            table.in_flight[self._slot] -= 1
        if not finish.success:
            for learning in self._learnings:
                learning.undo()
            return
        if usage is not None and usage.prompt_tokens:
            director.token_ratio.learn(self._request, usage.prompt_tokens)
        served = director.served_by(finish, self._slot if alive else None, self._routed_after)
        for learning in self._learnings:
            learning.confirm(served, usage)
