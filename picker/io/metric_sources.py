"""What others own and a scrape reads: endpoints, indexes, connections, and what the parts of the picker have counted."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from picker import __version__
from picker.core.director import Director
from picker.core.plugins.prefix_cache import PrefixCacheProducer
from picker.core.prefix_cache.index import PrefixIndex
from picker.core.scheduling import scheduler
from picker.io.extproc.service import ExtProcService
from picker.io.kvcache.metrics import kv_cache_readings
from picker.io.kvcache.runtime import KvCacheRuntime
from picker.io.metric_admission import admission_readings
from picker.io.metric_families import MAX_MODELS, Family, ModelLabels, Reading, Readings, by_label
from picker.io.metric_routing import by_endpoint, endpoint_labels, routing_readings
from picker.io.metric_sessions import session_readings
from picker.io.sharing.metrics import sharing_readings
from picker.io.sharing.picks import SharedPicks
from picker.io.sticky.metrics import sticky_readings
from picker.io.transport.counters import TransportCounters

REQUEST_PATH = "interpreted" if scheduler.__file__.endswith(".py") else "compiled"
"""Whether this installation has the compiled modules."""


class Sources:
    """The owners. What is None or empty at first is set by whoever starts the part it belongs to."""

    def __init__(self) -> None:
        self.director: Director | None = None
        self.service: ExtProcService | None = None
        self.transport: TransportCounters | None = None
        self.scrape_outcomes: Mapping[str, int] = {}
        self.discovery_outcomes: Callable[[], Mapping[str, int]] = dict
        self.discovery_staleness: Callable[[], float | None] = lambda: None
        self.odd_pods: Callable[[], Mapping[str, int]] = dict
        self.reload_outcomes: Callable[[], Mapping[str, int]] = dict
        self.prediction_outcomes: Callable[[], Mapping[str, int]] = dict
        self.kv_cache: Callable[[], KvCacheRuntime | None] = lambda: None
        self.shared_picks: Callable[[], SharedPicks | None] = lambda: None
        self.models = ModelLabels()

    def prefix_producers(self) -> list[PrefixCacheProducer]:
        """What the scheduler in force goes by that remembers its picks."""
        producers = self.director.scheduler.producers if self.director else ()
        return [producer for producer in producers if isinstance(producer, PrefixCacheProducer)]

    def prefix_indexes(self) -> Iterable[PrefixIndex]:
        """What they remember."""
        return (producer.index for producer in self.prefix_producers())

    def readings(self) -> list[Family]:
        """The metrics that are read when they are asked for."""
        gauge, counter = partial(Reading, "gauge"), partial(Reading, "counter")
        load = self._endpoint_load
        return [
            gauge(
                "in_flight_requests",
                "",
                "Requests routed and not over. Growing without end means that Envoy keeps streams open.",
                lambda: [((), self.director.in_flight)] if self.director else (),
            ),
            gauge(
                "endpoint_in_flight_requests",
                "target address",
                "The same for each endpoint. Very uneven: prefixes outweigh load, or an endpoint hangs.",
                self._endpoint_in_flight,
            ),
            gauge(
                "open_streams",
                "",
                "ext_proc streams that are open; each is one request of Envoy.",
                lambda: [((), self.service.open_streams)] if self.service else (),
            ),
            gauge(
                "buffered_body_bytes",
                "",
                "Request bodies that wait for their end.",
                lambda: [((), self.service.buffered_bytes)] if self.service else (),
            ),
            counter(
                "response_usage_total",
                "outcome",
                "Responses read for what engines say of tokens: `read`, `absent`, what could not be used, and observed "
                "ones that did not meet their request. `unmatched` and `late`: another picker gets the observing streams.",
                lambda: by_label(self.service.usage_outcomes) if self.service else (),
            ),
            gauge(
                "prefix_cache_entries",
                "",
                "Blocks recorded over all endpoints. Should grow after traffic starts.",
                lambda: [((), index.entries) for index in self.prefix_indexes()],
            ),
            gauge(
                "prefix_cache_held",
                "",
                "Blocks that requests on their way make visible. Returns to 0 without traffic.",
                lambda: [((), index.held) for index in self.prefix_indexes()],
            ),
            gauge(
                "prefix_cache_remembered_bytes",
                "",
                "Text of prompts that is kept to hash the next ones faster. At most 16 MiB.",
                lambda: [((), producer.remembered_bytes) for producer in self.prefix_producers()],
            ),
            gauge(
                "endpoints",
                "",
                "Endpoints that can be picked. 0 means that every request gets 503.",
                lambda: [((), len(self.director.table))] if self.director else (),
            ),
            gauge(
                "endpoints_stale",
                "",
                "Endpoints of unknown load: their metrics were never read, or not lately. Look at scrapes by outcome.",
                self._stale,
            ),
            gauge(
                "endpoint_waiting_requests",
                "target address",
                "Requests queued in the engine, as it says. This and the next four leave out what is unknown.",
                lambda: load("waiting"),
            ),
            gauge(
                "endpoint_running_requests",
                "target address",
                "Requests running in the engine, as it says.",
                lambda: load("running"),
            ),
            gauge(
                "endpoint_kv_cache_usage_ratio",
                "target address",
                "Used share of the engine's KV cache, 0 to 1.",
                lambda: load("kv_usage"),
            ),
            gauge(
                "endpoint_ttft_seconds",
                "target address",
                "The engine's recent mean time to first token.",
                lambda: load("ttft"),
            ),
            gauge(
                "endpoint_tpot_seconds",
                "target address",
                "The engine's recent mean time per further token.",
                lambda: load("tpot"),
            ),
            counter(
                "scrapes_total",
                "outcome",
                "Readings of engine metrics. Anything but `ok` for long makes endpoints stale.",
                lambda: by_label(self.scrape_outcomes),
            ),
            counter(
                "discovery_updates_total",
                "outcome",
                "Updates of the list of endpoints, and failures to get them. The log says what is wrong.",
                lambda: by_label(self.discovery_outcomes()),
            ),
            gauge(
                "discovery_staleness_seconds",
                "",
                "Time since the API server last said something that holds. It talks about once a minute; growing beyond "
                "that, endpoints stay what they were then.",
                self._discovery_staleness,
            ),
            gauge(
                "discovery_odd_pods",
                "reason",
                "Ready pods with something wrong: an annotation or an engine label that says nothing, no address, or the "
                "address of another pod.",
                lambda: by_label(self.odd_pods()),
            ),
            counter(
                "config_reloads_total",
                "outcome",
                "Changes of the configuration file. Anything but `ok` was refused, and the configuration before stays.",
                lambda: by_label(self.reload_outcomes()),
            ),
            counter(
                "transport_rejected_total",
                "reason",
                "Connections and streams of ext_proc that were turned away, by limit or fault.",
                lambda: by_label(self.transport.rejected) if self.transport else (),
            ),
            counter(
                "transport_events_total",
                "event",
                "Connections and streams opened, streams reset, handlers failed and deadlines missed. Envoy ends its "
                "streams by a reset, so that these are no faults.",
                self._transport_events,
            ),
            gauge(
                "transport_connections",
                "",
                "Open connections of ext_proc: some for each Envoy.",
                lambda: [((), self.transport.connections_open)] if self.transport else (),
            ),
            *routing_readings(self),
            *kv_cache_readings(self),
            *session_readings(self),
            *sticky_readings(self),
            *admission_readings(self),
            *sharing_readings(lambda: self.shared_picks()),  # noqa: PLW0108  set later
            counter(
                "model_label_overflow_total",
                "",
                "Lookups of a model name that has no label: no request for it succeeded yet, or "
                f"{MAX_MODELS} others have theirs. Rising steadily: clients name many models.",
                lambda: [((), self.models.overflow)],
            ),
            gauge(
                "build_info",
                "version python request_path",
                "Always 1; the labels are what runs. The request path is `compiled` in the image, and `interpreted`, which "
                "costs a fifth more CPU, where it was installed without.",
                lambda: [((__version__, platform.python_version(), REQUEST_PATH), 1)],
            ),
        ]

    def _discovery_staleness(self) -> Readings:
        seconds = self.discovery_staleness()
        return () if seconds is None else [((), seconds)]

    def _endpoint_in_flight(self) -> Readings:
        if self.director:
            table = self.director.table
            for slot in table.slots.tolist():
                yield endpoint_labels(self.director, slot), int(table.in_flight[slot])

    def _endpoint_load(self, name: str) -> Readings:
        if self.director:
            yield from by_endpoint(self.director, getattr(self.director.table, name))

    def _stale(self) -> Readings:
        if self.director:
            table = self.director.table
            loads = np.stack((table.waiting, table.running, table.kv_usage, table.ttft, table.tpot))
            yield (), int(np.isnan(loads[:, table.slots]).all(axis=0).sum())

    def _transport_events(self) -> Readings:
        if self.transport:
            for event in (
                "connections_opened",
                "streams_opened",
                "resets_received",
                "resets_sent",
                "handler_errors",
                "deadlines_exceeded",
            ):
                yield (event,), getattr(self.transport, event)
