"""The sidecar's own metrics, `picker_sidecar_*`: read from its parts when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from types import SimpleNamespace

from prometheus_client.exposition import generate_latest

from picker.core.kv_index.ownership import Ownership
from picker.io.kv_events.subscriber import KvEventSubscriber
from picker.io.kv_index.redis_writer import RedisWriter
from picker.io.kv_index.stream_server import StreamServer
from picker.io.metric_families import Family, Reading, Readings, by_label, reference_table


class SidecarMetrics:
    """All metrics of one sidecar, as `families`. A part that is not there has no series."""

    def __init__(
        self,
        ownership: Ownership | None = None,
        subscriber: KvEventSubscriber | None = None,
        redis: RedisWriter | None = None,
        streams: StreamServer | None = None,
    ) -> None:
        ranks = {str(rank.rank): rank for rank in subscriber.ranks} if subscriber else {}

        def by_rank(counts: Mapping[str, Mapping[str, int]]) -> Readings:
            return [((rank, what), count) for rank, each in counts.items() for what, count in each.items()]

        self.families: list[Family] = [
            _gauge(
                "connected",
                "rank",
                "Connected to the engine.",
                lambda: [((name,), rank.connected) for name, rank in ranks.items()],
            ),
            _gauge(
                "complete",
                "rank",
                "All events since the engine's start are known. 0 for long: set the replay endpoint, or raise buffer_steps.",
                lambda: [((name,), rank.complete) for name, rank in ranks.items()],
            ),
            _gauge(
                "last_sequence",
                "rank",
                "Number of the last batch applied.",
                lambda: [((name,), rank.last_seq) for name, rank in ranks.items() if rank.last_seq is not None],
            ),
            _counter(
                "subscription_total",
                "rank what",
                "What happened on the way from the engine: events, gaps, replays, restarts.",
                lambda: by_rank({name: rank.counts for name, rank in ranks.items()}),
            ),
            _counter(
                "events_dropped_total",
                "rank reason",
                "Frames and events that could not be used.",
                lambda: by_rank({name: rank.dropped for name, rank in ranks.items()}),
            ),
            _gauge(
                "blocks",
                "model",
                "Blocks that routers are told of.",
                lambda: by_label(ownership.blocks) if ownership else (),
            ),
            _counter(
                "blocks_unowned_total",
                "reason",
                "Blocks that routers are not told of, and why.",
                lambda: by_label(ownership.counts) if ownership else (),
            ),
            _gauge(
                "redis_in_step",
                "",
                "Redis says what the engine holds. 0 for long: see the failures.",
                lambda: [((), redis.in_step)] if redis else (),
            ),
            _gauge(
                "redis_behind",
                "",
                "Changes that are not in Redis yet.",
                lambda: [((), redis.behind)] if redis else (),
            ),
            _counter(
                "redis_total",
                "what",
                "What happened with Redis. `missing` and `lost` rise: it drops what is written; see its maxmemory-policy. "
                "`refused_oom` rises: it is full.",
                lambda: by_label(redis.counts) if redis else (),
            ),
            _counter(
                "redis_failures_total",
                "reason",
                "How often Redis was found not to be available. The log says what to look at.",
                lambda: by_label(redis.failures) if redis else (),
            ),
            _gauge("streams", "", "Open streams of routers.", lambda: [((), streams.streams)] if streams else ()),
            _counter(
                "streams_total",
                "what",
                "Registrations and how streams ended.",
                lambda: by_label(streams.counts) if streams else (),
            ),
        ]

    def page(self) -> bytes:
        """The page in the Prometheus text format."""
        metrics = chain.from_iterable(family.collect() for family in self.families)
        return generate_latest(SimpleNamespace(collect=lambda: metrics))


def sidecar_metrics_markdown() -> str:
    """The reference table of all metrics, as Markdown."""
    return reference_table(SidecarMetrics().families)


def _gauge(name: str, labels: str, text: str, read: Callable[[], Readings]) -> Family:
    return Reading("gauge", f"sidecar_{name}", labels, text, read)


def _counter(name: str, labels: str, text: str, read: Callable[[], Readings]) -> Family:
    return Reading("counter", f"sidecar_{name}", labels, text, read)
