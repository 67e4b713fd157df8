"""How full endpoints are: 1 is as full as an endpoint should get, and more is worse."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from picker.core.admission.settings import AdmissionSettings
from picker.core.arrays import Slots
from picker.core.endpoint_table import EndpointTable

_PRIORITY = re.compile(rb"-?[0-9]{1,9}")


def saturation(table: EndpointTable, slots: Slots, settings: AdmissionSettings) -> float:
    """How full the emptiest of these endpoints is, by the worst of its measures; 0 for no endpoints.

    What is unknown does not count: metrics that went stale never keep a request from an endpoint.
    """
    if not len(slots):
        return 0.0
    fullest = table.queued_tokens.take(slots) / settings.max_queued_tokens
    np.fmax(fullest, table.waiting_now(slots) / settings.max_waiting_requests, out=fullest)
    np.fmax(fullest, table.kv_usage.take(slots) / settings.max_kv_usage, out=fullest)
    return float(fullest.min())


def priority_of(headers: Mapping[str, bytes], settings: AdmissionSettings) -> int:
    """The priority of a request; what a header says wrongly does not count."""
    if settings.priority_header:
        said = headers.get(settings.priority_header, b"").strip()
        if _PRIORITY.fullmatch(said):
            return int(said)
    for name in settings.objective_headers:
        if objective := headers.get(name):
            return settings.objectives.get(objective.decode("latin-1"), settings.default_priority)
    return settings.default_priority


def flow_of(headers: Mapping[str, bytes], settings: AdmissionSettings) -> str:
    """The flow of a request; all requests that name none are one flow."""
    for name in settings.fairness_headers:
        if flow := headers.get(name):
            return flow[:128].decode("latin-1")
    return ""
