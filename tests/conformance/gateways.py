"""What gateways make of InferencePools and HTTPRoutes: configurations of a real Envoy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from picker.app.envoy import Template, bootstrap, connection_manager
from picker.core.exchange.events import BodyMode
from tests.manifests import envoy_gateway as translation
from tests.manifests.builds import build

Json = dict[str, Any]

TYPE = "type.googleapis.com/envoy.extensions.filters.http"
EXT_PROC = "envoy.filters.http.ext_proc"
SERVED = "x-gateway-destination-endpoint-served"
UPSTREAM = "x-upstream"
DUPLEX = BodyMode.FULL_DUPLEX_STREAMED


def buffered(picker: str, endpoints: Sequence[str]) -> Json:
    """As shipped, for plain Envoy; it fails open."""
    return bootstrap(Template.BUFFERED, picker=picker, endpoints=endpoints)


def full_duplex(picker: str, endpoints: Sequence[str]) -> Json:  # noqa: ARG001  it connects wherever the picker says
    """As shipped, and as most gateways do it; it fails closed."""
    return bootstrap(Template.FULL_DUPLEX, picker=picker)


def full_duplex_that_fails_open(picker: str, endpoints: Sequence[str]) -> Json:
    """Full duplex towards endpoints that Envoy knows, for a pool with `failureMode: FailOpen`."""
    return bootstrap(Template.BUFFERED, picker=picker, endpoints=endpoints, request_body=DUPLEX, response_body=DUPLEX)


def envoy_gateway(picker: str, endpoints: Sequence[str]) -> Json:
    """What Envoy Gateway makes of `manifests/overlays/envoy-gateway`; it fails open."""
    return translation.bootstrap(build("envoy-gateway"), picker=picker, endpoints=endpoints)


Gateway = Callable[[str, Sequence[str]], Json]
GATEWAYS = (buffered, full_duplex, full_duplex_that_fails_open, envoy_gateway)
FAIL_OPEN = (buffered, full_duplex_that_fails_open, envoy_gateway)


def telling_who_served(config: Json) -> Json:
    """The gateway names the endpoint that served as the protocol wants it, in metadata, and in no other way."""
    manager = connection_manager(config)
    (ext_proc,) = [one for one in manager["http_filters"] if one["name"].startswith(EXT_PROC)]
    ext_proc["typed_config"].pop("response_attributes")
    rule = {
        "header": UPSTREAM,
        "on_header_present": {"metadata_namespace": "envoy.lb", "key": SERVED, "type": "STRING"},
        "remove": True,
    }
    settings = {"@type": f"{TYPE}.header_to_metadata.v3.Config", "response_rules": [rule]}
    # Filters see responses in the opposite order: this one before ext_proc.
    manager["http_filters"].insert(-1, {"name": "envoy.filters.http.header_to_metadata", "typed_config": settings})
    header = {"key": UPSTREAM, "value": "%UPSTREAM_REMOTE_ADDRESS%"}
    for host in manager["route_config"]["virtual_hosts"]:
        host["response_headers_to_add"] = [{"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    return config


def speaking_h2c(config: Json) -> Json:
    """For a pool with `appProtocol: kubernetes.io/h2c`."""
    (endpoints,) = [one for one in config["static_resources"]["clusters"] if one["name"] != "picker"]
    (options,) = endpoints["typed_extension_protocol_options"].values()
    options["explicit_http_config"] = {"http2_protocol_options": {}}
    return config


class Backend(NamedTuple):
    """An InferencePool as a route refers to it, with its own picker."""

    name: str
    picker: str
    endpoints: Sequence[str]


class Rule(NamedTuple):
    """A rule of an HTTPRoute. `backends` are names and weights."""

    prefix: str
    backends: dict[str, int]


def routes(template: Template, backends: Sequence[Backend], rules: Sequence[Rule]) -> Json:
    """One gateway with a route to several pools. Each pool has a cluster, and a filter configuration with its picker."""
    config = bootstrap(template, picker="127.0.0.1:9", endpoints=["127.0.0.1:9"])
    resources = config["static_resources"]
    originals = {cluster["name"]: cluster for cluster in resources["clusters"]}
    resources["clusters"] = []
    per_pool = {}
    manager = connection_manager(config)
    shipped = manager["http_filters"][0]["typed_config"]
    for backend in backends:
        inference, picker = deepcopy(originals["inference"]), deepcopy(originals["picker"])
        inference["name"], picker["name"] = backend.name, f"{backend.name}-picker"
        _place(picker, [backend.picker])
        if "load_assignment" in inference:
            _place(inference, backend.endpoints)
        resources["clusters"] += [inference, picker]
        service = deepcopy(shipped["grpc_service"])
        service["envoy_grpc"]["cluster_name"] = picker["name"]
        override = {"@type": f"{TYPE}.ext_proc.v3.ExtProcPerRoute", "overrides": {"grpc_service": service}}
        per_pool[backend.name] = {EXT_PROC: override}
    shipped["grpc_service"]["envoy_grpc"]["cluster_name"] = f"{backends[0].name}-picker"
    (host,) = manager["route_config"]["virtual_hosts"]
    (original,) = host["routes"]
    host["routes"] = [_rule(rule, original["route"], per_pool) for rule in rules]
    return config


def _rule(rule: Rule, shipped: Json, per_pool: Json) -> Json:
    action = {name: value for name, value in shipped.items() if name != "cluster"}
    clusters = [
        {"name": name, "weight": weight, "typed_per_filter_config": per_pool[name]}
        for name, weight in rule.backends.items()
    ]
    return {"match": {"prefix": rule.prefix}, "route": {**action, "weighted_clusters": {"clusters": clusters}}}


def _place(cluster: Json, addresses: Sequence[str]) -> None:
    members = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        members.append({"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}})
    cluster["load_assignment"] = {"cluster_name": cluster["name"], "endpoints": [{"lb_endpoints": members}]}
