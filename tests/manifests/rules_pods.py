"""What has to hold of pods: least privilege, room to drain, memory that suffices."""

from __future__ import annotations

from collections.abc import Iterator

from tests.manifests.builds import Document
from tests.manifests.reading import dig, of_kind, picker_config, pod_templates, size


def pod_security(documents: list[Document]) -> Iterator[str]:
    """The restricted profile of the Pod Security Standards, and a read-only root; engines may run as root."""
    for name, template in pod_templates(documents).items():
        pod = template["spec"]
        if dig(pod, "securityContext", "seccompProfile", "type") != "RuntimeDefault":
            yield f"{name}: seccompProfile is not RuntimeDefault"
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(key):
                yield f"{name}: {key}"
        for container in pod["containers"]:
            security = container.get("securityContext", {})
            where = f"{name}/{container['name']}"
            if security.get("allowPrivilegeEscalation") is not False:
                yield f"{where}: may escalate privileges"
            if dig(security, "capabilities", "drop") != ["ALL"]:
                yield f"{where}: keeps capabilities"
            if "image" not in container:
                yield f"{where}: has no image"
            if not dig(container, "resources", "limits"):
                yield f"{where}: has no limits"
            if container["name"] in {"vllm", "sglang"}:
                continue
            if security.get("readOnlyRootFilesystem") is not True:
                yield f"{where}: may write to its image"
            user = security.get("runAsUser", dig(pod, "securityContext", "runAsUser"))
            if security.get("runAsNonRoot", dig(pod, "securityContext", "runAsNonRoot")) is not True or not user:
                yield f"{where}: may be root"
            for kind in ("cpu", "memory"):
                if not dig(container, "resources", "requests", kind):
                    yield f"{where}: asks for no {kind}"
            if "cpu" in container["resources"]["limits"]:
                yield f"{where}: is throttled"
        ours = not {"vllm", "sglang"} & {container["name"] for container in pod["containers"]}
        if ours and name != "picker" and pod.get("automountServiceAccountToken") is not False:
            yield f"{name}: has credentials of the API server that it does not need"


def draining(documents: list[Document]) -> Iterator[str]:
    """Long streams end by themselves before a pod is killed, and no rollout leaves nobody."""
    for deployment in of_kind(documents, "Deployment"):
        name, spec = deployment["metadata"]["name"], deployment["spec"]
        grace = spec["template"]["spec"].get("terminationGracePeriodSeconds", 30)
        if name == "picker":
            listen = picker_config(documents).listen
            if not grace >= listen.leave_seconds + listen.drain_seconds + 10:
                yield f"{name} is killed after {grace} s, and drains for {listen.leave_seconds} + {listen.drain_seconds} s"
            if listen.drain_seconds < 600:
                yield f"{name} ends streams after {listen.drain_seconds} s"
            if listen.leave_seconds < 5:
                yield f"{name} is gone before gateways know"
            if spec.get("replicas", 1) < 2:
                yield f"{name} has no second replica"
            budgets = [each["spec"] for each in of_kind(documents, "PodDisruptionBudget")]
            if [(each.get("maxUnavailable"), each.get("selector")) for each in budgets] != [(1, spec["selector"])]:
                yield f"{name} is not protected from disruptions"
        if name in {"picker", "envoy"} and dig(spec, "strategy", "rollingUpdate", "maxUnavailable") != 0:
            yield f"a rollout of {name} leaves fewer than before"
        if name == "envoy":
            (container,) = spec["template"]["spec"]["containers"]
            pause = dig(container, "lifecycle", "preStop", "sleep", "seconds") or 0
            if not 600 <= pause <= grace - 10:
                yield f"envoy ends after {pause} s in the middle of answers, and is killed after {grace} s"


def memory(documents: list[Document]) -> Iterator[str]:
    """Bodies that are kept fit into the picker's memory, with room for what it knows."""
    if "picker" in pod_templates(documents):
        (container,) = pod_templates(documents)["picker"]["spec"]["containers"]
        limit = size(container["resources"]["limits"]["memory"])
        if picker_config(documents).exchange.max_buffered_bytes > limit / 2:
            yield f"request bodies may take more than half of {limit} bytes"


def own_name(documents: list[Document]) -> Iterator[str]:
    """The picker knows its pod's name, for sidecars that serve each router once."""
    if "picker" in pod_templates(documents):
        (container,) = pod_templates(documents)["picker"]["spec"]["containers"]
        paths = {each["name"]: dig(each, "valueFrom", "fieldRef", "fieldPath") for each in container.get("env", ())}
        for name, path in (("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace")):
            if paths.get(name) != path:
                yield f"{name} is not {path}"


def scratch(documents: list[Document]) -> Iterator[str]:
    """Every mount has its volume; with a read-only root, Python's temporary files have a place."""
    for name, template in pod_templates(documents).items():
        volumes = [volume["name"] for volume in template["spec"].get("volumes", ())]
        for container in template["spec"]["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
            if not set(mounts.values()) <= set(volumes):
                yield f"{name}: mounts {mounts}, and has {volumes}"
            if "/tmp" not in mounts and name in {"picker", "engine-sim"}:
                yield f"{name}: has no place for temporary files"
            if any("subPath" in mount for mount in container.get("volumeMounts", ())):
                yield f"{name}: a file mounted by subPath never changes"
