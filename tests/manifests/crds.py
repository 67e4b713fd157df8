"""Schemas of the custom resources that the manifests use, strict, and no wider than what is used of them.

Fields, types and bounds as their owners' references state them: Gateway API 1.4, Envoy Gateway 1.5 to 1.9, Gateway API
Inference Extension 1.x, Prometheus operator 0.8x, cert-manager 1.x, Istio 1.2x. A field that is required here is one
without which the object means something else, or is refused.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
BOOLEAN: Schema = {"type": "boolean"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 4294967295}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
QUANTITY: Schema = {"type": "string", "pattern": r"^[1-9]+[0-9]*([kMGTP]i?)?$"}
LABELS: Schema = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}
ANYTHING: Schema = {}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def some(items: Schema, most: int = 16, least: int = 1) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def fields(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def resource(api_version: str, kind: str, spec: Schema, namespaced: bool = True) -> tuple[tuple[str, str], Schema]:
    metadata = fields({"name": TEXT} | ({"namespace": TEXT} if namespaced else {}), {"labels": LABELS})
    schema = fields(
        {"apiVersion": one_of(api_version), "kind": one_of(kind), "metadata": metadata, "spec": spec},
    )
    return (api_version, kind), schema


GATEWAY = "gateway.networking.k8s.io"
ENVOY = "gateway.envoyproxy.io/v1alpha1"
POOL = "inference.networking.k8s.io"

TARGET = fields({"group": one_of(GATEWAY), "kind": one_of("Gateway", "HTTPRoute"), "name": TEXT})
SERVICE = fields({"group": one_of(""), "kind": one_of("Service"), "name": TEXT, "port": PORT})
CIRCUIT_BREAKER = fields(
    {"maxPendingRequests": COUNT, "maxParallelRequests": COUNT}, {"maxConnections": COUNT, "maxParallelRetries": COUNT}
)

SCHEMAS: dict[tuple[str, str], Schema] = dict(
    [
        resource(
            f"{GATEWAY}/v1",
            "GatewayClass",
            fields({"controllerName": {"type": "string", "pattern": r"^[a-z0-9.-]+/[A-Za-z0-9/._~%!$&'()*+,;=:-]+$"}}),
            namespaced=False,
        ),
        resource(
            f"{GATEWAY}/v1",
            "Gateway",
            fields(
                {
                    "gatewayClassName": TEXT,
                    "listeners": some(
                        fields(
                            {"name": TEXT, "protocol": one_of("HTTP", "HTTPS"), "port": PORT},
                            {"allowedRoutes": fields({"namespaces": fields({"from": one_of("Same", "All")})})},
                        ),
                        most=64,
                    ),
                }
            ),
        ),
        resource(
            f"{GATEWAY}/v1",
            "HTTPRoute",
            fields(
                {
                    "parentRefs": some(fields({"group": one_of(GATEWAY), "kind": one_of("Gateway"), "name": TEXT})),
                    "rules": some(
                        fields(
                            {
                                "matches": some(
                                    fields({"path": fields({"type": one_of("PathPrefix"), "value": TEXT})}), most=64
                                ),
                                "timeouts": fields({"request": DURATION}),
                                "backendRefs": some(
                                    {
                                        "oneOf": [
                                            fields({"name": TEXT, "port": PORT}),
                                            fields(
                                                {"group": one_of(POOL), "kind": one_of("InferencePool"), "name": TEXT}
                                            ),
                                        ]
                                    }
                                ),
                            }
                        )
                    ),
                }
            ),
        ),
        resource(
            f"{GATEWAY}/v1",
            "BackendTLSPolicy",
            fields(
                {
                    "targetRefs": some(
                        fields({"group": one_of(""), "kind": one_of("Service"), "name": TEXT, "sectionName": TEXT})
                    ),
                    "validation": fields(
                        {
                            "caCertificateRefs": some(
                                fields({"group": one_of(""), "kind": one_of("ConfigMap", "Secret"), "name": TEXT}),
                                most=8,
                            ),
                            "hostname": TEXT,
                        }
                    ),
                }
            ),
        ),
        resource(
            ENVOY,
            "ClientTrafficPolicy",
            fields(
                {
                    "targetRefs": some(TARGET),
                    "connection": fields({"bufferLimit": QUANTITY}),
                    "headers": fields({"earlyRequestHeaders": fields({"remove": some(TEXT)})}),
                }
            ),
        ),
        resource(
            ENVOY,
            "BackendTrafficPolicy",
            fields(
                {
                    "targetRefs": some(TARGET),
                    "loadBalancer": fields(
                        {
                            "type": one_of("LeastRequest", "RoundRobin", "Random"),
                            "endpointOverride": fields({"extractFrom": some(fields({"header": TEXT}), most=10)}),
                        }
                    ),
                    "timeout": fields(
                        {
                            "http": fields({"requestTimeout": DURATION}, {"connectionIdleTimeout": DURATION}),
                        },
                        {"tcp": fields({"connectTimeout": DURATION})},
                    ),
                    "retry": fields(
                        {
                            "numRetries": COUNT,
                            "retryOn": fields(
                                {
                                    "triggers": some(
                                        one_of("connect-failure", "refused-stream", "reset", "gateway-error")
                                    )
                                }
                            ),
                        }
                    ),
                    "circuitBreaker": CIRCUIT_BREAKER,
                }
            ),
        ),
        resource(
            ENVOY,
            "EnvoyExtensionPolicy",
            fields(
                {
                    "targetRefs": some(TARGET),
                    "extProc": some(
                        fields(
                            {
                                "backendRefs": some(SERVICE),
                                "backendSettings": fields(
                                    {
                                        "circuitBreaker": CIRCUIT_BREAKER,
                                        "healthCheck": fields(
                                            {
                                                "active": fields(
                                                    {"type": one_of("GRPC"), "grpc": fields({"service": TEXT})},
                                                    {
                                                        "timeout": DURATION,
                                                        "interval": DURATION,
                                                        "unhealthyThreshold": COUNT,
                                                        "healthyThreshold": COUNT,
                                                    },
                                                ),
                                                "panicThreshold": {"type": "integer", "minimum": 0, "maximum": 100},
                                            }
                                        ),
                                        "connection": fields({"bufferLimit": QUANTITY}),
                                    },
                                    {"timeout": fields({"tcp": fields({"connectTimeout": DURATION})})},
                                ),
                                "messageTimeout": DURATION,
                                "failOpen": BOOLEAN,
                                "processingMode": fields(
                                    {
                                        "request": fields(
                                            {
                                                "body": one_of(
                                                    "Streamed", "Buffered", "BufferedPartial", "FullDuplexStreamed"
                                                )
                                            }
                                        ),
                                        "response": fields(
                                            {
                                                "attributes": some(
                                                    {
                                                        "type": "string",
                                                        "pattern": r"^(connection\.|source\.|destination\.|request\.|"
                                                        r"response\.|upstream\.|xds\.route_)[a-z_1-9]*$",
                                                    }
                                                )
                                            },
                                            {"body": one_of("Streamed", "Buffered", "FullDuplexStreamed")},
                                        ),
                                    },
                                    {"allowModeOverride": BOOLEAN},
                                ),
                                "metadata": fields(
                                    {"accessibleNamespaces": some(TEXT), "writableNamespaces": some(TEXT, most=8)}
                                ),
                            }
                        )
                    ),
                }
            ),
        ),
        resource(
            f"{POOL}/v1",
            "InferencePool",
            fields(
                {
                    "selector": fields({"matchLabels": LABELS}),
                    "targetPorts": some(fields({"number": PORT}), most=8) | {"uniqueItems": True},
                    "endpointPickerRef": fields(
                        {
                            "name": TEXT,
                            "port": fields({"number": PORT}),
                        },
                        {
                            "group": one_of(""),
                            "kind": one_of("Service"),
                            "failureMode": one_of("FailOpen", "FailClose"),
                        },
                    ),
                },
                {"appProtocol": one_of("http", "kubernetes.io/h2c")},
            ),
        ),
        resource(
            "networking.istio.io/v1",
            "DestinationRule",
            fields(
                {
                    "host": TEXT,
                    "trafficPolicy": fields(
                        {"tls": fields({"mode": one_of("SIMPLE"), "insecureSkipVerify": one_of(True)})}
                    ),
                }
            ),
        ),
        resource(
            "monitoring.coreos.com/v1",
            "ServiceMonitor",
            fields(
                {
                    "selector": fields({"matchLabels": LABELS}),
                    "endpoints": some(fields({"port": TEXT}, {"path": TEXT, "interval": DURATION})),
                }
            ),
        ),
        resource(
            "monitoring.coreos.com/v1",
            "PodMonitor",
            fields(
                {
                    "selector": fields({"matchLabels": LABELS}),
                    "podMetricsEndpoints": some(
                        fields(
                            {"portNumber": PORT},
                            {
                                "path": TEXT,
                                "interval": DURATION,
                                "metricRelabelings": some(
                                    fields({"action": one_of("keep"), "sourceLabels": some(TEXT), "regex": TEXT})
                                ),
                            },
                        )
                    ),
                }
            ),
        ),
        resource(
            "monitoring.coreos.com/v1",
            "PrometheusRule",
            fields(
                {
                    "groups": some(
                        fields(
                            {
                                "name": TEXT,
                                "rules": some(
                                    fields(
                                        {"alert": TEXT, "expr": TEXT, "labels": LABELS, "annotations": LABELS},
                                        {"for": DURATION},
                                    ),
                                    most=100,
                                ),
                            }
                        )
                    )
                }
            ),
        ),
        resource(
            "cert-manager.io/v1",
            "Issuer",
            {"oneOf": [fields({"selfSigned": fields({})}), fields({"ca": fields({"secretName": TEXT})})]},
        ),
        resource(
            "cert-manager.io/v1",
            "Certificate",
            fields(
                {
                    "secretName": TEXT,
                    "issuerRef": fields(
                        {"name": TEXT}, {"group": one_of("cert-manager.io"), "kind": one_of("Issuer", "ClusterIssuer")}
                    ),
                },
                {
                    "isCA": BOOLEAN,
                    "commonName": TEXT,
                    "dnsNames": some(TEXT),
                    "duration": DURATION,
                    "usages": some(one_of("server auth", "digital signature", "key encipherment")),
                    "privateKey": fields(
                        {"algorithm": one_of("ECDSA", "RSA", "Ed25519")},
                        {"size": COUNT, "rotationPolicy": one_of("Always", "Never")},
                    ),
                },
            ),
        ),
    ]
)
"""By `apiVersion` and `kind`."""
