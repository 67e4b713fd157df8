"""That the objects of a build agree with each other: names, ports, labels, namespaces, access."""

from __future__ import annotations

from collections.abc import Iterator

from picker.app.config import Config
from picker.app.config_settings import TlsMode
from tests.manifests.builds import Document, identity
from tests.manifests.reading import dig, of_kind, picker_config, pod_templates


def references(documents: list[Document]) -> Iterator[str]:
    """Everything that is named is there, in the same namespace, and by the right kind and port."""
    there = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    for document in documents:
        for kind, name, port in _references(document):
            found = there.get((kind, name))
            if found is None and (kind, name) not in _BROUGHT_ALONG:
                yield f"{identity(document)} refers to {kind}/{name}, which is not there"
            elif found is not None and kind == "Service" and port not in (None, *_ports(found)):
                yield f"{identity(document)} refers to port {port} of {kind}/{name}, which has {_ports(found)}"


_BROUGHT_ALONG = {
    ("Secret", "redis"),  # made by hand
    ("Secret", "picker-tls"),  # made by cert-manager
    ("Secret", "picker-ca"),
    ("Gateway", "inference"),  # of the InferencePool's user
}


def _ports(service: Document) -> list[object]:
    return [value for port in service["spec"]["ports"] for value in (port.get("name"), port.get("port"))]


def _references(document: Document) -> Iterator[tuple[str, str, object]]:
    spec = document.get("spec", {})
    match document["kind"]:
        case "Gateway":
            yield "GatewayClass", spec.get("gatewayClassName"), None
        case "HTTPRoute":
            for parent in spec.get("parentRefs", ()):
                yield parent.get("kind"), parent.get("name"), None
            for rule in spec.get("rules", ()):
                for backend in rule.get("backendRefs", ()):
                    yield backend.get("kind", "Service"), backend.get("name"), backend.get("port")
        case "ClientTrafficPolicy" | "BackendTrafficPolicy" | "EnvoyExtensionPolicy" | "BackendTLSPolicy":
            for target in spec.get("targetRefs", ()):
                yield target.get("kind"), target.get("name"), target.get("sectionName")
            for processor in spec.get("extProc", ()):
                for backend in processor.get("backendRefs", ()):
                    yield backend.get("kind"), backend.get("name"), backend.get("port")
            for authority in dig(spec, "validation", "caCertificateRefs") or ():
                yield authority.get("kind"), authority.get("name"), None
        case "InferencePool":
            picker = spec.get("endpointPickerRef", {})
            yield "Service", picker.get("name"), dig(picker, "port", "number")
        case "RoleBinding":
            yield "Role", document["roleRef"].get("name"), None
            for subject in document.get("subjects", ()):
                yield subject.get("kind"), subject.get("name"), None
        case "Deployment":
            pod = spec["template"]["spec"]
            if "serviceAccountName" in pod:
                yield "ServiceAccount", pod["serviceAccountName"], None
            for volume in pod.get("volumes", ()):
                for kind, path in (("ConfigMap", ("configMap", "name")), ("Secret", ("secret", "secretName"))):
                    if name := dig(volume, *path):
                        yield kind, name, None
            for container in pod["containers"]:
                for variable in container.get("env", ()):
                    if name := dig(variable, "valueFrom", "secretKeyRef", "name"):
                        yield "Secret", name, None


