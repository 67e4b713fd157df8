"""Requests on their way: what each adds to the load of its endpoint, until it is over."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from picker.core.endpoint_table import EndpointTable
from picker.core.exchange.effects import Finish, LearnedOn
from picker.core.scheduling.api import Learning
from picker.core.scheduling.decision import Decision
from picker.core.sessions.declared import goes_on_from_memory
from picker.core.usage import Usage

if TYPE_CHECKING:
    from picker.core.director import Director

_ROUNDING = 1e-3
"""Fewer tokens than this are none: sums of what was added and taken away."""
_TELLING_TOKENS = 512.0
"""A prefill of fewer tokens says nothing of an endpoint's speed."""
_TELLING_SECONDS = 0.01
"""Nor does one that took less: most of that is the network's."""
_FROM_ENVOY = frozenset((503, 504))
"""What Envoy answers by itself when an endpoint refuses connections or is too late."""


class PrefillSignal(StrEnum):
    """What told that a prompt was computed; best first, and the label of a counter."""

    KV_EVENTS = "kv_events"
    RESPONSE_BODY = "response_body"
    END = "end"


class Sharing(Protocol):
    """Tells other pickers of picks. Short calls that never raise."""

    def picked(self, decision: Decision) -> int:
        """A request goes to an endpoint; returns the number that the other two know it by."""

    def prefilled(self, number: int) -> None:
        """Its prompt is computed."""

    def ended(self, number: int, served: str | None, told: Sequence[tuple[str, bytes]] = ()) -> None:
        """It is over; `served` is the address of the endpoint that holds its prompt now, None if it failed.

        `told` is what was learnt at its end, by producer.
        """


_END = PrefillSignal.END
_RESPONSE_BODY = PrefillSignal.RESPONSE_BODY
_FAILURES = HTTPStatus.INTERNAL_SERVER_ERROR.value


class Load:
    """A request in flight and tokens to compute, on one endpoint; whoever sent them there."""

    __slots__ = ("_generation", "_owed", "_slot", "_table", "_tokens")

    def __init__(self, table: EndpointTable, slot: int, tokens: float, now: float) -> None:
        self._table = table
        self._slot = slot
        self._generation = table.generation[slot]
        self._tokens = tokens
        self._owed = True
        """Until the endpoint has shown that it works on this request."""
        table.in_flight[slot] += 1
        table.unanswered[slot] += 1
        table.health.sent(slot, now)
        if tokens:
            table.queued_tokens[slot] += tokens

    @property
    def _alive(self) -> bool:
        """Whether the endpoint that was picked is still there."""
        return self._table.generation[self._slot] == self._generation

    def progress(self, tokens: float, now: float) -> None:
        """The endpoint has computed so many more of the prompt's tokens."""
        done = min(tokens, self._tokens)
        self._tokens -= done
        if self._alive:
            self._table.queued_tokens[self._slot] -= done
            self._sign(now)

    def _computed(self) -> None:
        """No tokens are left to compute."""
        if self._tokens and self._alive:
            left = self._table.queued_tokens.item(self._slot) - self._tokens
            self._table.queued_tokens[self._slot] = left if left > _ROUNDING else 0.0
        self._tokens = 0.0

    def _sign(self, now: float) -> None:
        """The endpoint works on the request."""
        table, slot = self._table, self._slot
        if self._owed:
            self._owed = False
            table.unanswered[slot] -= 1
        table.health.alive(slot, now, table.unanswered.item(slot))

    def _leave(self, now: float, *, well: bool) -> None:
        """The request is over."""
        self._computed()
        if self._alive:
            if well:
                self._sign(now)
            elif self._owed:
                self._table.unanswered[self._slot] -= 1
            self._table.in_flight[self._slot] -= 1


