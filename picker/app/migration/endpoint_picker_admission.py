"""When the pool is saturated and who waits then, from an `EndpointPickerConfig` to our `admission`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from picker.app.migration.endpoint_picker_document import EndpointPickerConfig
from picker.app.migration.endpoint_picker_plugins import PLUGINS, arguments_of
from picker.app.migration.mapped import Mapped
from picker.app.quantities import seconds, size
from picker.core.strict import Findings, child

DETECTOR = "utilization-detector"
_SATURATED = {"maxWaitingRequests": 5, "maxKvUsage": 0.8}
"""When an endpoint is saturated there, unless told otherwise."""
_QUEUE: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "maxBytes": ("maxBytes", size),
    "maxRequests": ("maxRequests", size),
    "defaultRequestTTL": ("maxSeconds", seconds),
}
_WAITS = 60.0
"""How long a request waits there, unless told otherwise, in seconds."""


def admit(
    config: EndpointPickerConfig, detectors: Iterable[tuple[str, Mapping[str, Any]]], findings: Findings
) -> tuple[dict[str, Any], list[Mapped]]:
    """The section `admission`. `detectors` are the parameters of those plugins, each with its path.

    Versions before had a section with the same parameters.
    """
    admission: dict[str, Any] = dict(_SATURATED)
    mapped: list[Mapped] = []
    section = {key: value for key, value in config.saturation_detector.items() if key != "pluginRef"}
    for path, given in (*detectors, ("saturationDetector", section)):
        arguments, said = arguments_of(PLUGINS[DETECTOR].parameters, given, path, findings)
        admission |= arguments
        mapped += said
    mapped.append(Mapped(DETECTOR, f"admission: {_shown(admission)}", "who is turned away or waits, while all are"))
    if config.queues:
        queue, said = _queue(config.flow_control, findings)
        admission["queue"] = queue
        mapped += [*said, Mapped("featureGates: flowControl", f"admission.queue: {_shown(queue)}")]
    elif config.flow_control:
        mapped.append(Mapped("flowControl", "", "is off there without its feature gate, and here"))
    return admission, mapped


def _queue(given: Mapping[str, Any], findings: Findings) -> tuple[dict[str, Any], list[Mapped]]:
    queue: dict[str, Any] = {"enabled": True, "maxSeconds": _WAITS}
    mapped: list[Mapped] = []
    for key, value in given.items():
        path = child("flowControl", key)
        if key not in _QUEUE:
            mapped.append(Mapped(path, "", "has no counterpart"))
            continue
        ours, read = _QUEUE[key]
        try:
            queue[ours] = read(str(value))
        except ValueError as error:
            findings.add(path, str(error), value)
    return queue, mapped


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in settings.items())
