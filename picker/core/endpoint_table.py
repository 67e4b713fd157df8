"""What is known of the load of all endpoints.

Endpoints are interned to small integers, *slots*, so that a set of endpoints is an `int` bitmask and the load of
all endpoints is a handful of arrays. A slot is free again once its endpoint is gone; `generation` tells whether a
slot still means the endpoint it meant before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan

import numpy as np

from picker.core.arrays import Flags, Floats, Integers, Slots
from picker.core.endpoint_health import EndpointHealth
from picker.core.endpoints import NOBODY, Adapters, Endpoint, EngineMetrics

_RUNS_AT_LEAST = 8.0
"""Requests that any engine runs at once."""

_SENSELESS = 1e12
"""No load of an engine is this large; arithmetic with smaller values stays finite."""

_RATE_TOKENS = 20_000.0
"""A prefill of so many tokens weighs as much as all before it."""
_RATE_SECONDS = 60.0
_FORGET_EVERY_SECONDS = 5.0

_UNKNOWN_AT_FIRST = (
    "waiting",
    "running",
    "most_running",
    "kv_usage",
    "ttft",
    "tpot",
    "observed_at",
    "prefill_rate",
    "timed_at",
    "cache_tokens",
)


class EndpointTable:
    """All endpoints with their load, as arrays indexed by slot.

    Load arrays hold NaN for what is unknown: never scraped, or not for `stale_seconds`. `in_flight` and `queued_tokens`
    are our own counts, and always known: requests that have not ended, and the uncached prompt tokens of those whose
    prefill is not over. `unanswered` are the requests on which an endpoint has shown no work yet. `prefill_rate`, in
    tokens per second, is what we observed of it lately (`timed_at`), and NaN until we did. `cache_tokens` is the size of an engine's KV cache.
    """

    def __init__(self, *, stale_seconds: float = 2.0) -> None:
        self.stale_seconds = stale_seconds
        self.endpoints: list[Endpoint] = []
        """By slot; a free slot holds `NOBODY`."""
        self.generation: list[int] = []
        self.models: list[frozenset[str] | None] = []
        self.bases: list[tuple[str, ...] | None] = []
        self.adapters: list[Adapters | None] = []
        self.started_at: list[float | None] = []
        self.in_flight: Integers = np.zeros(0, np.int64)
        self.unanswered: Integers = np.zeros(0, np.int64)
        self.queued_tokens: Floats = np.zeros(0)
        self.prefill_rate: Floats = np.zeros(0)
        self.timed_at: Floats = np.zeros(0)
        self._forget_at = -np.inf
        self.cache_tokens: Floats = np.zeros(0)
        self.waiting: Floats = np.zeros(0)
        self.running: Floats = np.zeros(0)
        self.kv_usage: Floats = np.zeros(0)
        self.ttft: Floats = np.zeros(0)
        self.tpot: Floats = np.zeros(0)
        self.observed_at: Floats = np.zeros(0)
        self.in_flight_seen: Integers = np.zeros(0, np.int64)
        """`in_flight` at the time of the last scrape."""
        self.most_running: Floats = np.zeros(0)
        """The largest `running` of any scrape, NaN before the first that said it."""
        self.health = EndpointHealth()
        self._most_waiting: float | None = None
        self.slots: Slots = np.zeros(0, np.intp)
        self.mask = 0
        self.version = 0
        """Counts the times that `replace` was called."""
        self.all: tuple[Endpoint, ...] = ()
        """The endpoints of `slots`."""
        self._by_identity: dict[tuple[str, str, str], int] = {}
        self._by_address: dict[str, int] = {}
        self._by_place: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def most_waiting(self) -> float:
        """No `waiting` is larger. Cheap, since it changes only when something is observed."""
        if self._most_waiting is None:
            known = self.waiting[self.waiting >= 0]
            self._most_waiting = float(known.max(initial=0.0))
        return self._most_waiting

    def waiting_now(self, slots: Slots) -> Floats:
        """How many requests each of these engines queues, NaN where that is unknown.

        It is what the last scrape said, corrected by what we sent and what ended since: an engine that had a queue queues
        what comes, and one that had none runs as many as it was ever seen to run.
        """
        waiting = self.waiting.take(slots)
        since = self.in_flight.take(slots) - self.in_flight_seen.take(slots)
        if not np.count_nonzero(since):
            return waiting
        room = np.fmax(self.most_running.take(slots), _RUNS_AT_LEAST) - self.running.take(slots)
        room[waiting > 0] = 0.0
        # An engine that does not say what it runs, nor queues, is taken to run what comes.
        room[np.isnan(room)] = np.inf
        corrected: Floats = np.maximum(waiting + since - np.maximum(room, 0.0), 0.0)
        return corrected

    def suspects(self, slots: Slots, now: float) -> Flags | None:
        """Which of these endpoints should get no work, by what became of our requests; None when none is."""
        return self.health.suspects(slots, now, self.queued_tokens, self.prefill_rate)

    def slot_of(self, address: str) -> int | None:
        """The slot of the endpoint with this address, if there is one."""
        return self._by_address.get(address)

    def slots_at(self, place: str) -> Sequence[int]:
        """The slots of an address, or of all addresses of a host; IPv6 hosts with or without brackets."""
        return self._by_place.get(place, ())

    def replace(self, endpoints: Iterable[Endpoint]) -> tuple[list[int], list[int]]:
        """Make these the endpoints; returns the slots of new ones and the slots that are free now.

        An endpoint that stays keeps its slot and its counts. Of several endpoints with one address the first
        counts, since requests could not tell them apart.
        """
        wanted: dict[tuple[str, str, str], Endpoint] = {}
        addresses: set[str] = set()
        for endpoint in endpoints:
            if endpoint.address not in addresses:
                addresses.add(endpoint.address)
                wanted[endpoint.identity] = endpoint
        removed = [slot for identity, slot in self._by_identity.items() if identity not in wanted]
        for slot in removed:
            self._remove(slot)
        added: list[int] = []
        for identity, endpoint in wanted.items():
            if identity not in self._by_identity:
                added.append(self._add(endpoint))
            self.endpoints[self._by_identity[identity]] = endpoint
        self._by_place = {}
        for slot in self._by_identity.values():
            address = self.endpoints[slot].address
            host = address.rpartition(":")[0]
            for place in {address, host, host.strip("[]")}:
                self._by_place.setdefault(place, []).append(slot)
        self.slots = np.array(sorted(self._by_identity.values()), np.intp)
        self.mask = sum(1 << int(slot) for slot in self.slots)
        self.version += 1
        self.all = tuple(self.endpoints[slot] for slot in self.slots)
        return added, removed

    def observe(self, slot: int, metrics: EngineMetrics, now: float) -> None:
        """Take over what a scrape said. Negative, endless and NaN are unknown; a cache more than full is full."""
        for array, value, most in (
            (self.waiting, metrics.waiting, _SENSELESS),
            (self.running, metrics.running, _SENSELESS),
            (self.kv_usage, metrics.kv_usage, 1.0),
            (self.ttft, metrics.ttft, _SENSELESS),
            (self.tpot, metrics.tpot, _SENSELESS),
        ):
            array[slot] = min(value, most) if value is not None and 0 <= value < np.inf else np.nan
        self._most_waiting = None
        if metrics.models is not None:
            self.models[slot] = metrics.models
            self.bases[slot] = metrics.bases
        self.started_at[slot] = metrics.started_at
        self.adapters[slot] = metrics.adapters
        if metrics.cache_tokens:
            self.cache_tokens[slot] = min(metrics.cache_tokens, _SENSELESS)
        self.observed_at[slot] = now
        self.in_flight_seen[slot] = self.in_flight[slot]
        self.most_running[slot] = np.fmax(self.most_running[slot], self.running[slot])

    def expire(self, now: float) -> int:
        """Turn load that is older than `stale_seconds` into unknown; returns how many endpoints that left so."""
        stale = self.slots[now - self.observed_at[self.slots] > self.stale_seconds]
        for array in (self.waiting, self.running, self.kv_usage, self.ttft, self.tpot):
            array[stale] = np.nan
        for slot in stale.tolist():
            self.adapters[slot] = None
        return len(stale)

    def timed(self, slot: int, tokens: float, seconds: float, now: float) -> None:
        """An endpoint computed so many tokens of prompts in so long: its rate is a mean that moves with the tokens.

        A rate that nothing was heard of for a minute is forgotten: who was slow once is tried again.
        """
        rate = tokens / seconds
        known = self.prefill_rate.item(slot)
        self.prefill_rate[slot] = rate if isnan(known) else known + (rate - known) * tokens / (tokens + _RATE_TOKENS)
        self.timed_at[slot] = now
        if now >= self._forget_at:
            self._forget_at = now + _FORGET_EVERY_SECONDS
            self.prefill_rate[self.timed_at < now - _RATE_SECONDS] = np.nan

    def _add(self, endpoint: Endpoint) -> int:
        slot = next((slot for slot, taken in enumerate(self.endpoints) if taken is NOBODY), len(self.endpoints))
        if slot == len(self.endpoints):
            self.endpoints.append(NOBODY)
            self.generation.append(0)
            self.models.append(None)
            self.bases.append(None)
            self.adapters.append(None)
            self.started_at.append(None)
            self._grow(slot + 1)
        self.endpoints[slot] = endpoint
        self._by_identity[endpoint.identity] = slot
        self._by_address[endpoint.address] = slot
        self._clear(slot)
        return slot

    def _remove(self, slot: int) -> None:
        endpoint = self.endpoints[slot]
        del self._by_identity[endpoint.identity]
        self._by_address.pop(endpoint.address, None)
        self.endpoints[slot] = NOBODY
        self.generation[slot] += 1

    def _clear(self, slot: int) -> None:
        self.models[slot] = self.bases[slot] = self.started_at[slot] = self.adapters[slot] = None
        self.in_flight[slot] = self.in_flight_seen[slot] = self.unanswered[slot] = 0
        self.queued_tokens[slot] = 0.0
        self.health.clear(slot)
        self.prefill_rate[slot] = self.timed_at[slot] = self.cache_tokens[slot] = self.most_running[slot] = np.nan
        self.observed_at[slot] = -np.inf
        for array in (self.waiting, self.running, self.kv_usage, self.ttft, self.tpot):
            array[slot] = np.nan

    def _grow(self, size: int) -> None:
        if size <= len(self.in_flight):
            return
        more = max(8, len(self.in_flight))
        self.in_flight = np.concatenate((self.in_flight, np.zeros(more, np.int64)))
        self.unanswered = np.concatenate((self.unanswered, np.zeros(more, np.int64)))
        self.in_flight_seen = np.concatenate((self.in_flight_seen, np.zeros(more, np.int64)))
        self.queued_tokens = np.concatenate((self.queued_tokens, np.zeros(more)))
        self.health.grow(len(self.in_flight))
        for name in _UNKNOWN_AT_FIRST:
            setattr(self, name, np.concatenate((getattr(self, name), np.full(more, np.nan))))
