"""Who reaches whom, as NetworkPolicies say: a model of what a network plugin enforces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.manifests.builds import Document
from tests.manifests.reading import of_kind, pod_templates

NAME = "app.kubernetes.io/name"


@dataclass(frozen=True)
class Pod:
    """Someone with labels in a namespace; without a namespace no pod at all, such as the API server."""

    namespace: str
    labels: tuple[tuple[str, str], ...] = ()


PICKER = Pod("inference", ((NAME, "picker"),))
ENGINE = Pod("inference", (("inference-serving", "true"),))
REDIS = Pod("inference", ((NAME, "redis"),))
GATEWAY_HERE = Pod("inference", (("gateway.networking.k8s.io/gateway-name", "inference"),))
CONTROLLERS = tuple(
    Pod(name) for name in ("envoy-gateway-system", "istio-system", "kgateway-system", "agentgateway-system")
)
PROMETHEUS = Pod("monitoring", ((NAME, "prometheus"),))
DNS = Pod("kube-system", (("k8s-app", "kube-dns"),))
OTHER_SYSTEM = Pod("kube-system", (("k8s-app", "dashboard"),))
API_SERVER = Pod("")
STRANGER = Pod("default", ((NAME, "picker"),))
NEIGHBOUR = Pod("inference", ((NAME, "notebook"),))


def reaches(documents: list[Document], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection passes the policies of both ends."""
    policies = [each["spec"] for each in of_kind(documents, "NetworkPolicy")]
    return _passes(policies, "Egress", source, target, port, protocol) and _passes(
        policies, "Ingress", target, source, port, protocol
    )


def _passes(policies: list[Document], direction: str, subject: Pod, peer: Pod, port: int, protocol: str) -> bool:
    """Policies add up; a pod that none selects is open."""
    mine = [
        policy
        for policy in policies
        if subject.namespace == "inference"
        and direction in _types(policy)
        and _selects(policy["podSelector"], dict(subject.labels))
    ]
    side = "to" if direction == "Egress" else "from"
    return not mine or any(
        (side not in rule or any(_is_peer(each, peer) for each in rule[side]))
        and ("ports" not in rule or any(_is_port(each, port, protocol) for each in rule["ports"]))
        for policy in mine
        for rule in policy.get(direction.lower(), ())
    )


def _types(policy: Document) -> list[str]:
    implied = ["Ingress", "Egress"] if policy.get("egress") else ["Ingress"]
    types: list[str] = policy.get("policyTypes", implied)
    return types


def _is_port(rule: Mapping[str, Any], port: int, protocol: str) -> bool:
    return rule.get("protocol", "TCP") == protocol and rule.get("port", port) == port


def _is_peer(rule: Mapping[str, Any], peer: Pod) -> bool:
    if not rule:
        raise ValueError("the API server takes no peer without a selector")
    if not peer.namespace:
        return False
    spaces = {"kubernetes.io/metadata.name": peer.namespace}
    here = _selects(rule["namespaceSelector"], spaces) if "namespaceSelector" in rule else peer.namespace == "inference"
    return here and ("podSelector" not in rule or _selects(rule["podSelector"], dict(peer.labels)))


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        labels.get(each["key"]) in each.get("values", ()) for each in selector.get("matchExpressions", ())
    )


def network(documents: list[Document]) -> Iterator[str]:
    """Everybody who has to reaches whom they have to, and nobody else."""
    yes: list[tuple[Pod, Pod, int, str]] = []
    no: list[tuple[Pod, Pod, int, str]] = []
    deployments = pod_templates(documents)
    if "picker" in deployments:
        yes += [(each, PICKER, 9002, "TCP") for each in (GATEWAY_HERE, *CONTROLLERS)]
        yes += [(PROMETHEUS, PICKER, 9090, "TCP")]
        yes += [(PICKER, DNS, 53, protocol) for protocol in ("UDP", "TCP")]
        yes += [(PICKER, API_SERVER, port, "TCP") for port in (443, 6443)]
        yes += [(PICKER, ENGINE, port, "TCP") for port in (8000, 5557, 5558, 9000)]
        no += [(each, PICKER, 9003, "TCP") for each in (GATEWAY_HERE, PROMETHEUS, STRANGER, *CONTROLLERS)]
        no += [(each, PICKER, 9090, "TCP") for each in (GATEWAY_HERE, STRANGER, *CONTROLLERS)]
        no += [(each, PICKER, 9002, "TCP") for each in (STRANGER, PROMETHEUS)]
        no += [(PICKER, STRANGER, 8000, "TCP"), (PICKER, OTHER_SYSTEM, 53, "UDP"), (PICKER, Pod("default"), 53, "UDP")]
        no += [
            (PICKER, Pod("default", DNS.labels), 53, "UDP"),
            (PICKER, NEIGHBOUR, 22, "TCP"),
            (PICKER, DNS, 22, "TCP"),
            (PICKER, DNS, 22, "UDP"),
        ]
    if "redis" in deployments:
        yes += [(PICKER, REDIS, 6379, "TCP"), (ENGINE, REDIS, 6379, "TCP")]
        no += [(each, REDIS, 6379, "TCP") for each in (STRANGER, NEIGHBOUR, PROMETHEUS)]
        no += [(PICKER, NEIGHBOUR, 6379, "TCP"), (ENGINE, REDIS, 22, "TCP"), (PICKER, REDIS, 22, "TCP")]
    if "vllm" in deployments:
        yes += [(PICKER, ENGINE, port, "TCP") for port in (8000, 5557, 5558, 9000)]
        yes += [(each, ENGINE, 8000, "TCP") for each in (GATEWAY_HERE, PROMETHEUS, *CONTROLLERS)]
        yes += [(PROMETHEUS, ENGINE, 9000, "TCP")]
        no += [(each, ENGINE, port, "TCP") for each in (STRANGER, NEIGHBOUR) for port in (5557, 5558, 9000)]
        no += [(PROMETHEUS, ENGINE, port, "TCP") for port in (5557, 5558)]
    for wanted, cases in ((True, yes), (False, no)):
        for source, target, port, protocol in cases:
            if reaches(documents, source, target, port, protocol) is not wanted:
                yield f"{source} {'does not reach' if wanted else 'reaches'} {target} on {protocol} {port}"
