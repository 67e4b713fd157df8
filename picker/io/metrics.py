"""Prometheus metrics: what the picker counts, and what to look for in it.

A request costs a handful of additions to plain numbers here; everything else happens when somebody scrapes. State
that others own (endpoints, indexes, connections) is read at that moment and never copied on the request path.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector

from picker import __version__
from picker.core.director import Director
from picker.core.endpoints import Floats
from picker.core.exchange.effects import Anomaly, Finish, LearnedOn
from picker.core.plugins.prefix_cache import PrefixCacheProducer
from picker.core.prefix_cache.index import PrefixIndex
from picker.core.prompts import Unused
from picker.core.scheduling.decision import Decision, Steps
from picker.io.extproc.service import ExtProcService
from picker.io.metric_families import (
    MAX_MODELS,
    OTHER,
    Counter,
    Family,
    Histogram,
    Labels,
    ModelLabels,
    Reading,
    Readings,
)
from picker.io.transport.counters import TransportCounters

_NANOSECONDS = 1e-9
_MATCH_RATIOS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_STEP_NANOSECONDS = tuple(int(us * 1000) for us in (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000, 25000, 100000))
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_STATUS_CLASSES = {None: "none"} | {hundreds: f"{hundreds}xx" for hundreds in range(1, 6)}


class Metrics:
    """All metrics of one picker. What is None or empty at first is set by whoever starts the part it belongs to."""

    def __init__(self) -> None:
        self.director: Director | None = None
        self.transport: TransportCounters | None = None
        self.scrape_outcomes: Mapping[str, int] = {}
        self.discovery_outcomes: Callable[[], Mapping[str, int]] = dict
        self.reload_outcomes: Callable[[], Mapping[str, int]] = dict
        self.service: ExtProcService | None = None
        self.models = ModelLabels()
        self.decisions = Counter(
            "decisions_total",
            "reason model",
            "Decisions by how they ended. Any reason but `routed` was refused with 503 or 429.",
        )
        self.unused = Counter(
            "prompt_unused_total",
            "reason",
            "Requests routed by load alone, because their prompt could not be used. A steady `body_mode_streamed` "
            "means that Envoy's request body mode has to be BUFFERED or FULL_DUPLEX_STREAMED.",
            [(reason,) for reason in Unused],
        )
        self.match_ratio = Histogram(
            "prefix_match_ratio",
            "producer model",
            "Fraction of the prompt that the best endpoint holds, once for each decision that looked; 0 is a miss. "
            "Always near 0: prompts share no beginning.",
            _MATCH_RATIOS,
        )
        self.evictions = Counter(
            "prefix_cache_evictions_total",
            "model",
            "Blocks dropped because an endpoint's list was full. A steady increase means that maxHashCacheSize is "
            "too small.",
        )
        self.steps = Histogram(
            "decision_step_seconds",
            "step",
            "Time of each step of a decision. Tells which of parsing, filters, matching, scores and the pick is slow.",
            _STEP_NANOSECONDS,
            _NANOSECONDS,
        )
        self.decision_seconds = Histogram(
            "decision_seconds",
            "",
            "Time of a whole decision. It blocks all others, so that its mean times the rate is the load of a core.",
            _STEP_NANOSECONDS,
            _NANOSECONDS,
        )
        self.learned = Counter(
            "learned_total",
            "on success",
            "Routed requests that are over, by the signal that ended them. Only success=true is learnt from.",
            [(on, success) for on in LearnedOn for success in ("true", "false")],
        )
        self.outcomes = Counter(
            "requests_finished_total",
            "status",
            "Routed requests that are over, by class of their status; `none` ended before response headers.",
            [(name,) for name in _STATUS_CLASSES.values()],
        )
        self.request_seconds = Histogram(
            "request_seconds",
            "",
            "Time from the decision to the end of the request, streaming included.",
            _REQUEST_SECONDS,
        )
        self.served_elsewhere = Counter(
            "served_elsewhere_total",
            "by",
            "Requests that another endpoint than the pick served: a `fallback` of the decision, or an `other` one. "
            "Rising `other` means that Envoy does not follow the picks.",
            [("fallback",), ("other",)],
        )
        self.anomalies = Counter(
            "anomalies_total",
            "kind",
            "Things that a well-behaved Envoy or client does not do. The log says what to change.",
            [(kind,) for kind in Anomaly],
        )
        self.errors = Counter(
            "errors_total",
            "where",
            "Unexpected errors that were survived. Should stay 0; the log has a traceback for each kind.",
        )
        self.watch_lost = Counter(
            "watch_lost_total",
            "",
            "Decisions that a watcher was too slow to get.",
            [()],
        )
        self._readings = self._declare_readings()
        self._ratios = self.match_ratio.series
        self._steps = [self.steps.series[step,] for step in Steps._fields]
        self._decision = self.decision_seconds.series[()]
        self._request = self.request_seconds.series[()]
        self.registry = CollectorRegistry()
        for family in self.families:
            self.registry.register(family)
        ProcessCollector(registry=self.registry)

    @property
    def families(self) -> list[Family]:
        """All metrics but those of the process, in the order of the reference."""
        return [*(value for value in vars(self).values() if isinstance(value, Family)), *self._readings]

    def decided(self, decision: Decision) -> None:
        """Count a decision. Some 3 us."""
        prompt = decision.request.prompt
        model = self.models[prompt.model]
        self.decisions.series[decision.reason, model] += 1
        if prompt.unused is not None:
            self.unused.series[prompt.unused,] += 1
        for producer, match in decision.matches.items():
            matched, total, _ = match.info
            if total:
                self._ratios[producer, model].observe(matched.item(matched.argmax()) / total)
        whole = 0
        for buckets, nanoseconds in zip(self._steps, decision.steps, strict=True):
            buckets.observe(nanoseconds)
            whole += nanoseconds
        self._decision.observe(whole)

    def finished(self, decision: Decision, finish: Finish, seconds: float) -> None:
        """Count the end of a routed request. Less than 2 us."""
        status = finish.status
        self.learned.series[finish.learned_on, "true" if finish.success else "false"] += 1
        self.outcomes.series[_STATUS_CLASSES.get(status and status // 100, OTHER),] += 1
        self._request.observe(seconds)
        served = finish.served
        if served is not None:
            endpoints, order = decision.endpoints, decision.order
            if served != endpoints[order[0]].address:
                self.served_elsewhere.add("fallback" if served in decision.destinations else OTHER)

    def evicted(self, model: str) -> None:
        """Count an entry that the prefix cache dropped because it is full: `on_evict` of the scheduler."""
        self.evictions.series[self.models[model],] += 1

    def prefix_indexes(self) -> Iterable[PrefixIndex]:
        """What the scheduler in force remembers of its picks."""
        if self.director:
            for producer in self.director.scheduler.producers:
                if isinstance(producer, PrefixCacheProducer):
                    yield producer.index

    def _declare_readings(self) -> list[Family]:
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
                lambda: _by_outcome(self.scrape_outcomes),
            ),
            counter(
                "discovery_updates_total",
                "outcome",
                "Updates of the list of endpoints.",
                lambda: _by_outcome(self.discovery_outcomes()),
            ),
            counter(
                "config_reloads_total",
                "outcome",
                "Changes of the configuration file. Anything but `ok` was refused, and the configuration before stays.",
                lambda: _by_outcome(self.reload_outcomes()),
            ),
            counter(
                "transport_rejected_total",
                "reason",
                "Connections and streams of ext_proc that were turned away, by limit or fault.",
                lambda: _by_outcome(self.transport.rejected) if self.transport else (),
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
            counter(
                "model_label_overflow_total",
                "",
                f"Lookups of a model name that has no label because {MAX_MODELS} others do. Clients name many models.",
                lambda: [((), self.models.overflow)],
            ),
            gauge(
                "build_info",
                "version python",
                "Always 1; the labels are what runs.",
                lambda: [((__version__, platform.python_version()), 1)],
            ),
        ]

    def _endpoint_in_flight(self) -> Readings:
        if self.director:
            table = self.director.table
            for slot in table.slots.tolist():
                yield _endpoint_labels(self.director, slot), int(table.in_flight[slot])

    def _endpoint_load(self, name: str) -> Readings:
        if self.director:
            table = self.director.table
            values: Floats = getattr(table, name)
            for slot in table.slots[~np.isnan(values[table.slots])].tolist():
                yield _endpoint_labels(self.director, slot), float(values[slot])

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


def _by_outcome(counts: Mapping[str, int]) -> Readings:
    return [((outcome,), count) for outcome, count in counts.items()]


def _endpoint_labels(director: Director, slot: int) -> Labels:
    endpoint = director.table.endpoints[slot]
    return f"{endpoint.namespace}/{endpoint.name}", endpoint.address


def metrics_markdown() -> str:
    """The reference table of all metrics, as Markdown."""
    metrics = Metrics()
    rows = [(family.name, family.kind, ", ".join(family.labels), family.text) for family in metrics.families]
    ours = {name.removesuffix("_total") for name, *_ in rows}
    rows += [
        (family.name + "_total" * (family.type == "counter"), family.type, "", family.documentation)
        for family in metrics.registry.collect()
        if family.name not in ours
    ]
    lines = ["| metric | type | labels | what to look for |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in rows), ""])
