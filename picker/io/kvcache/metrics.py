"""What a scrape reads of `kvcache-aware`. Empty while it is not enabled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from picker.core.plugins.kvcache_learning import BOUNDS
from picker.io.kvcache.runtime import KvCacheRuntime
from picker.io.metric_families import Family, Labels, Reading, Readings, by_label


class Owner(Protocol):
    """Who knows the runtime in force, and how predictions ended."""

    @property
    def kv_cache(self) -> Callable[[], KvCacheRuntime | None]: ...

    @property
    def prediction_outcomes(self) -> Callable[[], Mapping[str, int]]: ...


class PredictionErrors(Family):
    """The histogram of predicted minus reported cached tokens. Such a one, with bounds below 0, has no sum."""

    kind = "histogram"

    def __init__(self, owner: Owner) -> None:
        super().__init__(
            "prediction_error_tokens",
            "",
            "Predicted minus reported cached tokens of the requests that can be compared: exact ones are in the bucket up "
            "to 0, those with too few predicted below it.",
        )
        self._owner = owner

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.text)
        current = self._owner.kv_cache()
        if current is not None:
            agreement = current.producer.agreement
            names = [*map(str, BOUNDS), "+Inf"]
            counts = accumulate(agreement.errors)
            family.add_metric((), list(zip(names, counts, strict=True)), None)
        yield family


def kv_cache_readings(owner: Owner) -> list[Family]:
    """Return the metrics of the runtime in force."""
    gauge, counter = partial(Reading, "gauge"), partial(Reading, "counter")

    def read(what: Callable[[KvCacheRuntime], Readings]) -> Callable[[], Readings]:
        def now() -> Readings:
            current = owner.kv_cache()
            return () if current is None else what(current)

        return now

    return [
        counter(
            "kvcache_preparations_total",
            "outcome",
            "Requests that kvcache-aware got ready for their decision. Anything but `ok` was decided without its scores: "
            "look at tokenizing for `not_tokenized` and `deadline`, at Redis for `no_owners`.",
            read(lambda current: by_label(current.outcomes)),
        ),
        counter(
            "kvcache_tokenizing_total",
            "step outcome",
            "Attempts to tokenize, by way and how they ended; `cache`, `joined` and `request` took none. The step `chain` "
            "counts requests that stayed without tokens.",
            read(lambda current: list(current.chain.counts.items()) if current.chain else ()),
        ),
        counter(
            "kv_events_total",
            "kind",
            "What came from engines or sidecars, over all endpoints. Frames must rise while requests flow; `gaps` and "
            "`losses` mean that events were lost, `restarts` that engines were.",
            read(lambda current: by_label(current.sources.events)),
        ),
        counter(
            "kv_events_dropped_total",
            "reason",
            "Events, frames, blocks and ownerships that could not be used. Many `removed unknown block` mean that "
            "events were missed.",
            read(_dropped),
        ),
        gauge(
            "kv_event_lag_seconds",
            "target address",
            "Time from an engine's last event to its arrival, by the clocks of both, in `direct` mode.",
            read(lambda current: _by_endpoint(current, current.sources.lag)),
        ),
        gauge(
            "kv_blocks",
            "target address",
            "Blocks that an engine holds, as far as is known. Stays 0: its events do not come.",
            read(_blocks),
        ),
        gauge(
            "kv_sources_connected",
            "",
            "Endpoints whose engine, sidecar or Redis can be heard now.",
            read(lambda current: [((), sum(map(current.sources.is_connected, current.followed)))]),
        ),
        gauge(
            "kv_incomplete_endpoints",
            "",
            "Endpoints that may hold more than is known, as events were missed or cannot be had; not for Redis. They are "
            "underrated, never overrated.",
            read(lambda current: [((), current.incomplete())] if current.redis is None else ()),
        ),
        counter(
            "predictions_compared_total",
            "outcome",
            "Requests whose engine reported cached tokens, by how that compares with what was predicted when they were "
            "routed. `over` and `under` should stay rare; `incomplete` endpoints may hold more than is known.",
            read(lambda current: by_label(current.producer.agreement.outcomes)),
        ),
        PredictionErrors(owner),
        counter(
            "redis_lookups_total",
            "outcome",
            "Prompts looked up in Redis. Anything but `ok` was decided without its answer.",
            read(lambda current: by_label(current.redis.reader.outcomes) if current.redis else ()),
        ),
        counter(
            "redis_connects_total",
            "",
            "Connections to Redis. Rising means that it fails again and again.",
            read(lambda current: [((), current.redis.reader.connects)] if current.redis else ()),
        ),
        counter(
            "redis_failures_total",
            "reason",
            "How often Redis was found not to be available. The log says what to look at.",
            read(lambda current: by_label(current.redis.reader.client.failures) if current.redis else ()),
        ),
        counter(
            "predictions_total",
            "outcome",
            "Answers of /v1/cache/predict.",
            lambda: by_label(owner.prediction_outcomes()),
        ),
    ]


def _dropped(current: KvCacheRuntime) -> Readings:
    total: Counter[str] = Counter(current.sources.dropped)
    for source in current.producer.index.stats():
        total.update(source.dropped)
        total["evicted"] += source.evicted
    return by_label(total)


def _by_endpoint(current: KvCacheRuntime, value: Callable[[int], float | None]) -> Readings:
    found: list[tuple[Labels, float]] = []
    for slot, followed in current.followed.items():
        number = value(slot)
        if number is not None:
            endpoint = followed.endpoint
            found.append(((f"{endpoint.namespace}/{endpoint.name}", endpoint.address), number))
    return found


def _blocks(current: KvCacheRuntime) -> Readings:
    if current.redis is not None:
        return ()
    blocks: Counter[int] = Counter()
    for source in current.producer.index.stats():
        blocks[source.slot] += source.blocks
    hashes = current.producer.hashes
    return _by_endpoint(current, lambda slot: blocks[slot] or hashes.blocks_of(slot))
