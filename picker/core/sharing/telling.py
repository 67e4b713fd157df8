"""One picker's own requests, as it tells others of them: in batches that carry numbers, so that a missing one shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from picker.core.scheduling.decision import Decision
from picker.core.sharing.messages import Batch, Ended, Event, OnItsWay, Picked, Prefilled, encode

ALIVE_SECONDS = 0.25
"""A picker with nothing to tell says so this often."""
MOST_EVENTS = 50_000
"""Events that wait to be told; more are dropped, and others notice the gap."""
MOST_NEWS = 64
MOST_NEWS_BYTES = 4 * 1024 * 1024
"""Of bodies, which picks hold until events are made of them."""
EVENTS_PER_BATCH = 2_000
MOST_TOLD = 4 * 1024 * 1024
"""Bytes in one message of what producers say of picks, so that it stays within what is read."""


class Telling:
    """Told by the director what becomes of requests, and makes messages of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped = 0
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to tell, so that nobody need ask for it all the time."""
        self._news: list[tuple[int, Decision] | Prefilled | Ended] = []
        """What the director told, picks with their numbers, before events are made of it."""
        self._news_bytes = 0
        self._events: list[Event] = []
        self._open: dict[int, Picked] = {}
        """Our own requests on their way."""
        self._number = 0
        self._sequence = 0
        self._told_at = -ALIVE_SECONDS

    def picked(self, decision: Decision) -> int:
        """Tell of a pick; returns its number."""
        self._number += 1
        self._news_bytes += decision.request.body_bytes
        self._note((self._number, decision))
        return self._number

    def prefilled(self, number: int) -> None:
        """Tell that a prompt is computed."""
        self._note(Prefilled(number))

    def ended(self, number: int, served: str | None, told: Sequence[tuple[str, bytes]] = ()) -> None:
        """Tell that a request is over, and what producers learnt at its end."""
        self._note(Ended(number, served or "", tuple(told)))

    def _note(self, news: tuple[int, Decision] | Prefilled | Ended) -> None:
        if not (self._news or self._events):
            self.wake()
        self._news.append(news)
        if len(self._news) >= MOST_NEWS or self._news_bytes > MOST_NEWS_BYTES:
            self._take_news()

    def _take_news(self) -> None:
        """Make events of what was told: many at a time, which takes half as long as one by one between other work."""
        told, self._news, self._news_bytes = self._news, [], 0
        if len(self._events) + len(told) > MOST_EVENTS:
            # A number is left out, so that the others notice.
            self.dropped += len(self._events)
            self._events.clear()
            self._sequence += 1
        for news in told:
            if isinstance(news, tuple):
                pick = self._open[news[0]] = _pick(*news)
                self._events.append(pick)
                continue
            self._events.append(news)
            if isinstance(news, Ended):
                self._open.pop(news.number, None)
            elif (known := self._open.get(news.number)) is not None and known.tokens:
                self._open[news.number] = Picked(known.number, known.address, 0.0, known.shared)

    def _batches(self, now: float) -> list[bytes]:
        """Messages with all that happened since the last ones."""
        self._take_news()
        batches: list[bytes] = []
        while self._events:
            batches.append(self._batch(self._next_events(), now))
        return batches

    def _next_events(self) -> tuple[Event, ...]:
        """Take as many of the events that wait as one batch may have."""
        room, count = MOST_TOLD, 0
        for event in self._events[:EVENTS_PER_BATCH]:
            room -= _told(event)
            if room < 0 and count:
                break
            count += 1
        events, self._events = self._events[:count], self._events[count:]
        return tuple(events)

    def _on_its_way(self) -> bytes:
        """The message with our requests on their way, as of the last batch. Prompts of the last ones only, where those of all are too long for one message."""
        room = MOST_TOLD
        picks = []
        for pick in reversed(self._open.values()):
            room -= _told(pick)
            picks.append(pick if room >= 0 else Picked(pick.number, pick.address, pick.tokens))
        return encode(OnItsWay(self.name, self._sequence, tuple(reversed(picks))))

    def _batch(self, events: tuple[Event, ...], now: float) -> bytes:
        self._sequence += 1
        self._told_at = now
        return encode(Batch(self.name, self._sequence, events))


def _pick(number: int, decision: Decision) -> Picked:
    slot = decision.slot
    shared = tuple((name, told) for name, match in decision.matches.items() if (told := match.shared(slot)))
    return Picked(number, decision.endpoints[decision.order[0]].address, decision.tokens, shared)


def _told(event: Event) -> int:
    """Bytes of what producers say of it."""
    if type(event) is Picked:
        return sum(len(told) for _, told in event.shared)
    if type(event) is Ended and event.told:
        return sum(len(told) for _, told in event.told)
    return 0
