"""Misbehaviour on demand, for testing what stands in front of an engine."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

import msgspec

Mode = Literal["none", "error", "slow", "abort", "hang"]
MODES: tuple[Mode, ...] = ("none", "error", "slow", "abort", "hang")


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong.

    `error` answers with a status and computes nothing. `slow` makes every step of the engine longer. `abort` breaks the
    connection, `hang` stops answering; a streamed answer does so after some chunks, any other before its headers.
    """

    mode: Mode = "none"
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    """error: the HTTP status."""
    factor: Annotated[float, msgspec.Meta(gt=0)] = 4.0
    """slow: how many times longer a step takes."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """error, abort, hang: the share of requests that are hit, spread evenly."""
    after_chunks: Annotated[int, msgspec.Meta(ge=0)] = 0
    """abort, hang: chunks of a streamed answer that are still sent."""


HEALTHY = Fault()


class Faults:
    """The fault in force, and how many requests each kind has hit."""

    def __init__(self, fault: Fault = HEALTHY) -> None:
        self.counts: Counter[Mode] = Counter(dict.fromkeys(MODES, 0))
        self.set(fault)

    def set(self, fault: Fault) -> None:
        """Put another fault in force."""
        self.fault = fault
        self._owed = 0.0

    @property
    def slow(self) -> float:
        """By how much steps are longer now."""
        return self.fault.factor if self.fault.mode == "slow" else 1.0

    def next(self) -> Fault:
        """Return what happens to the next request, and count it."""
        fault = self.fault
        if fault.mode in ("error", "abort", "hang"):
            self._owed += fault.share
            if self._owed < 1 - 1e-9:
                fault = HEALTHY
            else:
                self._owed -= 1
        self.counts[fault.mode] += 1
        return fault
