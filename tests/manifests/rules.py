"""Everything that has to hold of a build. Each rule yields one sentence for each thing that is wrong."""

from __future__ import annotations

from tests.manifests import rules_gateway, rules_objects, rules_pods
from tests.manifests.builds import Document
from tests.manifests.network import network

RULES = (
    rules_objects.references,
    rules_objects.services,
    rules_objects.namespaces,
    rules_objects.ports,
    rules_objects.selectors,
    rules_objects.access,
    rules_objects.plain_envoy,
    rules_objects.redis,
    rules_objects.monitors,
    rules_gateway.early_removal,
    rules_gateway.external_processing,
    rules_gateway.backend_traffic,
    rules_gateway.routes,
    rules_gateway.encryption,
    rules_pods.pod_security,
    rules_pods.draining,
    rules_pods.memory,
    rules_pods.own_name,
    rules_pods.scratch,
    network,
)


def problems(documents: list[Document]) -> list[str]:
    """Everything that is wrong with a build."""
    return [problem for rule in RULES for problem in rule(documents)]
