"""What our own requests say of endpoints: which answer, which keep failing, and which have gone silent.

An endpoint is *suspect* while most of its recent requests failed, or when it owes answers and has shown no sign of life
for longer than any recent answer of the pool took. Suspects get no work but a probe now and then; a probe that is
answered brings them back. Nothing here depends on scraped metrics, so that none can lie or go stale.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

import numpy as np

from picker.core.arrays import Flags, Floats, Slots

LEAST_PATIENCE_SECONDS = 2.0
"""An endpoint that is silent for less is never suspect."""
_PATIENCE = 1.5
"""How many times the slowest recent answer of the pool a silence may last."""
_RECENT = 256
"""Answers of the pool that count as recent."""

_WEIGHT = 0.2
"""Of the latest request in the moving share of failures: four failures in a row make a healthy endpoint suspect."""
_SUSPECT_SHARE = 0.5
_TRUSTED_SHARE = 0.2

_FIRST_PROBE_SECONDS = 1.0
_LAST_PROBE_SECONDS = 15.0
_NEXT_PROBE_SECONDS = 0.1
"""After a probe that was answered: the share of failures has to fall before the endpoint is trusted."""

_GENEROUS = 4.0
"""Long contexts are computed several times as slowly as short ones."""
_UNKNOWN_RATE = 2_000.0
"""Tokens per second of an engine that was never timed."""

_LOOK_EVERY_SECONDS = 0.02
_NEVER = float("inf")


class Suspicion(StrEnum):
    """Why an endpoint became suspect, as a label of a counter."""

    FAILING = "failing"
    SILENT = "silent"


class SuspectWork(StrEnum):
    """Why a request was sent to a suspect, as a label of a counter."""

    PROBE = "probe"
    """It was the suspect's turn."""
    NO_OTHER = "no_other"
    """There was nobody else to send it to."""


class EndpointHealth:
    """By slot: moving share of failures, since when it is silent, and when it is probed next. Times in seconds."""

    def __init__(self) -> None:
        self.suspicions: Counter[Suspicion] = Counter()
        self.suspect_work: Counter[SuspectWork] = Counter()
        self._failures: Floats = np.zeros(0)
        self._failing: Flags = np.zeros(0, np.bool_)
        self._silent: Flags = np.zeros(0, np.bool_)
        self._silent_since: Floats = np.zeros(0)
        self._probe_at: Floats = np.zeros(0)
        self._probe_gap: Floats = np.zeros(0)
        self._answers: Floats = np.zeros(_RECENT)
        self._answered = 0
        self._slowest = 0.0
        self._suspects: Flags = np.zeros(0, np.bool_)
        self._any = False
        self._look_at = -np.inf

    def grow(self, size: int) -> None:
        """Make room for slots below `size`."""
        more = size - len(self._failures)
        self._failures = np.concatenate((self._failures, np.zeros(more)))
        self._failing = np.concatenate((self._failing, np.zeros(more, np.bool_)))
        self._silent = np.concatenate((self._silent, np.zeros(more, np.bool_)))
        self._suspects = np.concatenate((self._suspects, np.zeros(more, np.bool_)))
        self._silent_since = np.concatenate((self._silent_since, np.full(more, np.inf)))
        self._probe_at = np.concatenate((self._probe_at, np.full(more, -np.inf)))
        self._probe_gap = np.concatenate((self._probe_gap, np.full(more, _FIRST_PROBE_SECONDS)))

    def clear(self, slot: int) -> None:
        """Another endpoint has the slot."""
        self._failures[slot] = 0.0
        self._failing[slot] = self._silent[slot] = self._suspects[slot] = False
        self._silent_since[slot] = np.inf
        self._probe_at[slot] = -np.inf
        self._probe_gap[slot] = _FIRST_PROBE_SECONDS

    @property
    def patience(self) -> float:
        """Seconds of silence after which an endpoint that owes answers is suspect."""
        return max(LEAST_PATIENCE_SECONDS, _PATIENCE * self._slowest)

    def sent(self, slot: int, now: float) -> None:
        """A request goes there. To a suspect whose turn it is, it is a probe, and the next one waits."""
        if self._silent_since.item(slot) == _NEVER:
            self._silent_since[slot] = now
        if self._any and self._suspects[slot]:
            if self._probe_at[slot] > now:
                self.suspect_work[SuspectWork.NO_OTHER] += 1
                return
            self.suspect_work[SuspectWork.PROBE] += 1
            self._probe_at[slot] = now + self._probe_gap[slot]
            self._probe_gap[slot] = min(self._probe_gap[slot] * 2, _LAST_PROBE_SECONDS)

    def alive(self, slot: int, now: float, owing: int) -> None:
        """It answered something, or worked on it; it still owes answers to `owing` requests."""
        self._silent_since[slot] = now if owing else _NEVER
        if self._silent.item(slot):
            self._probe_gap[slot] = _FIRST_PROBE_SECONDS

    def answered(self, slot: int, seconds: float) -> None:
        """A request was answered well, so long after it was sent."""
        self._answers[self._answered % _RECENT] = seconds
        self._answered += 1
        if seconds > self._slowest or not self._answered % 32:
            self._slowest = float(self._answers.max())
        share = self._failures.item(slot)
        if share:
            self._failures[slot] = share = share * (1 - _WEIGHT)
            if self._failing[slot]:
                self._probe_at[slot] = -np.inf
                self._probe_gap[slot] = _NEXT_PROBE_SECONDS
                if share < _TRUSTED_SHARE:
                    self._failing[slot] = False
                    self._probe_gap[slot] = _FIRST_PROBE_SECONDS

    def failed(self, slot: int) -> None:
        """A request failed because of the endpoint: it answered 5xx, or could not be reached."""
        share = self._failures[slot] * (1 - _WEIGHT) + _WEIGHT
        self._failures[slot] = share
        if share > _SUSPECT_SHARE:
            if not self._failing[slot]:
                self._look_at = -np.inf
                self.suspicions[Suspicion.FAILING] += 1
            self._failing[slot] = True

    def suspects(
        self, slots: Slots, now: float, queued: Floats | None = None, rates: Floats | None = None
    ) -> Flags | None:
        """Which of these are suspect; None when none is.

        `queued` are the tokens that each slot has to compute, `rates` what it was seen to compute in a second: an
        endpoint may be silent for as long as that takes.
        """
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_SECONDS
            silent = now - self._silent_since > self.patience
            if silent.any():
                if queued is not None and rates is not None:
                    silent &= now - self._silent_since > self.patience + _work_seconds(queued, rates)
                # When most of the pool is late it is not the endpoints: the clock, the work or the network is.
                if len(slots) > 2 and np.count_nonzero(silent[slots]) * 2 > len(slots):
                    silent[:] = False
            self.suspicions[Suspicion.SILENT] += int(np.count_nonzero(silent & ~self._silent))
            self._silent = silent
            self._suspects = self._failing | silent
            self._any = bool(self._suspects.any())
        if not self._any:
            return None
        flags = self._suspects[slots]
        return flags if flags.any() else None

    def due(self, slots: Slots, now: float) -> int | None:
        """The one of these suspects that waits longest for a probe, if one is due."""
        slot = int(slots[self._probe_at[slots].argmin()])
        return slot if self._probe_at[slot] <= now else None


def _work_seconds(queued: Floats, rates: Floats) -> Floats:
    """How long computing so many tokens may take, at the pace of the pool; generously, for paces vary with context."""
    known = rates[rates > 0]
    rate = float(np.median(known)) if len(known) else _UNKNOWN_RATE
    return queued * (_GENEROUS / rate)
