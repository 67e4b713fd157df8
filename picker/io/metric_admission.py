"""Metrics of what happens before and beside the choice of an endpoint: admission, prefill apart, and names of models."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from picker.core.director import Director
from picker.io.extproc.service import ExtProcService
from picker.io.metric_families import Family, Reading, Readings, by_label


class Owner(Protocol):
    """What the parts belong to."""

    director: Director | None
    service: ExtProcService | None


def admission_readings(owner: Owner) -> list[Family]:
    """Return the metrics of admission and of names of models; those of the gate are there while there is a gate."""
    gauge, counter = partial(Reading, "gauge"), partial(Reading, "counter")

    def gate(value: str) -> Readings:
        service = owner.service
        return [] if service is None or service.gate is None else [((), getattr(service.gate, value))]

    def outcomes() -> Readings:
        service = owner.service
        return [] if service is None or service.gate is None else by_label(service.gate.counts)

    def saturation() -> Readings:
        service = owner.service
        return [] if service is None or service.gate is None else [((), service.gate.saturation())]

    return [
        counter(
            "admission_total",
            "outcome",
            "Requests that a saturated pool did not simply let through: `shed` for their priority, `full` with no place in "
            "line, and those that waited: `admitted`, `expired`, `displaced` by a higher priority, `cancelled` by the client.",
            outcomes,
        ),
        gauge("admission_waiting", "", "Requests that wait for their turn.", lambda: gate("waiting")),
        gauge("admission_waiting_bytes", "", "Bytes of their bodies.", lambda: gate("waiting_bytes")),
        counter(
            "admission_waited_seconds_total",
            "",
            "Time that admitted requests have waited, in all.",
            lambda: gate("waited_seconds"),
        ),
        gauge(
            "admission_saturation",
            "",
            "How full the emptiest endpoint is, by the worst of its measures. At 1 and above the pool is saturated.",
            saturation,
        ),
        counter(
            "model_names_total",
            "outcome",
            "Requests `rewritten` to another model, and their responses: name `restored`, or not, since the `body_not_seen` "
            "or it was `compressed`.",
            lambda: [] if owner.service is None else by_label(owner.service.model_names),
        ),
    ]
