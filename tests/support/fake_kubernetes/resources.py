"""The kinds that an API server serves: built-in ones, and those that definitions of custom resources add."""

from __future__ import annotations

from typing import Any, NamedTuple


class Resource(NamedTuple):
    """A kind under one version of its API group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def storage(self) -> tuple[str, str]:
        """Versions of one kind share their objects."""
        return self.group, self.plural


def _many(group: str, version: str, namespaced: str = "", cluster: str = "") -> list[Resource]:
    """Resources of one group, from their kinds."""
    return [
        Resource(group, version, _plural(kind), kind, scope)
        for kinds, scope in ((namespaced, True), (cluster, False))
        for kind in kinds.split()
    ]


def _plural(kind: str) -> str:
    name = kind.lower()
    if name == "endpoints":
        return name
    if name.endswith("y") and name[-2] not in "aeiou":
        return name[:-1] + "ies"
    return name + ("es" if name.endswith(("s", "x", "ch")) else "s")


BUILT_IN = [
    *_many(
        "",
        "v1",
        "Pod Service ConfigMap Secret ServiceAccount Endpoints Event PersistentVolumeClaim",
        "Namespace Node PersistentVolume",
    ),
    *_many("apps", "v1", "Deployment StatefulSet DaemonSet ReplicaSet"),
    *_many("batch", "v1", "Job CronJob"),
    *_many("autoscaling", "v2", "HorizontalPodAutoscaler"),
    *_many("coordination.k8s.io", "v1", "Lease"),
    *_many("discovery.k8s.io", "v1", "EndpointSlice"),
    *_many("networking.k8s.io", "v1", "NetworkPolicy Ingress"),
    *_many("policy", "v1", "PodDisruptionBudget"),
    *_many("rbac.authorization.k8s.io", "v1", "Role RoleBinding", "ClusterRole ClusterRoleBinding"),
    *_many("scheduling.k8s.io", "v1", "", "PriorityClass"),
    *_many("apiextensions.k8s.io", "v1", "", "CustomResourceDefinition"),
]

INFERENCE = [
    *_many("inference.networking.k8s.io", "v1", "InferencePool"),
    *_many("inference.networking.x-k8s.io", "v1alpha2", "InferencePool InferenceObjective"),
]

GATEWAYS = [
    *_many("gateway.networking.k8s.io", "v1", "Gateway HTTPRoute GRPCRoute BackendTLSPolicy", "GatewayClass"),
    *_many("gateway.networking.k8s.io", "v1beta1", "ReferenceGrant"),
    *_many(
        "gateway.envoyproxy.io",
        "v1alpha1",
        "EnvoyExtensionPolicy BackendTrafficPolicy ClientTrafficPolicy SecurityPolicy EnvoyPatchPolicy EnvoyProxy Backend",
    ),
]

MONITORING = _many("monitoring.coreos.com", "v1", "ServiceMonitor PodMonitor PrometheusRule")

CERTIFICATES = _many("cert-manager.io", "v1", "Certificate Issuer", "ClusterIssuer")

ISTIO = _many("networking.istio.io", "v1", "DestinationRule")


def defined_by(definition: dict[str, Any]) -> list[Resource]:
    """What a CustomResourceDefinition makes an API server serve."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        Resource(spec["group"], version["name"], names["plural"], names["kind"], spec["scope"] == "Namespaced")
        for version in spec["versions"]
        if version.get("served")
    ]