def services(documents: list[Document]) -> Iterator[str]:
    """Selectors find pods, and target ports are ports of theirs, by the same numbers."""
    templates = pod_templates(documents)
    for service in of_kind(documents, "Service"):
        selector = service["spec"].get("selector") or {"": ""}
        chosen = [each for each in templates.values() if selector.items() <= each["metadata"]["labels"].items()]
        if not chosen and selector != {"inference-serving": "true"}:
            yield f"{identity(service)} selects no pod of the build"
        for template in chosen:
            open_ports = [port for each in template["spec"]["containers"] for port in each.get("ports", ())]
            names = {port.get("name"): port["containerPort"] for port in open_ports}
            for port in service["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                if target not in names and target not in names.values():
                    yield f"{identity(service)} sends to {target}, and its pods listen on {names}"


def namespaces(documents: list[Document]) -> Iterator[str]:
    """Gateways take an InferencePool's picker, and a policy's target, only from their own namespace."""
    for document in documents:
        if (
            document["kind"] not in {"Namespace", "GatewayClass"}
            and document["metadata"].get("namespace") != "inference"
        ):
            yield f"{identity(document)} is not in the namespace of the others"


def ports(documents: list[Document]) -> Iterator[str]:
    """Pods, Service, NetworkPolicy and configuration say the same ports, and the same of TLS."""
    if "picker" not in pod_templates(documents):
        return
    config = picker_config(documents)
    listen = {
        name: int(getattr(config.listen, setting).rpartition(":")[2])
        for name, setting in (("grpc-ext-proc", "extproc"), ("grpc-admin", "admin"), ("http-metrics", "http"))
    }
    (container,) = pod_templates(documents)["picker"]["spec"]["containers"]
    named = {port.get("name"): port.get("containerPort") for port in container["ports"]}
    if named != listen:
        yield f"the container's ports are {named}, and the picker listens on {listen}"
    for service in of_kind(documents, "Service"):
        if service["metadata"]["name"] != "picker":
            continue
        if [port.get("name") for port in service["spec"]["ports"]] != ["grpc-ext-proc", "http-metrics"]:
            yield "gateways or Prometheus find no port of the Service"
        for port in service["spec"]["ports"]:
            if port.get("port") != listen.get(port.get("name")):
                yield f"port {port} of the Service is not the picker's"
            encrypted = config.listen.tls.mode is not TlsMode.OFF
            wanted = None if encrypted else "kubernetes.io/h2c"
            if port.get("name") == "grpc-ext-proc" and port.get("appProtocol") != wanted:
                yield f"appProtocol of ext_proc is {port.get('appProtocol')}; with TLS {config.listen.tls.mode} it is {wanted}"
        if service["spec"].get("clusterIP") != "None":
            yield "the Service is not headless: each connection of a gateway would stay with one replica"


def selectors(documents: list[Document]) -> Iterator[str]:
    """The picker, the gateway and Prometheus look at the same pods and ports."""
    if "picker" not in pod_templates(documents):
        return
    kubernetes = picker_config(documents).endpoints.kubernetes
    pools = list(of_kind(documents, "InferencePool"))
    if pools:
        pool = pools[0]["metadata"]
        named = kubernetes.pool
        if (named.name, kubernetes.namespace) != (pool["name"], pool.get("namespace")):
            yield f"the picker follows {named.name!r}, and the gateway asks it about {identity(pools[0])}"
        if dig(pools[0], "spec", "selector", "matchLabels") != {"inference-serving": "true"}:
            yield f"{identity(pools[0])} selects other pods than the documentation says"
        if [dig(port, "number") for port in dig(pools[0], "spec", "targetPorts") or ()] != [8000]:
            yield f"{identity(pools[0])} has other ports than the model servers"
    elif kubernetes.selector != "inference-serving=true" or list(kubernetes.ports) != [8000]:
        yield f"the picker follows {kubernetes}, which is not what the documentation says"
    for service in of_kind(documents, "Service"):
        if service["metadata"]["name"].startswith("model-servers"):
            if service["spec"].get("selector") != {"inference-serving": "true"}:
                yield f"{identity(service)} does not select the picker's endpoints"
            if [port.get("targetPort") for port in service["spec"]["ports"]] != [8000]:
                yield f"{identity(service)} does not send to the picker's endpoints"


def access(documents: list[Document]) -> Iterator[str]:
    """The picker's account may ask for exactly what discovery asks: pods and InferencePools, by list and watch."""
    if "picker" not in pod_templates(documents):
        return
    groups = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")
    asked = {("", "pods"), *((group, "inferencepools") for group in groups)}
    for role in of_kind(documents, "Role"):
        rules = role.get("rules", ())
        granted = {
            (group, resource)
            for rule in rules
            if rule["verbs"] == ["get", "list", "watch"]
            for group in rule.get("apiGroups", ())
            for resource in rule.get("resources", ())
        }
        if granted != asked or any(rule["verbs"] != ["get", "list", "watch"] for rule in rules):
            yield f"{identity(role)} lets the picker do {granted}; it has to do {asked}"
    pod = pod_templates(documents)["picker"]["spec"]
    for binding in of_kind(documents, "RoleBinding"):
        if [subject.get("name") for subject in binding.get("subjects", ())] != [pod.get("serviceAccountName")]:
            yield f"{identity(binding)} does not bind the account of the picker's pods"
        if binding["roleRef"].get("apiGroup") != "rbac.authorization.k8s.io":
            yield f"{identity(binding)} refers to no Role"
    if pod.get("automountServiceAccountToken") is not True:
        yield "the picker's pods have no credentials"
    for account in of_kind(documents, "ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"{identity(account)} gives its credentials to whoever names it"


def plain_envoy(documents: list[Document]) -> Iterator[str]:
    """Names that Envoy resolves are those of headless Services, with the ports that it connects to."""
    there = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "Service")}
    for config in of_kind(documents, "ConfigMap"):
        for line in config["data"].get("envoy.yaml", "").splitlines():
            if ".svc.cluster.local" not in line:
                continue
            name = line.partition("address: {socket_address: {address: ")[2].partition(".")[0]
            port = int(line.partition("port_value: ")[2].partition("}")[0])
            if dig(there.get(name), "clusterIP") != "None":
                yield f"Envoy resolves {name} to one address, not to its pods"
            if port not in [each.get("port") for each in dig(there.get(name), "ports") or ()]:
                yield f"Envoy connects to port {port} of {name}"


