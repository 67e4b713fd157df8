"""The tests of the manifests would notice: each field that is taken away from what gateways read makes one fail.

Fields that are not missed are listed with why.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from tests.manifests.builds import Document, build, identity, schema_problems
from tests.manifests.rules import problems

BUILDS = {
    "envoy-gateway": (
        *(
            "GatewayClass",
            "Gateway",
            "HTTPRoute",
            "ClientTrafficPolicy",
            "BackendTrafficPolicy",
            "EnvoyExtensionPolicy",
        ),
        *("Service", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding", "ServiceAccount", "ConfigMap"),
        "Deployment",
    ),
    "inference-pool": ("InferencePool", "HTTPRoute", "Service", "Deployment"),
    "istio": ("DestinationRule",),
    "production": ("BackendTLSPolicy", "Certificate", "Issuer", "ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "redis": ("Service", "NetworkPolicy", "Deployment"),
    "demo": ("Deployment", "Service"),
}
NOT_MISSED = {
    "*/metadata/labels*": "labels of objects are for people; those of pods are under spec",
    "Deployment/*/metadata/labels/*-type": "engines are taken for vLLM",
    "Gateway/*/allowedRoutes*": "Same is the default, said for readers",
    "EnvoyExtensionPolicy/*/healthCheck/active/timeout": "1s is the default",
    "EnvoyExtensionPolicy/*/healthCheck/active/interval": "3s is the default, hardly slower",
    "EnvoyExtensionPolicy/*/healthCheck/active/*Threshold": "3 and 1 are the defaults, hardly slower",
    "EnvoyExtensionPolicy/*/backendSettings/timeout*": "10s is the default; health checks notice before",
    "InferencePool/*/endpointPickerRef/group": "the core group is the default",
    "InferencePool/*/endpointPickerRef/kind": "Service is the default",
    "InferencePool/*/endpointPickerRef/failureMode": "FailClose is the default: safe, though not as shipped",
    "Certificate/*/privateKey*": "RSA is the default, and as good",
    "Certificate/*/duration": "90 days is the default",
    "Certificate/*/commonName": "a name for people",
    "Certificate/*/dnsNames/*": "names that other clients may ask for",
    "Certificate/*/issuerRef/group": "cert-manager.io is the default",
    "Certificate/*/issuerRef/kind": "Issuer is the default",
    "ServiceMonitor/*/path": "/metrics is the default",
    "PodMonitor/*/path": "/metrics is the default",
    "*Monitor/*/interval": "that of Prometheus is the default",
    "PrometheusRule/*/for": "0s is the default",
    "PrometheusRule/*/rules/[0-9]": "the documentation has the list",
    "PrometheusRule/*/rules/[0-9][0-9]": "the documentation has the list",
    "Deployment/*/revisionHistoryLimit": "10 is the default",
    "Deployment/*/maxSurge": "25 % is the default, which is 1",
    "Deployment/*/enableServiceLinks": "the environment gets more variables",
    "Deployment/*/topologySpreadConstraints*": "the scheduler spreads by default, less strictly",
    "Deployment/*/fsGroup": "tokens are readable without it",
    "Deployment/*/runAsGroup": "that of the image is the default",
    "Deployment/*Probe*": "probes are tested against a picker that runs",
    "Deployment/*/sizeLimit": "the node's memory is the default",
    "Deployment/*/readOnly": "such volumes are read-only anyway",
    "Deployment/*/name": "names without which the API server takes none are in the schema",
    "Deployment/redis/*": "an example",
    "Deployment/envoy/*": "tested as a bootstrap",
    "Deployment/engine-sim/*": "tested by its arguments",
    "ConfigMap/envoy*": "tested as a bootstrap",
    "Deployment/picker/*/emptyDir": "is what a volume is that says nothing",
    "Deployment/picker/*/args/4": "--pool-name implies TLS; said for readers",
    "NetworkPolicy/*/policyTypes": "implied by the rules",
    "NetworkPolicy/redis/*/policyTypes/0": "Ingress is implied",
    "NetworkPolicy/picker-redis/*/ports*": "the policy of Redis lets in no other port",
    "NetworkPolicy/*/protocol": "TCP is the default",
    "Service/*/targetPort": "the port is the default, and the same number",
    "Service/model-servers*/name": "a single port needs no name",
    "Service/model-servers*/appProtocol": "HTTP/1.1 is the default",
    "Service/inference/*": "how clients reach Envoy is theirs to say",
    "Service/redis-server/*/name": "a single port needs no name",
    "Service/picker/spec/ports/1/appProtocol": "HTTP/1.1 is the default",
    "RoleBinding/*/namespace": "that of the binding is the default",
    "*/subjects/0/namespace": "that of the binding is the default",
}


def fields(node: object, path: str = "") -> Iterator[str]:
    """The paths of all fields and list entries."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        here = f"{path}/{str(key).replace('/', '~')}"
        yield here
        yield from fields(value, here)


def without(document: Document, path: str) -> Document:
    """A copy without one field."""
    changed = copy.deepcopy(document)
    *way, last = path.strip("/").split("/")
    node = changed
    for key in way:
        node = node[int(key)] if isinstance(node, list) else node[key.replace("~", "/")]
    del node[int(last) if isinstance(node, list) else last.replace("~", "/")]
    return changed


def is_noticed(documents: list[Document], index: int, changed: Document) -> bool:
    try:
        return bool(schema_problems(changed) or problems([*documents[:index], changed, *documents[index + 1 :]]))
    except (KeyError, TypeError, ValueError, AssertionError, AttributeError, SystemExit):
        return True  # it is so broken that the tests of the whole would fail


@pytest.mark.parametrize("name", BUILDS)
def test_every_field_is_missed(name):
    documents = build(name)
    unnoticed = []
    for index, document in enumerate(documents):
        if document["kind"] not in BUILDS[name]:
            continue
        for path in fields(document):
            where = identity(document) + path
            if any(fnmatch(where, pattern) for pattern in NOT_MISSED):
                continue
            if not is_noticed(documents, index, without(document, path)):
                unnoticed.append(where)
    assert not unnoticed, "\n".join(unnoticed)
