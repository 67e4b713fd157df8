"""What a scrape reads of conversations: how many are known of endpoints, what was forgotten, what could not be read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from picker.core.director import Director
from picker.core.plugins.session_prefix_cache import SessionPrefixCacheProducer, Unread
from picker.core.sessions.index import Evicted
from picker.io.metric_families import Family, Reading, Readings


class Owner(Protocol):
    """Who knows the director."""

    @property
    def director(self) -> Director | None: ...


def session_readings(sources: Owner) -> list[Family]:
    """Return the metrics of `session-prefix-cache-producer`; they have no series while it is not in force."""
    gauge, counter = partial(Reading, "gauge"), partial(Reading, "counter")

    def producers() -> list[SessionPrefixCacheProducer]:
        known = () if sources.director is None else sources.director.scheduler.producers
        return [producer for producer in known if isinstance(producer, SessionPrefixCacheProducer)]

    def one(value: Callable[[SessionPrefixCacheProducer], float]) -> Callable[[], Readings]:
        return lambda: [((), value(producer)) for producer in producers()]

    def evicted() -> Readings:
        return [((str(why),), producer.evicted[why]) for producer in producers() for why in Evicted]

    def unread() -> Readings:
        return [((str(why),), producer.unread[why]) for producer in producers() for why in Unread]

    return [
        gauge(
            "sessions_kept",
            "",
            "Conversations known of endpoints; one that two endpoints hold counts twice. Should grow after traffic starts.",
            one(lambda producer: producer.index.kept),
        ),
        gauge(
            "sessions_held",
            "",
            "The same of requests on their way. Returns to 0 without traffic.",
            one(lambda producer: producer.index.held),
        ),
        gauge(
            "session_positions",
            "",
            "Pieces of content that are kept for all endpoints together; `maxPositions` is the most.",
            one(lambda producer: producer.index.positions),
        ),
        counter(
            "sessions_evicted_total",
            "reason",
            "Conversations of an endpoint that were forgotten. `capacity` and `usage`: engines' caches are smaller than the "
            "sessions that are alive. `positions`: the picker's own limit, `maxPositions`.",
            evicted,
        ),
        counter(
            "sessions_unread_total",
            "reason",
            "Requests whose content was not used, or not all of it. `unreadable` and `by_declared_id`: bodies are not sent "
            "to the picker, too long, or compressed. `malformed_from_peer`: something else writes to the channel of `sharing`.",
            unread,
        ),
        gauge(
            "session_names",
            "",
            "Declared ids and responses whose content is known.",
            one(lambda producer: len(producer.names)),
        ),
        counter(
            "session_names_evicted_total",
            "",
            "Those that were forgotten to make room: requests that name them are not matched by them.",
            one(lambda producer: producer.names.evictions),
        ),
        gauge(
            "session_reader_memory_bytes",
            "",
            "What is remembered of contents, so that a conversation that grew costs what is new in it.",
            one(lambda producer: producer.reader.memory.bytes),
        ),
        counter(
            "session_reader_evictions_total",
            "",
            "Contents that were dropped from that memory, which is bounded, and are read anew when they come again.",
            one(lambda producer: producer.reader.memory.evictions),
        ),
    ]
