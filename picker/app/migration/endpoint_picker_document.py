"""The document of an `EndpointPickerConfig`, as plain data that is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

KIND = "EndpointPickerConfig"
API_VERSIONS = (
    "inference.networking.x-k8s.io/v1alpha1",
    "config.apix.gateway-api-inference-extension.sigs.k8s.io/v1alpha1",
    "llm-d.ai/v1alpha1",
    "llm-d.ai/v1",
)


class Plugin(Struct, frozen=True):
    """A plugin, which references call by its name, or by its type."""

    type: str
    name: str = ""
    parameters: Mapping[str, Any] = {}


class Reference(Struct, frozen=True, rename="camel"):
    """A plugin in a profile."""

    plugin_ref: str
    weight: float = 1.0


class Profile(Struct, frozen=True):
    """Plugins that choose one endpoint."""

    name: str
    plugins: tuple[Reference, ...] = ()


class EndpointPickerConfig(Struct, frozen=True, rename="camel"):
    """All of it. What other objects have to be consistent with is looked at where it is used."""

    api_version: str
    kind: str
    plugins: tuple[Plugin, ...] = ()
    scheduling_profiles: tuple[Profile, ...] = ()
    feature_gates: tuple[str, ...] = ()
    data_layer: Mapping[str, Any] = {}
    request_handler: Mapping[str, Any] = {}
    parser: Mapping[str, Any] = {}
    engine_configs: Any = None
    flow_control: Mapping[str, Any] = {}
    saturation_detector: Mapping[str, Any] = {}

    @property
    def queues(self) -> bool:
        """Whether requests wait in front of a saturated pool."""
        return any(
            gate.partition("=")[0] == "flowControl" and not gate.endswith("=false") for gate in self.feature_gates
        )
