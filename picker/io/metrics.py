"""Prometheus metrics: what the picker counts, and what to look for in it.

A request costs a handful of additions to plain numbers here; everything else happens when somebody scrapes. State
that others own (endpoints, indexes, connections) is read at that moment and never copied on the request path.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector

from picker.core.exchange.effects import Anomaly, Finish, LearnedOn
from picker.core.prompts import Unused
from picker.core.scheduling.decision import Decision, First, PrefillPlace, Sent, Steps
from picker.io.metric_families import OTHER, Counter, Family, Histogram, reference_table
from picker.io.metric_sources import Sources

_NANOSECONDS = 1e-9
_MATCH_RATIOS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_STEP_NANOSECONDS = tuple(int(us * 1000) for us in (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000, 25000, 100000))
_COST_TOKENS = (100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_STATUS_CLASSES = {None: "none"} | {hundreds: f"{hundreds}xx" for hundreds in range(1, 6)}


class Metrics(Sources):
    """All metrics of one picker."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions = Counter(
            "decisions_total",
            "reason model",
            "Decisions by how they ended. Any reason but `routed` was refused with 503 or 429. A model is `<other>` until "
            "a request for it succeeds.",
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
        self.work_sources = Counter(
            "work_source_total",
            "source",
            "Decisions by what said how many tokens of the prompt each endpoint lacks. Mostly `length`: prompts cannot be "
            "matched, and all of them count as uncached everywhere.",
        )
        self.destination_cost = Histogram(
            "destination_cost_tokens",
            "",
            "What sending the prompt to its destination costs by `token-cost`, in tokens of prefill. Rising: the pool "
            "falls behind, or prompts share less.",
            _COST_TOKENS,
        )
        self.put_first = Counter(
            "put_first_total",
            "why",
            "Destinations that were not those with the highest total: the session is `pinned` there, or a suspect "
            "endpoint gets its `probe`.",
            [(why,) for why in First],
        )
        self.prefill_places = Counter(
            "prefill_place_total",
            "place",
            "Where prompts are computed while some endpoints are there for nothing else: `apart`; or by the decode endpoint, "
            "for `few_tokens`, or because `no_endpoint` could be used for prefill.",
            [(place,) for place in PrefillPlace],
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
            "Time of each step of a decision. Tells which of parsing, preparation (tokens, Redis), filters, matching, "
            "scores and the pick is slow.",
            _STEP_NANOSECONDS,
            _NANOSECONDS,
        )
        self.decision_seconds = Histogram(
            "decision_seconds",
            "",
            "Time of a whole decision, but for its preparation. It blocks all others, so that its mean times the rate is "
            "the load of a core.",
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
        self._readings = self.readings()
        self._ratios = self.match_ratio.series
        self._steps = [self.steps.series[step,] for step in Steps._fields]
        self._decision = self.decision_seconds.series[()]
        self._cost = self.destination_cost.series[()]
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
            info = match.info
            if info.total:
                matched = info.matched
                self._ratios[producer, model].observe(matched.item(matched.argmax()) / info.total)
        if decision.work is not None:
            self.work_sources.series[decision.work.source,] += 1
            if decision.order and len(decision.costs):
                self._cost.observe(decision.costs.item(decision.order[0]))
        if decision.first is not None:
            self.put_first.series[decision.first,] += 1
        if decision.prefill_place is not None:
            self.prefill_places.series[decision.prefill_place,] += 1
        steps = decision.steps
        for buckets, nanoseconds in zip(self._steps, steps, strict=True):
            buckets.observe(nanoseconds)
        self._decision.observe(sum(steps) - steps.prepare)

    def finished(self, sent: Sent, finish: Finish, seconds: float) -> None:
        """Count the end of a routed request. Less than 2 us."""
        status = finish.status
        if status is not None and 200 <= status < 300:
            self.models.admit(sent.model)
        self.learned.series[finish.learned_on, "true" if finish.success else "false"] += 1
        self.outcomes.series[_STATUS_CLASSES.get(status and status // 100, OTHER),] += 1
        self._request.observe(seconds)
        served = finish.served
        if served is not None:
            destinations = sent.destinations
            if served != destinations[0]:
                self.served_elsewhere.add("fallback" if served in destinations else OTHER)

    def evicted(self, model: str, blocks: int) -> None:
        """Count blocks that the prefix cache dropped because it is full: `on_evict` of the scheduler."""
        self.evictions.series[self.models[model],] += blocks


def metrics_markdown() -> str:
    """The reference table of all metrics, as Markdown."""
    metrics = Metrics()
    ours = {family.name.removesuffix("_total") for family in metrics.families}
    process = [
        (family.name + "_total" * (family.type == "counter"), family.type, "", family.documentation)
        for family in metrics.registry.collect()
        if family.name not in ours
    ]
    return reference_table(metrics.families, process)
