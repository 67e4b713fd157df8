"""Kinds of metrics that cost next to nothing on the request path: plain numbers, put into words only for a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import ClassVar, Literal, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

MAX_MODELS = 100
"""Model names with a label of their own; clients choose these names."""
MAX_LABEL_LENGTH = 80
OTHER = "other"
OTHER_MODEL = "<other>"
NO_MODEL = "<none>"

Labels = tuple[str, ...]
Readings = Iterable[tuple[Labels, float]]
_Name = TypeVar("_Name", bound=str)


def by_label(counts: Mapping[_Name, float]) -> Readings:
    """What was counted under names, as readings of a metric whose only label is the name."""
    return [((str(name),), count) for name, count in counts.items()]


class Family(Collector):
    """One metric: its name, the names of its labels, and what to look for in it."""

    kind: ClassVar[str]

    def __init__(self, name: str, labels: str, text: str) -> None:
        self.name = f"picker_{name}"
        self.labels = tuple(labels.split())
        self.text = text


class Counter(Family):
    """Counts events. `series` maps label values to counts; the request path adds to it directly."""

    kind = "counter"

    def __init__(self, name: str, labels: str, text: str, start: Iterable[Labels] = ()) -> None:
        super().__init__(name, labels, text)
        self.series: defaultdict[Labels, int] = defaultdict(int, dict.fromkeys(start, 0))

    def add(self, *labels: str) -> None:
        self.series[labels] += 1

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, count in self.series.items():
            family.add_metric(labels, count)
        yield family


class Buckets:
    """The observations of one series of a histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Histogram(Family):
    """Counts observations by upper bounds. Both are multiplied by `unit` for the reader, so that they can be integers."""

    kind = "histogram"

    def __init__(self, name: str, labels: str, text: str, bounds: Sequence[float], unit: float = 1) -> None:
        super().__init__(name, labels, text)
        self.series: defaultdict[Labels, Buckets] = defaultdict(partial(Buckets, bounds))
        self._names = [*(f"{bound * unit:g}" for bound in bounds), "+Inf"]
        self._unit = unit

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, buckets in self.series.items():
            cumulated = accumulate(buckets.counts)
            family.add_metric(labels, list(zip(self._names, cumulated, strict=True)), buckets.sum * self._unit)
        yield family


class Reading(Family):
    """Numbers that belong to somebody else, read when they are asked for."""

    def __init__(
        self, kind: Literal["gauge", "counter"], name: str, labels: str, text: str, read: Callable[[], Readings]
    ) -> None:
        super().__init__(name, labels, text)
        self.kind = kind  # type: ignore[misc]
        self._read = read

    def collect(self) -> Iterable[Metric]:
        make = GaugeMetricFamily if self.kind == "gauge" else CounterMetricFamily
        family = make(self.name, self.text, labels=self.labels)
        for labels, value in self._read():
            family.add_metric(labels, value)
        yield family


def reference_table(families: Iterable[Family], more: Iterable[tuple[str, str, str, str]] = ()) -> str:
    """Metrics as a Markdown table. `more` are rows: name, kind, labels, text."""
    rows = [(family.name, family.kind, ", ".join(family.labels), family.text) for family in families]
    lines = ["| metric | type | labels | what to look for |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in (*rows, *more)]
    return "\n".join([*lines, ""])


class ModelLabels(dict[str, str]):
    """Model names to label values: printable, short, and at most `MAX_MODELS`. Look names up by subscript.

    A name is `OTHER_MODEL` until it is admitted, so that names which no engine serves take no labels. No name's label
    begins as `OTHER_MODEL` and `NO_MODEL` do.
    """

    def __init__(self) -> None:
        super().__init__({"": NO_MODEL})
        self.overflow = 0
        """Lookups that ended in `OTHER_MODEL`."""

    def __missing__(self, model: str) -> str:
        self.overflow += 1
        return OTHER_MODEL

    def admit(self, model: str) -> None:
        """Give a model that engines serve its label, if one is left."""
        if model not in self and len(self) <= MAX_MODELS:
            label = "".join(c if c.isprintable() else "_" for c in model[:MAX_LABEL_LENGTH])
            self[model] = "_" + label[1:] if label.startswith("<") else label
