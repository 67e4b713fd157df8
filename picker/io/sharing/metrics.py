"""What a scrape reads of shared picks. Empty while none are shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from picker.io.metric_families import Family, Reading, Readings, by_label
from picker.io.sharing.picks import SharedPicks


def sharing_readings(shared: Callable[[], SharedPicks | None]) -> list[Family]:
    """Return the metrics of sharing."""
    gauge, counter = partial(Reading, "gauge"), partial(Reading, "counter")

    def one(value: Callable[[SharedPicks], float]) -> Callable[[], Readings]:
        def now() -> Readings:
            picks = shared()
            return [] if picks is None else [((), value(picks))]

        return now

    def heard() -> Readings:
        picks = shared()
        return [] if picks is None else by_label(picks.replicas.heard)

    def failures() -> Readings:
        picks = shared()
        return [] if picks is None else by_label(picks.failures)

    return [
        gauge(
            "sharing_peers",
            "",
            "Other pickers that are heard. Should be the number of replicas less one.",
            one(lambda picks: picks.replicas.peers),
        ),
        gauge(
            "sharing_remote_requests",
            "",
            "Requests of other pickers that count here as in flight.",
            one(lambda picks: picks.replicas.remote_requests),
        ),
        counter(
            "sharing_messages_total",
            "outcome",
            "Messages heard on the channel. `malformed` and `too_many` mean that something else writes to it.",
            heard,
        ),
        counter("sharing_published_total", "", "Messages that Redis took.", one(lambda picks: picks.published)),
        counter(
            "sharing_gaps_total",
            "",
            "Times that messages of another picker were missing, so that it was asked for what it has on its way.",
            one(lambda picks: picks.replicas.gaps),
        ),
        counter(
            "sharing_dropped_total",
            "",
            "Events that were not told, since Redis was away for too long. The others ask for them later.",
            one(lambda picks: picks.replicas.dropped),
        ),
        counter(
            "sharing_connects_total",
            "",
            "Connections to Redis. Rising means that it fails again and again.",
            one(lambda picks: picks.connects),
        ),
        counter(
            "sharing_failures_total",
            "reason",
            "How often Redis was found not to be available. The log says what to look at.",
            failures,
        ),
    ]
