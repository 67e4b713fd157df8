"""Sessions of requests: found before the decision, bound by it, and learnt from like every other request.

A pin does not skip the scores: producers match and learn from pinned requests, so that once a binding is over the next
turn goes to the endpoint that holds the turns before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Final, Protocol

from msgspec import Struct

from picker.core.endpoint_table import EndpointTable
from picker.core.scheduling.api import Preparation, Request
from picker.core.scheduling.decision import Decision, First
from picker.core.sticky.bindings import Binding
from picker.core.sticky.source import Source, session_key
from picker.core.usage import Usage

SHARED: Final = "sticky"
"""The name in `Request.prepared` of the `Binding` that pickers share."""


class StickySettings(Struct, frozen=True):
    """Where sessions are found. `model_server` is "namespace/name" of what their bindings belong to, "" for the model."""

    sources: tuple[Source, ...]
    model_server: str = ""


class Store(Protocol):
    """Keeps bindings. Nothing waits for it."""

    def find(self, session: str, now: float) -> Binding | None:
        """The endpoint that a session is bound to, as far as is known here."""

    def bind(self, session: str, binding: Binding, instead_of: Binding | None, now: float) -> None:
        """Bind a session that is unbound, bound there already, or bound to `instead_of`, which cannot be picked."""

    def release(self, session: str, binding: Binding) -> None:
        """End a binding, unless the session is bound elsewhere by now."""


class Outcome(StrEnum):
    """What became of a routed request's session; the label of a counter."""

    NONE = "none"
    """No source has anything."""
    BOUND = "bound"
    PINNED = "pinned"
    MOVED = "moved"
    """Its endpoint is gone or did not pass the filters, so that it is bound anew."""


class StickySessions:
    """Sticky sessions of one picker. `now` gives monotonic seconds."""

    def __init__(self, settings: StickySettings, store: Store, now: Callable[[], float]) -> None:
        self.settings = settings
        self.store = store
        self.lookup: Preparation | None = None
        """Set when bindings are shared with other pickers: asks for a request's, as `Request.prepared[SHARED]`."""
        self.outcomes: Counter[str] = Counter(dict.fromkeys(Outcome, 0))
        self._now = now

    def session(self, headers: Mapping[str, bytes], model: str) -> str:
        """Return the key under which a request's session is bound, "" when it has none. What it holds is hashed.

        The key is Kthena's: `kthena/sticky/` and the SHA-256 of `namespace/name|session`.
        """
        found = session_key(self.settings.sources, headers)
        if not found:
            return ""
        owner = self.settings.model_server or f"default/{model}"
        return "kthena/sticky/" + sha256(owner.encode() + b"|" + found).hexdigest()

    def pinned(self, request: Request, table: EndpointTable) -> int | None:
        """Return the slot that a request's session is bound to, if that endpoint is still there."""
        binding = self._binding(request)
        return None if binding is None else _slot_of(binding, table)

    def bind(self, decision: Decision, table: EndpointTable) -> Pin | None:
        """Bind the session of a request that is routed now; None when it has none."""
        request = decision.request
        if not request.session:
            self.outcomes[Outcome.NONE] += 1
            return None
        before = self._binding(request)
        binding = _binding_of(table, decision.slot)
        if decision.first is First.PINNED:
            outcome = Outcome.PINNED
        else:
            outcome = Outcome.BOUND if before is None else Outcome.MOVED
        self.outcomes[outcome] += 1
        self.store.bind(request.session, binding, before, self._now())
        return Pin(self, table, request.session, binding, made=outcome is not Outcome.PINNED)

    def follow(self, session: str, binding: Binding, served: Binding) -> None:
        """Another endpoint than the one that was picked served: bind the session to it, unless it moved meanwhile."""
        now = self._now()
        found = self.store.find(session, now)
        if found is None or found.same(binding):
            self.store.bind(session, served, binding, now)

    def _binding(self, request: Request) -> Binding | None:
        shared: Binding | None = request.prepared.get(SHARED)
        return self.store.find(request.session, self._now()) if shared is None else shared


class Pin:
    """The binding of a request on its way, a `Learning`. A request that fails takes back what it `made`."""

    __slots__ = ("_binding", "_made", "_session", "_sessions", "_table")

    def __init__(
        self, sessions: StickySessions, table: EndpointTable, session: str, binding: Binding, *, made: bool
    ) -> None:
        self._sessions = sessions
        self._table = table
        self._session = session
        self._binding = binding
        self._made = made

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:  # noqa: ARG002  of the protocol
        """See `Learning`."""
        if slot is None:
            return
        served = _binding_of(self._table, slot)
        if served != self._binding:
            self._sessions.follow(self._session, self._binding, served)

    def undo(self) -> None:
        """See `Learning`."""
        if self._made:
            self._sessions.store.release(self._session, self._binding)


def _binding_of(table: EndpointTable, slot: int) -> Binding:
    endpoint = table.endpoints[slot]
    return Binding(endpoint.name, endpoint.address)


def _slot_of(binding: Binding, table: EndpointTable) -> int | None:
    """The slot at its address, else one of the same name: the pod came back, or another router bound it by name."""
    slot = table.slot_of(binding.address) if binding.address else None
    if slot is not None and table.endpoints[slot].name == binding.pod:
        return slot
    return _named(binding.pod, table.slots.tolist(), table)


def _named(pod: str, slots: Sequence[int], table: EndpointTable) -> int | None:
    return next((slot for slot in slots if table.endpoints[slot].name == pod), None)
