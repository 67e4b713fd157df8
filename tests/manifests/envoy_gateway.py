"""What Envoy Gateway makes of the manifests: the configuration of its Envoy, from the fields that they have.

Written after the translations that Envoy Gateway's own tests expect (1.5 to 1.9). Endpoints are static here, where they
come from EndpointSlices there. Nothing of the shipped manifests is repeated: take a field away, and it is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.manifests.builds import Document, one
from tests.manifests.reading import dig, seconds, size

TYPE = "type.googleapis.com/envoy"
FILTER = "envoy.filters.http.ext_proc/envoyextensionpolicy/inference/picker/extproc/0"
DEFAULT_BUFFER = 32_768
BODY_MODES = {
    None: "NONE",
    "Streamed": "STREAMED",
    "Buffered": "BUFFERED",
    "BufferedPartial": "BUFFERED_PARTIAL",
    "FullDuplexStreamed": "FULL_DUPLEX_STREAMED",
}


def bootstrap(
    documents: list[Document], *, picker: str, endpoints: Sequence[str], grpc_timeout: str = "10s"
) -> dict[str, Any]:
    """A bootstrap with the route of the manifests. `grpc_timeout` is fixed there."""
    client = one(documents, "ClientTrafficPolicy", "inference")["spec"]
    manager = {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http-10080",
        "use_remote_address": True,
        "server_header_transformation": "PASS_THROUGH",
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_REDIRECT",
        "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST"},
        "http2_protocol_options": {
            "initial_connection_window_size": 1_048_576,
            "initial_stream_window_size": 65_536,
            "max_concurrent_streams": 100,
        },
        "early_header_mutation_extensions": _early(client),
        "http_filters": [
            {"name": FILTER, "disabled": True, "typed_config": _external_processing(documents, grpc_timeout)},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{TYPE}.extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            },
        ],
        "route_config": {
            "name": "inference/inference/http",
            "virtual_hosts": [{"name": "inference", "domains": ["*"], "routes": [_route(documents)]}],
        },
    }
    listener = {
        "name": "inference/inference/http",
        "address": _address("127.0.0.1:0"),
        "per_connection_buffer_limit_bytes": size(dig(client, "connection", "bufferLimit") or str(DEFAULT_BUFFER)),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    clusters = [_model_servers(documents, endpoints), _picker(documents, picker)]
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _early(client: Document) -> list[dict[str, Any]]:
    removed = dig(client, "headers", "earlyRequestHeaders", "remove")
    if not removed:
        return []
    mutation = {
        "@type": f"{TYPE}.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        "mutations": [{"remove": name} for name in removed],
    }
    return [{"name": "envoy.http.early_header_mutation.header_mutation", "typed_config": mutation}]


def _external_processing(documents: list[Document], grpc_timeout: str) -> dict[str, Any]:
    (processor,) = one(documents, "EnvoyExtensionPolicy", "picker")["spec"]["extProc"]
    mode = processor["processingMode"]
    sides: dict[str, str] = {}
    for side in ("request", "response"):
        body = BODY_MODES[dig(mode, side, "body")]
        sides[f"{side}_header_mode"] = "SEND" if side in mode else "SKIP"
        sides[f"{side}_body_mode"] = body
        sides[f"{side}_trailer_mode"] = "SEND" if body == "FULL_DUPLEX_STREAMED" else "SKIP"
    (backend,) = processor["backendRefs"]
    return {
        "@type": f"{TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "failure_mode_allow": processor.get("failOpen", False),
        "allow_mode_override": mode.get("allowModeOverride", False),
        "grpc_service": {
            "envoy_grpc": {
                "cluster_name": "picker",
                "authority": f"{backend['name']}.inference:{backend['port']}",
            },
            "timeout": grpc_timeout,
        },
        "message_timeout": f"{seconds(processor.get('messageTimeout', '200ms'))}s",
        "processing_mode": sides,
        "request_attributes": dig(mode, "request", "attributes") or [],
        "response_attributes": dig(mode, "response", "attributes") or [],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": dig(processor, "metadata", "accessibleNamespaces") or []},
            "receiving_namespaces": {"untyped": dig(processor, "metadata", "writableNamespaces") or []},
        },
    }


def _route(documents: list[Document]) -> dict[str, Any]:
    (rule,) = one(documents, "HTTPRoute", "inference")["spec"]["rules"]
    (match,) = rule["matches"]
    retry = one(documents, "BackendTrafficPolicy", "inference")["spec"]["retry"]
    return {
        "match": {"prefix": match["path"]["value"]},
        "route": {
            "cluster": "model-servers",
            "timeout": f"{seconds(dig(rule, 'timeouts', 'request') or '15s')}s",
            "retry_policy": {
                "num_retries": retry["numRetries"],
                "retry_on": ",".join(retry["retryOn"]["triggers"]),
                "host_selection_retry_max_attempts": 5,
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {
                            "@type": f"{TYPE}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        },
                    }
                ],
            },
        },
        "typed_per_filter_config": {FILTER: {"@type": f"{TYPE}.config.route.v3.FilterConfig", "config": {}}},
    }


def _model_servers(documents: list[Document], endpoints: Sequence[str]) -> dict[str, Any]:
    spec = one(documents, "BackendTrafficPolicy", "inference")["spec"]
    assert spec["loadBalancer"]["type"] == "LeastRequest"
    least = {"@type": f"{TYPE}.extensions.load_balancing_policies.least_request.v3.LeastRequest"}
    fallback = {"name": "envoy.load_balancing_policies.least_request", "typed_config": least}
    override = {
        "@type": f"{TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"header": source["header"]} for source in spec["loadBalancer"]["endpointOverride"]["extractFrom"]
        ],
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {
        "name": "model-servers",
        "type": "STATIC",
        "load_assignment": _members("model-servers", endpoints),
        "connect_timeout": f"{seconds(dig(spec, 'timeout', 'tcp', 'connectTimeout') or '10s')}s",
        "per_connection_buffer_limit_bytes": DEFAULT_BUFFER,
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "circuit_breakers": _circuit_breaker(spec),
        "typed_extension_protocol_options": _protocol(
            {"http_protocol_options": {}}, dig(spec, "timeout", "http", "connectionIdleTimeout")
        ),
    }


def _picker(documents: list[Document], address: str) -> dict[str, Any]:
    (processor,) = one(documents, "EnvoyExtensionPolicy", "picker")["spec"]["extProc"]
    settings = processor.get("backendSettings", {})
    ports = one(documents, "Service", "picker")["spec"]["ports"]
    (port,) = [each for each in ports if each["port"] == processor["backendRefs"][0]["port"]]
    http2 = port.get("appProtocol") == "kubernetes.io/h2c"
    cluster = {
        "name": "picker",
        "type": "STATIC",
        "load_assignment": _members("picker", [address]),
        "connect_timeout": f"{seconds(dig(settings, 'timeout', 'tcp', 'connectTimeout') or '10s')}s",
        "per_connection_buffer_limit_bytes": size(dig(settings, "connection", "bufferLimit") or str(DEFAULT_BUFFER)),
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": _circuit_breaker(settings),
        "typed_extension_protocol_options": _protocol(
            {"http2_protocol_options" if http2 else "http_protocol_options": {}}, None
        ),
    }
    active = dig(settings, "healthCheck", "active")
    if active:
        check = {
            "timeout": active.get("timeout", "1s"),
            "interval": active.get("interval", "3s"),
            "unhealthy_threshold": active.get("unhealthyThreshold", 3),
            "healthy_threshold": active.get("healthyThreshold", 1),
            "grpc_health_check": {"service_name": active["grpc"]["service"]},
        }
        cluster["health_checks"] = [check]
    if (panic := dig(settings, "healthCheck", "panicThreshold")) is not None:
        cluster["common_lb_config"] = {"healthy_panic_threshold": {"value": panic}}
    return cluster


def _members(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    members = [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": members}]}


def _circuit_breaker(settings: Document) -> dict[str, Any]:
    said = settings.get("circuitBreaker", {})
    names = {
        "max_connections": "maxConnections",
        "max_pending_requests": "maxPendingRequests",
        "max_requests": "maxParallelRequests",
        "max_retries": "maxParallelRetries",
    }
    return {"thresholds": [{ours: said.get(theirs, 1024) for ours, theirs in names.items()}]}


def _protocol(http: dict[str, Any], idle_timeout: str | None) -> dict[str, Any]:
    options = {"@type": f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": http}
    if idle_timeout:
        options["common_http_protocol_options"] = {"idle_timeout": f"{seconds(idle_timeout)}s"}
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}
