"""Streams that only watch: a second ext_proc filter in observability mode shows response bodies without holding them up.

An observed response is joined with the request that was routed by their `x-request-id`, which Envoy's edge gives to each
request. Both streams end at about the same time, so a request that is over waits a moment for its observer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from picker.core.exchange.events import Event, RequestHeaders, ResponseBody, ResponseHeaders
from picker.core.exchange.response import informational
from picker.core.headers import REQUEST_ID
from picker.core.telemetry import Telemetry
from picker.core.usage import Usage
from picker.io.extproc.usage_tap import UsageTap

MOST_EXPECTED = 65_536
"""Requests that wait to be observed at one time; those beyond are learnt from without their usage."""
LINGER_SECONDS = 1.0
"""How long a request that is over waits for the end of what its observer reads."""


class Expected:
    """A routed request whose response may be observed.

    `path` is the request's, `keep_reply` whether the reply is wanted, `began` is told when the body begins.
    """

    __slots__ = ("_finish", "_over", "_timer", "_usage", "began", "keep_reply", "observed", "path")

    def __init__(self, path: str, began: Callable[[], None], *, keep_reply: bool) -> None:
        self.path = path
        self.began = began
        self.keep_reply = keep_reply
        self.observed = False
        self._over = False
        self._usage: Usage | None = None
        self._finish: Callable[[Usage | None], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def finish(self, finish: Callable[[Usage | None], None], late: Callable[[], None]) -> None:
        """The request is over: call `finish` with its usage, at once unless it is still being read."""
        if self._over or not self.observed:
            finish(self._usage)
            return
        self._finish = finish
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._give_up, late)

    def read(self, usage: Usage | None) -> None:
        """The observer has read the response to its end."""
        self._over = True
        self._usage = usage
        self._conclude()

    def _give_up(self, late: Callable[[], None]) -> None:
        late()
        self._conclude()

    def _conclude(self) -> None:
        finish, self._finish = self._finish, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if finish is not None:
            finish(self._usage)


class Observations:
    """The requests that may be observed, by their `x-request-id`, from their routing to their end.

    `outcomes` counts what became of them: as `UsageTap` does, and observed responses that belong to no routed request
    (`unmatched`), requests that were over too long before (`late`), that have no id (`no_request_id`), share it with
    another (`duplicate_id`) or were too many (`too_many`). No request is expected until a first observer was `seen`.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self.seen = False
        self.outcomes: Counter[str] = Counter()
        self._telemetry = telemetry
        self._expected: dict[str, Expected] = {}

    def expect(self, request_id: str, path: str, began: Callable[[], None], *, keep_reply: bool) -> Expected | None:
        """A request was routed; None when it cannot be told apart or remembered."""
        expected = self._expected
        if not request_id:
            self.outcomes["no_request_id"] += 1
            return None
        if request_id in expected:
            self.outcomes["duplicate_id"] += 1
            return None
        if len(expected) >= MOST_EXPECTED:
            self.outcomes["too_many"] += 1
            return None
        expected[request_id] = entry = Expected(path, began, keep_reply=keep_reply)
        return entry

    def over(self, request_id: str, entry: Expected, finish: Callable[[Usage | None], None]) -> None:
        """A request that was expected is over; `finish` is called with its usage, now or soon."""

        def forget(usage: Usage | None) -> None:
            del self._expected[request_id]
            finish(usage)

        entry.finish(forget, self._late)

    def tap(self, request_id: str, response: ResponseHeaders) -> tuple[Expected, UsageTap] | None:
        """An observer sees the response of this request."""
        entry = self._expected.get(request_id)
        if entry is None or entry.observed:
            self.outcomes["unmatched"] += 1
            return None
        entry.observed = True
        tap = UsageTap(response.headers, entry.path, self.outcomes, self._telemetry, keep_reply=entry.keep_reply)
        return entry, tap

    def _late(self) -> None:
        self.outcomes["late"] += 1


class ObserverStream:
    """One stream in observability mode: nothing is answered, the response's usage goes to its request."""

    __slots__ = ("_began", "_observations", "_request_id", "_tapped")

    def __init__(self, observations: Observations) -> None:
        observations.seen = True
        self._observations = observations
        self._request_id = ""
        self._tapped: tuple[Expected, UsageTap] | None = None
        self._began = False

    def receive(self, event: Event) -> None:
        """Take in one event."""
        kind = type(event)
        if kind is ResponseBody:
            if self._tapped is not None:
                self._read(*self._tapped, event)  # type: ignore[arg-type]
        elif kind is RequestHeaders:
            self._request_id = event.headers.get(REQUEST_ID, b"").decode("latin-1")  # type: ignore[union-attr]
        elif kind is ResponseHeaders and self._tapped is None and not informational(event.status):  # type: ignore[union-attr]
            self._tapped = self._observations.tap(self._request_id, event)  # type: ignore[arg-type]
            if event.end_of_stream:  # type: ignore[union-attr]
                self.end()

    def end(self) -> None:
        """The response, or the stream, is over."""
        tapped, self._tapped = self._tapped, None
        if tapped is not None:
            entry, tap = tapped
            entry.read(tap.result())

    def _read(self, entry: Expected, tap: UsageTap, event: ResponseBody) -> None:
        if event.data:
            if not self._began:
                self._began = True
                entry.began()
            tap.feed(event.data)
        if event.end_of_stream:
            self.end()
