"""What `kvcache-aware` learns of a pick: how far its prefill is, and whether what was predicted is what was cached."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from msgspec import Struct

from picker.core.block_index.holds import Hold
from picker.core.block_index.index import BlockIndex
from picker.core.block_index.watches import Watch
from picker.core.tickets import PrefillSignal
from picker.core.usage import Usage

BOUNDS = (-4096, -512, -64, -1, 0, 64, 512, 4096)
"""Upper bounds of the histogram of errors, in tokens: what is exact has a bucket of its own."""


class Expected(NamedTuple):
    """What an engine should report as cached; `complete` is False where it may hold more than is known."""

    tokens: int
    complete: bool


class Streak(Struct):
    """Requests in a row of which an endpoint reported something else, and the sum of predicted minus reported tokens."""

    requests: int = 0
    error: int = 0


class Agreement:
    """Predicted against reported cached tokens.

    `outcomes` counts requests whose engine reported them: `exact`, `over` and `under` (predicted was more, or less),
    `incomplete` (less, as expected of an endpoint that may hold more than is known) and `not_comparable` (other requests
    were on their way with the same blocks, the prompt was longer than what is looked up, or another endpoint served).
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(("exact", "over", "under", "incomplete"), 0))
        self.errors = [0] * (len(BOUNDS) + 1)
        """Compared requests by error, predicted minus reported, in the buckets that `BOUNDS` make."""
        self.streaks: dict[int, Streak] = {}
        """By slot."""

    def compare(self, slot: int, expected: Expected | None, reported: int) -> None:
        """Take in what an engine reported."""
        if expected is None:
            self.outcomes["not_comparable"] += 1
            return
        error = expected.tokens - reported
        self.errors[bisect_left(BOUNDS, error)] += 1
        if error < 0 and not expected.complete:
            self.outcomes["incomplete"] += 1
        elif error:
            self.outcomes["over" if error > 0 else "under"] += 1
            streak = self.streaks.setdefault(slot, Streak())
            streak.requests += 1
            streak.error += error
        else:
            self.outcomes["exact"] += 1
            self.streaks.pop(slot, None)

    def forget(self, slot: int) -> None:
        """The slot's endpoint is gone."""
        self.streaks.pop(slot, None)


class Prefilling(Protocol):
    """A request whose prompt an engine computes: the director's `Ticket`."""

    def progress(self, tokens: float, now: float) -> None:
        """So many more tokens are computed."""

    def prefilled(self, now: float, signal: PrefillSignal) -> None:
        """All of them are."""


class KvCacheLearning:
    """Blocks that are visible for the picked endpoint while the request is on its way. Events say what remains."""

    __slots__ = ("_agreement", "_expected", "_holds", "_index", "_left", "_slot", "_watches")

    def __init__(
        self, index: BlockIndex, agreement: Agreement, slot: int, holds: Sequence[Hold], expected: Expected | None
    ) -> None:
        self._index = index
        self._agreement = agreement
        self._slot = slot
        self._holds = holds
        self._expected = expected
        self._watches: list[Watch] = []
        self._left = 0

    def watch(self, ticket: Prefilling) -> None:
        """Tell the ticket whenever events say that blocks of the prompt are stored, and when its last whole one is."""
        for hold in self._holds:
            watch = self._index.watches.add(self._slot, hold.missing, partial(self._stored, ticket, hold.block_size))
            if watch is not None:
                self._watches.append(watch)
        self._left = len(self._watches)

    def _stored(self, ticket: Prefilling, block_size: int, blocks: int, last: bool, now: float) -> None:
        self._left -= last
        if self._left:
            ticket.progress(blocks * block_size, now)
        else:
            ticket.prefilled(now, PrefillSignal.KV_EVENTS)

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:
        """Compare what was predicted with what the engine reported, if it did."""
        if usage is not None and usage.cached_tokens is not None and slot is not None:
            self._agreement.compare(slot, self._expected if slot == self._slot else None, usage.cached_tokens)
        self.undo()

    def undo(self) -> None:
        for watch in self._watches:
            self._index.watches.remove(watch)
        for hold in self._holds:
            self._index.release(hold)
