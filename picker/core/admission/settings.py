"""The `admission` section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from picker.core.headers import HeaderName, OptionalHeaderName
from picker.core.strict import Findings, child

_SHIPPED_MAX_MESSAGE_TIMEOUT = 120.0
"""Seconds, in the Envoy configurations that come with the picker."""
MARGIN_SECONDS = 1.0
"""Envoy's patience beyond the longest wait, so that it is the picker that tells the client."""


class QueueSettings(Struct, frozen=True, rename="camel"):
    """A queue in front of a saturated pool."""

    enabled: bool = False
    """Let requests wait while every endpoint is saturated. Without it they are sent on, and engines queue them."""
    max_seconds: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    """A request that waited for so long is answered with 429. Envoy's `max_message_timeout` has to be a second longer at
    least, or requests go around the picker once its `message_timeout` is over."""
    max_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    """Requests that wait at most; further ones take the place of one of lower priority, or are answered with 429."""
    max_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024 * 1024
    """Bytes of bodies that wait at most, likewise."""


class AdmissionSettings(Struct, frozen=True, rename="camel"):
    """When the pool is saturated, and what happens to requests then."""

    max_waiting_requests: Annotated[float, Meta(gt=0)] = 5.0
    """An endpoint with so many waiting requests is saturated."""
    max_kv_usage: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """An endpoint with so much of its KV cache in use is saturated."""
    max_queued_tokens: Annotated[float, Meta(gt=0)] = 262_144.0
    """An endpoint with so many tokens to compute, by our own count, is saturated."""
    objectives: Mapping[str, int] = {}
    """Priority of requests by the objective that they name. Below 0 is sheddable: answered with 429 while saturated."""
    objective_headers: tuple[HeaderName, ...] = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
    """Request headers that name the objective; the first that is there counts."""
    priority_header: OptionalHeaderName = ""
    """A request header with the priority itself, a whole number; for gateways that set it. Empty for none."""
    default_priority: int = 0
    """Priority of requests without an objective, and of those whose objective is not listed."""
    fairness_headers: tuple[HeaderName, ...] = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
    """Request headers that name the flow a request belongs to; flows of one priority take turns."""
    queue: QueueSettings = QueueSettings()
    """A queue in front of a saturated pool."""

    def check(self, path: str, findings: Findings) -> None:
        """Warn of waits that an Envoy may not allow."""
        queue = self.queue
        if queue.enabled and queue.max_seconds + MARGIN_SECONDS > _SHIPPED_MAX_MESSAGE_TIMEOUT:
            findings.warn(
                child(child(path, "queue"), "maxSeconds"),
                f"is more than Envoy lets requests wait for if it is configured as in envoy/; set max_message_timeout"
                f" of its ext_proc filter to {queue.max_seconds + MARGIN_SECONDS:g}s or more",
            )
