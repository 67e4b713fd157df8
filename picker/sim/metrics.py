"""The engine's metrics, under the names that vLLM or SGLang give them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

# Upper bounds in seconds, as vLLM sets them.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Histogram:
    """Counts of observations below given bounds. Many equal observations, a step's tokens, cost as much as one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add `times` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations up to it), ending with +Inf."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class Exposition:
    """Builds one scrape: every metric with the labels that were set last."""

    def __init__(self, prefix: str) -> None:
        self.labels: Mapping[str, str] = {}
        self._prefix = prefix
        self._families: dict[str, Metric] = {}

    def gauge(self, name: str, value: float, **labels: str) -> None:
        names = {**labels, **self.labels}
        family = GaugeMetricFamily(self._prefix + name, name, labels=list(names))
        family.add_metric(list(names.values()), value)
        self._add(family)

    def counter(self, name: str, value: float) -> None:
        family = CounterMetricFamily(self._prefix + name, name, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        self._add(family)

    def histogram(self, name: str, histogram: Histogram) -> None:
        family = HistogramMetricFamily(self._prefix + name, name, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), histogram.buckets(), histogram.sum)
        self._add(family)

    def _add(self, family: Metric) -> None:
        known = self._families.setdefault(family.name, family)
        if known is not family:
            known.samples += family.samples

    def render(self) -> bytes:
        """Return the scrape in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(list(self._families.values())))
        return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
