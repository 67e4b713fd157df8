"""The sidecar's own metrics, `picker_sidecar_*`: read from its parts when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from picker.core.kv_index.ownership import Ownership
from picker.io.kv_events.subscriber import KvEventSubscriber
from picker.io.kv_index.redis_writer import RedisWriter
from picker.io.kv_index.stream_server import StreamServer


def sidecar_page(
    ownership: Ownership, subscriber: KvEventSubscriber, redis: RedisWriter | None, streams: StreamServer | None
) -> bytes:
    """Return the page in the Prometheus text format."""
    families = _families(ownership, subscriber, redis, streams)
    return generate_latest(SimpleNamespace(collect=lambda: families))


def _families(
    ownership: Ownership, subscriber: KvEventSubscriber, redis: RedisWriter | None, streams: StreamServer | None
) -> Iterable[Metric]:
    ranks = {str(rank.rank): rank for rank in subscriber.ranks}
    yield _gauge("connected", "rank", "Connected to the engine.", {r: rank.connected for r, rank in ranks.items()})
    yield _gauge(
        "complete",
        "rank",
        "All events since the engine's start are known. 0 for long: set the replay endpoint, or raise buffer_steps.",
        {r: rank.complete for r, rank in ranks.items()},
    )
    yield _gauge(
        "last_sequence",
        "rank",
        "Number of the last batch applied.",
        {r: rank.last_seq for r, rank in ranks.items() if rank.last_seq is not None},
    )
    yield _counter(
        "subscription",
        "rank what",
        "What happened on the way from the engine: events, gaps, replays, restarts.",
        {(r, what): count for r, rank in ranks.items() for what, count in rank.counts.items()},
    )
    yield _counter(
        "events_dropped",
        "rank reason",
        "Frames and events that could not be used.",
        {(r, reason): count for r, rank in ranks.items() for reason, count in rank.dropped.items()},
    )
    yield _gauge("blocks", "model", "Blocks that routers are told of.", ownership.blocks)
    yield _counter("blocks_unowned", "reason", "Blocks that routers are not told of, and why.", ownership.counts)
    if redis is not None:
        yield _gauge("redis_in_step", "", "Redis says what the engine holds.", {(): redis.in_step})
        yield _gauge("redis_behind", "", "Changes that are not in Redis yet.", {(): redis.behind})
        yield _counter(
            "redis",
            "what",
            "What happened with Redis. `missing` and `lost` rise: it drops what is written; see its maxmemory-policy.",
            redis.counts,
        )
        yield _counter("redis_failures", "reason", "How often Redis was found not to be available.", redis.failures)
    if streams is not None:
        yield _gauge("streams", "", "Open streams of routers.", {(): streams.streams})
        yield _counter("streams", "what", "Registrations and how streams ended.", streams.counts)


def _gauge(name: str, labels: str, text: str, values: Mapping[Any, Any]) -> Metric:
    family = GaugeMetricFamily(f"picker_sidecar_{name}", text, labels=labels.split())
    for key, value in values.items():
        family.add_metric(key if isinstance(key, tuple) else (key,), float(value))
    return family


def _counter(name: str, labels: str, text: str, values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"picker_sidecar_{name}", text, labels=labels.split())
    for key, value in values.items():
        family.add_metric(key if isinstance(key, tuple) else (key,), value)
    return family
