"""What a scrape reads of routing: work that is not done yet, how fast it is done, and endpoints that are not trusted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from picker.core.arrays import Floats
from picker.core.director import Director
from picker.core.endpoint_health import SuspectWork, Suspicion
from picker.core.tickets import PrefillSignal
from picker.io.metric_families import Family, Labels, ModelLabels, Reading, Readings


class Owner(Protocol):
    """Who knows the director, and the labels of models."""

    @property
    def director(self) -> Director | None: ...

    @property
    def models(self) -> ModelLabels: ...


def endpoint_labels(director: Director, slot: int) -> Labels:
    """The labels `target` and `address`."""
    endpoint = director.table.endpoints[slot]
    return f"{endpoint.namespace}/{endpoint.name}", endpoint.address


def by_endpoint(director: Director, values: Floats) -> Readings:
    """What is known of each endpoint, from an array by slot."""
    slots = director.table.slots
    for slot in slots[~np.isnan(values[slots])].tolist():
        yield endpoint_labels(director, slot), float(values[slot])


def routing_readings(owner: Owner) -> list[Family]:
    """Return the metrics of the director."""
    gauge, counter = partial(Reading, "gauge"), partial(Reading, "counter")

    def read(what: Callable[[Director], Readings]) -> Callable[[], Readings]:
        return lambda: () if owner.director is None else what(owner.director)

    def ratios(director: Director) -> Readings:
        models = owner.models
        return [((models[model],), ratio) for model, ratio in director.token_ratio.known.items() if model in models]

    return [
        gauge(
            "endpoint_queued_tokens",
            "target address",
            "Uncached prompt tokens sent there whose prefill is not over, by our own count. Growing: more is sent than is "
            "computed.",
            read(lambda director: by_endpoint(director, director.table.queued_tokens)),
        ),
        gauge(
            "endpoint_prefill_tokens_per_second",
            "target address",
            "How fast it was seen to compute prompts, waiting included; left out until it was.",
            read(lambda director: by_endpoint(director, director.table.prefill_rate)),
        ),
        counter(
            "prefill_over_total",
            "signal",
            "Requests whose prompt was computed, by what told so. Mostly `end`: neither KV events nor response bodies come "
            "here, so that queued tokens are counted down late.",
            read(lambda director: [((signal,), director.prefill_signals[signal]) for signal in PrefillSignal]),
        ),
        gauge(
            "bytes_per_token",
            "model",
            "Bytes of prompt in a token, as engines report usage; 4 is assumed where this is missing.",
            read(ratios),
        ),
        gauge(
            "endpoints_suspect",
            "",
            "Endpoints that get probes only, because they keep failing or have gone silent.",
            read(_suspects),
        ),
        counter(
            "suspicions_total",
            "reason",
            "How often an endpoint became suspect: most of its requests were `failing`, or it owed answers and was `silent`.",
            read(lambda director: [((one,), director.table.health.suspicions[one]) for one in Suspicion]),
        ),
        counter(
            "suspect_requests_total",
            "why",
            "Requests sent to suspect endpoints: a `probe`, or `no_other` endpoint was left. Rising `no_other`: the whole "
            "pool is in trouble.",
            read(lambda director: [((why,), director.table.health.suspect_work[why]) for why in SuspectWork]),
        ),
    ]


def _suspects(director: Director) -> Readings:
    suspects = director.table.suspects(director.table.slots, director.now())
    yield (), 0 if suspects is None else int(np.count_nonzero(suspects))
