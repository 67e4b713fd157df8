"""What happens to one request: decided, counted while it lasts, learnt from when it is over.

The director owns the mutable state of routing: endpoints, the scheduler in force, requests in flight. It does no
I/O; clock and randomness come in with the calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from picker.core.endpoints import Endpoint, EndpointTable
from picker.core.exchange.effects import BodyState, Decide, Finish
from picker.core.headers import REQUEST_ID
from picker.core.prompts import Prompt, Unused, parse
from picker.core.scheduling.api import Learning, Preparation, Request, Rng, Timer
from picker.core.scheduling.decision import Decision
from picker.core.scheduling.scheduler import Scheduler

_UNUSED = {
    BodyState.NONE: Unused.NO_BODY,
    BodyState.STREAMED: Unused.BODY_MODE_STREAMED,
    BodyState.TRUNCATED: Unused.BODY_TRUNCATED,
}

_PLAIN = Scheduler((), (), ())


class Director:
    """Decides requests and learns from their ends. Every `Ticket` handed out has to be finished, once."""

    def __init__(self, scheduler: Scheduler, table: EndpointTable, *, fallbacks: int, rng: Rng, timer: Timer) -> None:
        self.scheduler = scheduler
        self.table = table
        self.fallbacks = fallbacks
        self.preparation: Preparation | None = None
        """Set while a producer in force needs one."""
        self.decision_seconds = 0.1
        self._rng = rng
        self._timer = timer
        self.in_flight = 0
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
        return Request(request_id, path, prompt, started=started, parsed=self._timer())

    def prepare(self, asked: Decide, request: Request) -> Awaitable[Mapping[str, Any]] | None:
        """Return what will give `Request.prepared` within `decision_seconds`; None when there is nothing to wait for."""
        if self.preparation is None or request.prompt.unused is not None:
            return None
        return self.preparation.begin(asked, request, self.decision_seconds)

    def decide(self, asked: Decide, fallbacks: int | None = None, request: Request | None = None) -> Decision:
        """Decide without any side effect. `fallbacks` limits those of the configuration; `request` was read before."""
        return self._decide(self.scheduler, self.read(asked) if request is None else request, asked, fallbacks)

    def decide_plainly(self, asked: Decide, fallbacks: int | None = None) -> Decision:
        """Decide by in-flight counts alone, without reading the prompt or asking any plugin."""
        now = self._timer()
        request = Request("", "", Prompt(unused=Unused.FAILED), started=now, parsed=now)
        return self._decide(_PLAIN, request, asked, fallbacks)

    def _decide(self, scheduler: Scheduler, request: Request, asked: Decide, fallbacks: int | None) -> Decision:
        most = self.fallbacks if fallbacks is None else min(fallbacks, self.fallbacks)
        return scheduler.decide(
            request,
            self.table,
            subset=asked.subset,
            fallbacks=most,
            rng=self._rng,
            timer=self._timer,
        )

    def route(self, decision: Decision) -> Ticket:
        """Make a routed decision count: one more in flight, its blocks visible to the next decision."""
        slot = decision.slot
        learnings = [match.picked(slot) for match in decision.matches.values()]
        self.in_flight += 1
        self.table.in_flight[slot] += 1
        return Ticket(self, slot, self.table.generation[slot], self._forgets, learnings)

    def replace_endpoints(self, endpoints: Iterable[Endpoint]) -> tuple[int, int]:
        """Make these the endpoints; returns how many came and went. What went is forgotten everywhere.

        A slot is forgotten when it is filled, too, so that a request from before teaches its new endpoint nothing.
        """
        added, removed = self.table.replace(endpoints)
        for slot in (*removed, *added):
            self._note_forgetting(slot)
            for producer in self.scheduler.producers:
                producer.forget(slot)
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
    """One request on its way: a count in flight and what was learnt for the time being."""

    __slots__ = ("_director", "_generation", "_learnings", "_routed_after", "_slot")

    def __init__(
        self, director: Director, slot: int, generation: int, routed_after: int, learnings: Sequence[Learning]
    ) -> None:
        self._director = director
        self._slot = slot
        self._generation = generation
        self._routed_after = routed_after
        self._learnings = learnings

    def finish(self, finish: Finish) -> None:
        """The request is over: count it out, and keep or undo what was learnt.

        What is kept belongs to the endpoint that served, wherever the pick went. An endpoint that is gone, that was
        never ours, that came later, or whose engine restarted meanwhile, learns nothing.
        """
        table = self._director.table
        self._director.in_flight -= 1
        alive = table.generation[self._slot] == self._generation
        if alive:
            table.in_flight[self._slot] -= 1
        if not finish.success:
            for learning in self._learnings:
                learning.undo()
            return
        served = self._director.served_by(finish, self._slot if alive else None, self._routed_after)
        for learning in self._learnings:
            learning.confirm(served)
