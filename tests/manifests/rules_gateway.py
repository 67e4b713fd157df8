"""What gateways enforce with CEL, and what the picker needs of their configuration."""

from __future__ import annotations

from collections.abc import Iterator

from picker.app.config import Config
from picker.app.config_settings import TlsMode
from picker.core.headers import CLIENT_FORBIDDEN, DESTINATION, LB_METADATA, SUBSET_METADATA
from picker.io.transport.health import READINESS_SERVICES
from tests.manifests.builds import Document, identity
from tests.manifests.reading import dig, of_kind, picker_config, pod_templates, seconds, size

ENOUGH_STREAMS = 10_000
"""Requests in flight that a default of 1,024 would not let pass."""


def early_removal(documents: list[Document]) -> Iterator[str]:
    """No client steers: each header that does is removed before any filter, whoever is down."""
    for policy in of_kind(documents, "ClientTrafficPolicy"):
        removed = dig(policy, "spec", "headers", "earlyRequestHeaders", "remove") or ()
        if set(removed) != CLIENT_FORBIDDEN:
            yield f"{identity(policy)} removes {sorted(removed)}"
        if [target.get("kind") for target in dig(policy, "spec", "targetRefs") or ()] != ["Gateway"]:
            yield f"{identity(policy)}: this policy can only target a Gateway or a ListenerSet"
        limit = size(dig(policy, "spec", "connection", "bufferLimit") or "32Ki")
        most = picker_config(documents).listen.max_message_bytes
        if not 2**20 <= limit <= most:
            yield f"{identity(policy)} takes bodies of {limit} bytes; prompts have megabytes, and the picker takes {most}"
    if list(of_kind(documents, "EnvoyExtensionPolicy")) and not list(of_kind(documents, "ClientTrafficPolicy")):
        yield "there is no ClientTrafficPolicy, so that clients choose their endpoints"


def external_processing(documents: list[Document]) -> Iterator[str]:
    """The CRD's CEL rules, and what the picker needs."""
    for policy in of_kind(documents, "EnvoyExtensionPolicy"):
        for processor in dig(policy, "spec", "extProc") or ():
            bodies = {dig(processor, "processingMode", side, "body") for side in ("request", "response")}
            if processor.get("failOpen") and "FullDuplexStreamed" in bodies:
                yield "If FullDuplexStreamed body processing mode is used, FailOpen must be false."
            if "backendRef" in processor:
                yield "BackendRefs must be used, backendRef is not supported."
            for backend in processor.get("backendRefs", ()):
                if backend.get("kind") not in {"Service", "Backend", "ServiceImport"}:
                    yield "BackendRefs only supports Service, ServiceImport, and Backend kind."
            writable = dig(processor, "metadata", "writableNamespaces") or []
            if any(name.startswith("envoy.filters.http") for name in writable):
                yield "writableNamespaces cannot contain well-known Envoy HTTP filter namespaces"
            yield from _as_the_picker_needs_it(processor, picker_config(documents))


def _as_the_picker_needs_it(processor: Document, config: Config) -> Iterator[str]:
    if dig(processor, "processingMode", "request", "body") not in {"Buffered", "FullDuplexStreamed"}:
        yield "the picker does not see the body before the destination is fixed"
    if processor.get("failOpen") is not True:
        yield "requests fail when the picker is down"
    if "upstream.address" not in (dig(processor, "processingMode", "response", "attributes") or ()):
        yield "the picker is not told who answered"
    if LB_METADATA not in (dig(processor, "metadata", "writableNamespaces") or ()):
        yield f"the picker's {LB_METADATA} is dropped"
    missing = {LB_METADATA, SUBSET_METADATA} - set(dig(processor, "metadata", "accessibleNamespaces") or ())
    if missing:
        yield f"the picker does not see {missing}"
    if not seconds(processor.get("messageTimeout")) >= 2 * config.exchange.decision_seconds:
        yield "messageTimeout is too near the picker's own deadline"
    settings = processor.get("backendSettings", {})
    for limit in ("maxParallelRequests", "maxPendingRequests"):
        if (dig(settings, "circuitBreaker", limit) or 0) < ENOUGH_STREAMS:
            yield f"{limit} ends external processing at that many requests in flight"
    active = dig(settings, "healthCheck", "active") or {}
    if (active.get("type") == "GRPC") != ("grpc" in active):
        yield "If Health Checker type is GRPC, grpc field needs to be set."
    if dig(active, "grpc", "service") not in READINESS_SERVICES:
        yield "the health check asks for a service that the picker does not have"
    if dig(settings, "healthCheck", "panicThreshold") != 0:
        yield "with no healthy picker, unhealthy ones are asked"
    if size(dig(settings, "connection", "bufferLimit") or "32Ki") < 2**20:
        yield "bodies are sent to the picker in pieces of 32 KiB"


