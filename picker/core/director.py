"""What happens to one request: decided, counted while it lasts, learnt from when it is over.

The director owns the mutable state of routing: endpoints, the scheduler in force, requests in flight. It does no
I/O; clock and randomness come in with the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

import msgspec

from picker.core.arrays import Slots
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide, Finish
from picker.core.headers import REQUEST_ID
from picker.core.models import ModelSettings, Rewrites, Rewritten, model_of, replace_model
from picker.core.prompts import Prompt, Unused, parse
from picker.core.scheduling.api import Candidates, Preparation, Request, Rng, Timer
from picker.core.scheduling.decision import Decision, Reason
from picker.core.scheduling.scheduler import Asked, Scheduler
from picker.core.sticky import StickySessions
from picker.core.tickets import PrefillSignal, Sharing, Ticket
from picker.core.token_ratio import TokenRatio

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
        self.sticky: StickySessions | None = None
        """Set while sessions stick to endpoints."""
        self.decision_seconds = 0.1
        self._rng = rng
        self._timer = timer
        self.in_flight = 0
        self.prefill_signals: Counter[PrefillSignal] = Counter()
        self.token_ratio = TokenRatio()
        self.rewrites = Rewrites(ModelSettings())
        self.sharing: Sharing | None = None
        """Told of every pick while other pickers are to know of them."""
        self._forgotten: dict[int, int] = {}
        self._forgets = 0

    def read(self, asked: Decide) -> Request:
        """Parse what was asked for into what a decision knows."""
        started = self._timer()
        headers = asked.headers
        path = headers.get(":path", b"").decode("latin-1")
        unused = _UNUSED.get(asked.body_state)
        prompt = (
            Prompt(unused=unused, headers=headers)
            if unused
            else parse(path, asked.body, content_encoding=headers.get("content-encoding", b""), headers=headers)
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

    @property
    def pools(self) -> tuple[Slots, ...]:
        """The endpoints, or those of each role where prompts are computed apart."""
        apart = self.scheduler.disaggregation
        return (self.table.slots,) if apart is None else apart.pools(self.table)

    def now(self) -> float:
        """Monotonic seconds, of the clock of `Request.now`."""
        return self._timer() / 1e9

    @property
    def prepares(self) -> bool:
        """Whether any decision may have to wait for something."""
        return self.preparation is not None or (self.sticky is not None and self.sticky.lookup is not None)

    @property
    def wants_replies(self) -> bool:
        """Whether a producer in force learns from what engines reply."""
        return any(getattr(producer, "wants_replies", False) for producer in self.scheduler.producers)

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
        return self._refuse(self.scheduler, self.read(asked), reason)

    def refuse_plainly(self, reason: Reason) -> Decision:
        """The same without reading the request or asking any plugin."""
        return self._refuse(_PLAIN, self._unread(), reason)

    def _refuse(self, scheduler: Scheduler, request: Request, reason: Reason) -> Decision:
        # No endpoint is looked at, so that there is none to show.
        candidates = Candidates(self.table, self.table.slots[:0], 0)
        return scheduler.choose(Asked(request, reason, self._timer(), 0, self._rng, self._timer, None), candidates)

    def decide_plainly(self, asked: Decide, fallbacks: int | None = None) -> Decision:
        """Decide by in-flight counts alone, without reading the prompt or asking any plugin."""
        return self._decide(_PLAIN, self._unread(), asked, fallbacks)

    def _unread(self) -> Request:
        now = self._timer()
        return Request("", "", Prompt(unused=Unused.FAILED), started=now, parsed=now)

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