def monitors(documents: list[Document]) -> Iterator[str]:
    """Engines are scraped, and sidecars for what is their own: they pass on their engine's metrics."""
    for monitor in of_kind(documents, "PodMonitor"):
        kept = {
            each["portNumber"]: [relabeling["regex"] for relabeling in each.get("metricRelabelings", ())]
            for each in monitor["spec"]["podMetricsEndpoints"]
        }
        if kept != {8000: [], 9000: ["picker_sidecar_.+"]}:
            yield f"of model servers is kept {kept}"


def _wants_redis(config: Config) -> bool:
    modes = [entry.args.index_mode for entry in config.scheduler.plugin_config if entry.name == "kvcache-aware"]
    return config.sharing.enabled or modes == ["redis"]


def redis(documents: list[Document]) -> Iterator[str]:
    """What looks for Redis finds it."""
    there = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "Service")}
    if "picker" in pod_templates(documents) and _wants_redis(picker_config(documents)):
        (container,) = pod_templates(documents)["picker"]["spec"]["containers"]
        missing = {"REDIS_HOST", "REDIS_PORT", "REDIS_PASSWORD"} - {each["name"] for each in container["env"]}
        if missing:
            yield f"the picker asks Redis, and is not told {missing}"
    for name, template in pod_templates(documents).items():
        for container in template["spec"]["containers"]:
            said = {each["name"]: each.get("value") for each in container.get("env", ())}
            if "REDIS_HOST" not in said:
                continue
            keys = {each["name"]: dig(each, "valueFrom", "secretKeyRef", "key") for each in container["env"]}
            if keys.get("REDIS_PASSWORD") != "password":
                yield f"{name} does not take the password of Redis from the Secret"
            found = [str(port.get("port")) for port in dig(there.get(said["REDIS_HOST"]), "ports") or ()]
            if said.get("REDIS_PORT") not in found:
                yield f"{name} looks for Redis at {said['REDIS_HOST']}:{said.get('REDIS_PORT')}"
