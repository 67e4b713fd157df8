"""A circuit breaker: after failures in a row a target is left alone for a while, then tried by one request."""

from __future__ import annotations


class Breaker:
    """The state of one target. Times are seconds of any clock that only goes forward."""

    __slots__ = ("_failures", "_open_until", "_pause")

    FAILURES = 3
    """Failures in a row that open it."""
    FIRST_PAUSE = 1.0
    LONGEST_PAUSE = 30.0

    def __init__(self) -> None:
        self._failures = 0
        self._pause = self.FIRST_PAUSE
        self._open_until = 0.0

    def ready(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self._failures < self.FAILURES or now >= self._open_until

    def begin(self, now: float) -> None:
        """Note that a request is sent. After a pause it is a trial, and others wait for how it ends."""
        if self._failures >= self.FAILURES:
            self._open_until = now + self._pause

    def succeeded(self) -> None:
        self._failures = 0
        self._pause = self.FIRST_PAUSE

    def failed(self, now: float) -> bool:
        """Note a failure; returns whether it is the one that opened the breaker."""
        self._failures += 1
        if self._failures < self.FAILURES:
            return False
        if self._failures > self.FAILURES:
            self._pause = min(self._pause * 2, self.LONGEST_PAUSE)
        self._open_until = now + self._pause
        return self._failures == self.FAILURES

    def give_up(self, now: float, seconds: float) -> None:
        """Leave the target alone for `seconds`: it said that it will not answer."""
        self._failures = max(self._failures, self.FAILURES)
        self._open_until = now + seconds