class Ticket(Load):
    """One request that we sent: what it adds to its endpoint's load, and what was learnt for the time being.

    A request whose prompt is computed apart has a ticket within its ticket: the tokens are the prefill endpoint's, and
    its own count ends with the prefill.
    """

    __slots__ = (
        "_body_due",
        "_director",
        "_learnings",
        "_model",
        "_number",
        "_picked_at",
        "_prefill",
        "_queued_before",
        "_routed_after",
        "_text_bytes",
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
        slot = decision.slot
        self._director = director
        self._prefill = prefill
        self._routed_after = routed_after
        self._learnings = learnings
        prompt = decision.request.prompt
        self._model = prompt.model
        self._text_bytes = 0 if goes_on_from_memory(prompt) else sum(map(len, prompt.texts))
        self._picked_at = decision.request.now
        self._body_due = False
        """Whether the endpoint answered well, but with headers only, which engines send before they compute."""
        self._queued_before = director.table.queued_tokens.item(slot)
        self._work = decision.tokens if prefill is None else 0.0
        super().__init__(director.table, slot, self._work, self._picked_at)
        self._number = 0 if director.sharing is None else director.sharing.picked(decision)
        for learning in learnings:
            if (watch := getattr(learning, "watch", None)) is not None:
                watch(self)

    def answered(self, status: int | None, now: float, *, body_follows: bool = False) -> None:
        """Response headers came from the endpoint, or Envoy's own in its place.

        With `body_follows`, `prefilled` will tell of the first piece of the body.
        """
        if not self._alive:
            return
        health = self._table.health
        if status is not None and status >= _FAILURES:
            health.failed(self._slot)
            if status in _FROM_ENVOY:
                return  # perhaps in place of an endpoint that is silent
        elif body_follows:
            self._body_due = True
            return
        else:
            health.answered(self._slot, now - self._picked_at)
        self._sign(now)

    def _body_came(self, now: float) -> None:
        """The answer to the headers that came before."""
        self._body_due = False
        if self._alive:
            self._table.health.answered(self._slot, now - self._picked_at)
            self._sign(now)

    def prefilled(self, now: float, signal: PrefillSignal) -> None:
        """The prompt is computed. The first signal counts, further ones do nothing."""
        if self._body_due and signal is _RESPONSE_BODY:
            self._body_came(now)
        if self._prefill is not None:
            self._prefill.prefilled(now, signal)
            if signal is not _END:
                self._end_prefill(success=True, now=now)
            return
        if not self._work:
            return
        director = self._director
        director.prefill_signals[signal] += 1
        if signal is not _END:
            if self._number and director.sharing is not None:
                director.sharing.prefilled(self._number)
            if self._alive:
                self._observe_rate(now)
                self._sign(now)
        self._computed()
        self._work = 0.0

    def _observe_rate(self, now: float) -> None:
        """Learn how fast the endpoint computes prompts, from what it had to compute up to now."""
        work, seconds = self._queued_before + self._work, now - self._picked_at
        if work >= _TELLING_TOKENS and seconds >= _TELLING_SECONDS:
            self._table.timed(self._slot, work, seconds, now)

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
        if self._body_due and finish.success:
            self._body_came(now)
        self.prefilled(now, _END)
        self._end_prefill(success=finish.success, now=now)
        alive = self._alive
        self._leave(now, well=finish.success)
        served = (
            director.served_by(finish, self._slot if alive else None, self._routed_after) if finish.success else None
        )
        told: Sequence[tuple[str, bytes]] = ()
        try:
            if finish.success:
                told = self._learn(served, usage)
            else:
                for learning in self._learnings:
                    learning.undo()
        finally:
            if self._number and director.sharing is not None:
                address = None if served is None else self._table.endpoints[served].address
                director.sharing.ended(self._number, address, told)

    def _learn(self, served: int | None, usage: Usage | None) -> Sequence[tuple[str, bytes]]:
        """Keep what was learnt; returns what other pickers are to know of it."""
        director = self._director
        if usage is not None and usage.prompt_tokens:
            director.token_ratio.learn(self._model, self._text_bytes, usage.prompt_tokens)
        for learning in self._learnings:
            learning.confirm(served, usage)
        if not self._number or director.sharing is None or served is None:
            return ()
        ends = (tell() for learning in self._learnings if (tell := getattr(learning, "told", None)) is not None)
        return [told for told in ends if told is not None]
