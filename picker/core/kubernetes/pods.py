"""What is known of a pod: whether it is ready and stays, where it listens, and what it says of its engine."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from msgspec import Raw, Struct

from picker.core import addresses
from picker.core.kubernetes.objects import ContainerStatus, MalformedError, Pod, decode

RUNTIME = "picker/runtime"
KV_EVENTS = "picker/kv-events"
KV_EVENTS_REPLAY = "picker/kv-events-replay"
KV_EVENTS_TOPIC = "picker/kv-events-topic"
_ANNOTATIONS = (RUNTIME, KV_EVENTS, KV_EVENTS_REPLAY, KV_EVENTS_TOPIC)


class PodFacts(Struct, frozen=True):
    """What is kept of a pod. Equal facts make equal endpoints, however often the pod itself changes.

    `ip` is empty until it has one. `ports` are those that its containers say they listen on. `started_at` is by
    container: when it started, in Unix seconds, for those that run. `age` orders pods by when they were made.
    """

    namespace: str
    name: str
    ready: bool
    ip: str = ""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    ports: Mapping[str, tuple[int, ...]] = {}
    started_at: Mapping[str, float] = {}
    age: str = ""


def read_pod(data: Raw) -> PodFacts:
    """Read the JSON of a pod. Raises MalformedError."""
    pod = decode(data, Pod)
    metadata, status = pod.metadata, pod.status
    ips = [ip.ip for ip in status.pod_ips or () if ip.ip] or [status.pod_ip or ""]
    annotations = metadata.annotations or {}
    return PodFacts(
        namespace=metadata.namespace,
        name=metadata.name,
        ready=_is_ready(pod),
        ip=_address(ips[0]),
        labels=metadata.labels or {},
        annotations={name: annotations[name] for name in _ANNOTATIONS if name in annotations},
        ports={
            container.name: tuple(port.container_port for port in container.ports or ())
            for container in pod.spec.containers or ()
        },
        started_at=dict(_starts(status.container_statuses or ())),
        age=metadata.creation_timestamp or "",
    )


def _is_ready(pod: Pod) -> bool:
    """Whether a pod takes requests: it runs, is Ready, fulfils its readiness gates, and is not about to end."""
    conditions = {condition.type: condition.status for condition in pod.status.conditions or ()}
    wanted = ["Ready", *(gate.condition_type for gate in pod.spec.readiness_gates or ())]
    return (
        pod.metadata.deletion_timestamp is None
        and pod.status.phase == "Running"
        and all(conditions.get(condition) == "True" for condition in wanted)
    )


def _address(ip: str) -> str:
    """The host part of addresses; empty for no address, or one that is no server's."""
    try:
        address = ipaddress.ip_address(ip)
        host = f"[{address}]" if address.version == 6 else str(address)
        addresses.endpoint(f"{host}:1")
    except ValueError:
        return ""
    return host


def _starts(statuses: Iterable[ContainerStatus]) -> Iterable[tuple[str, float]]:
    for status in statuses:
        running = status.state and status.state.running
        if running and running.started_at:
            try:
                started = datetime.fromisoformat(running.started_at)
            except ValueError:
                raise MalformedError(f"startedAt is {running.started_at[:40]!r}") from None
            yield status.name, (started if started.tzinfo else started.replace(tzinfo=UTC)).timestamp()