def backend_traffic(documents: list[Document]) -> Iterator[str]:
    """Requests go where the picker says, else where the fewest are, for as long as they take."""
    for policy in of_kind(documents, "BackendTrafficPolicy"):
        spec = policy["spec"]
        sources = dig(spec, "loadBalancer", "endpointOverride", "extractFrom") or ()
        if [source.get("header") for source in sources] != [DESTINATION]:
            yield f"{identity(policy)} does not obey {DESTINATION}"
        if dig(spec, "loadBalancer", "type") != "LeastRequest":
            yield f"{identity(policy)} does not fall back to the endpoint with the fewest requests"
        if seconds(dig(spec, "timeout", "http", "requestTimeout")) != 0:
            yield f"{identity(policy)} cuts long answers"
        if not 0 < seconds(dig(spec, "timeout", "http", "connectionIdleTimeout")) < 5:
            yield f"{identity(policy)} keeps connections for longer than uvicorn does"
        if not seconds(dig(spec, "timeout", "tcp", "connectTimeout")) <= 2:
            yield f"{identity(policy)} waits long for an endpoint that is gone"
        if not (dig(spec, "retry", "numRetries") or 0) >= picker_config(documents).exchange.fallbacks:
            yield f"{identity(policy)} does not try all of the picker's fallbacks"
        triggers = set(dig(spec, "retry", "retryOn", "triggers") or ())
        if triggers != {"connect-failure", "refused-stream"}:
            yield f"{identity(policy)} computes prompts twice, or does not retry at all: {triggers}"
        for limit in ("maxConnections", "maxParallelRequests", "maxPendingRequests"):
            if (dig(spec, "circuitBreaker", limit) or 0) < ENOUGH_STREAMS:
                yield f"{identity(policy)}: {limit} ends service at that many requests in flight"
        if (dig(spec, "circuitBreaker", "maxParallelRetries") or 0) < 100:
            yield f"{identity(policy)}: too few retries at one time"
        if [target.get("kind") for target in dig(spec, "targetRefs") or ()] != ["HTTPRoute"]:
            yield f"{identity(policy)} does not belong to the route"


def routes(documents: list[Document]) -> Iterator[str]:
    """Every path is routed, and no timer ends a long answer."""
    for route in of_kind(documents, "HTTPRoute"):
        for rule in route["spec"].get("rules", ()):
            if seconds(dig(rule, "timeouts", "request")) != 0:
                yield f"{identity(route)} cuts long answers"
            if [dig(match, "path", "value") for match in rule.get("matches", ())] != ["/"]:
                yield f"{identity(route)} does not take every path"


def encryption(documents: list[Document]) -> Iterator[str]:
    """Gateways of InferencePools connect with TLS; where a certificate is checked it has the name that is asked for."""
    if "picker" not in pod_templates(documents):
        return
    tls = picker_config(documents).listen.tls
    if list(of_kind(documents, "InferencePool", "DestinationRule")) and tls.mode is TlsMode.OFF:
        yield "the gateway connects with TLS, and the picker does not speak it"
    policies_of_tls = list(of_kind(documents, "BackendTLSPolicy"))
    if bool(policies_of_tls) != (tls.mode is TlsMode.FILES):
        yield f"the picker's certificate is {tls.mode}, and {len(policies_of_tls)} policies check it"
    certificates = {each["spec"].get("secretName"): each for each in of_kind(documents, "Certificate")}
    for policy in policies_of_tls:
        names = dig(certificates.get("picker-tls"), "spec", "dnsNames") or ()
        if dig(policy, "spec", "validation", "hostname") not in names:
            yield f"{identity(policy)} asks for a name that is not among {names}"
        if "server auth" not in (dig(certificates.get("picker-tls"), "spec", "usages") or ()):
            yield "the certificate is not one of a server"
        for authority in dig(policy, "spec", "validation", "caCertificateRefs") or ():
            if dig(certificates.get(authority.get("name")), "spec", "isCA") is not True:
                yield f"{authority.get('name')} is no authority"
    issuers = {each["metadata"]["name"]: each for each in of_kind(documents, "Issuer")}
    for certificate in certificates.values():
        issuer = issuers.get(dig(certificate, "spec", "issuerRef", "name"))
        if issuer is None:
            yield f"{identity(certificate)} has no issuer"
        elif (secret := dig(issuer, "spec", "ca", "secretName")) is not None and secret not in certificates:
            yield f"{identity(issuer)} issues by {secret}, which nobody makes"
    for rule in of_kind(documents, "DestinationRule"):
        if rule["spec"].get("host") != "picker.inference.svc.cluster.local":
            yield f"{identity(rule)} is about another host"
