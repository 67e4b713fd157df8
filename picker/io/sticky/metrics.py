"""What a scrape reads of sticky sessions. Empty while none stick."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from picker.core.director import Director
from picker.core.sticky import Bindings, StickySessions
from picker.io.metric_families import Family, Reading, Readings, by_label
from picker.io.sticky.redis import RedisBindings


class Owner(Protocol):
    """Who knows the director."""

    director: Director | None


def sticky_readings(owner: Owner) -> list[Family]:
    """Return the metrics of sticky sessions."""
    gauge, counter = partial(Reading, "gauge"), partial(Reading, "counter")

    def sessions() -> StickySessions | None:
        return None if owner.director is None else owner.director.sticky

    def memory(what: Callable[[Bindings], int]) -> Callable[[], Readings]:
        def now() -> Readings:
            sticky = sessions()
            store = None if sticky is None else sticky.store
            bindings = store.memory if isinstance(store, RedisBindings) else store
            return [((), what(bindings))] if isinstance(bindings, Bindings) else ()

        return now

    def redis(what: Callable[[RedisBindings], Readings]) -> Callable[[], Readings]:
        def now() -> Readings:
            sticky = sessions()
            return what(sticky.store) if sticky is not None and isinstance(sticky.store, RedisBindings) else ()

        return now

    return [
        counter(
            "sticky_requests_total",
            "outcome",
            "Routed requests by what became of their session: `pinned` to its endpoint, newly `bound`, `moved` because its "
            "endpoint is gone or did not pass the filters, or `none` in the request.",
            lambda: [] if (sticky := sessions()) is None else by_label(sticky.outcomes),
        ),
        gauge("sticky_sessions", "", "Sessions that this picker knows to be bound, or lately were.", memory(len)),
        counter(
            "sticky_evictions_total",
            "",
            "Bindings dropped before their time. A steady increase means that maxSessions is too small.",
            memory(lambda bindings: bindings.evicted),
        ),
        counter(
            "sticky_redis_lookups_total",
            "outcome",
            "Sessions looked up in Redis. For anything but `ok` counted what this picker knew itself.",
            redis(lambda store: by_label(store.lookups)),
        ),
        counter(
            "sticky_redis_writes_total",
            "outcome",
            "Bindings told to Redis. Anything but `ok` other pickers do not know; `backlog`: too many were on their way.",
            redis(lambda store: by_label(store.writes)),
        ),
        counter(
            "sticky_redis_adopted_total",
            "",
            "Sessions that another picker was first to bind elsewhere.",
            redis(lambda store: [((), store.adopted)]),
        ),
        counter(
            "sticky_redis_connects_total",
            "",
            "Connections to Redis. Rising means that it fails again and again.",
            redis(lambda store: [((), store.client.connects)]),
        ),
        counter(
            "sticky_redis_failures_total",
            "reason",
            "How often Redis was found not to be available. The log says what to look at.",
            redis(lambda store: by_label(store.client.failures)),
        ),
    ]
