"""What makes a pod an endpoint: that it is ready and stays, where it listens, and what it says of its engine.

An annotation has the form that the engine's own configuration has, so that it can be written into a pod template,
where the address of the pod is not known yet: `:9000` and `tcp://*:5557` are ports of the pod itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from msgspec import Raw, Struct

from picker.core import addresses
from picker.core.endpoints import Endpoint, KvEvents
from picker.core.kubernetes.objects import ContainerStatus, MalformedError, Pod, decode

RUNTIME = "picker/runtime"
KV_EVENTS = "picker/kv-events"
KV_EVENTS_REPLAY = "picker/kv-events-replay"
KV_EVENTS_TOPIC = "picker/kv-events-topic"
_ANNOTATIONS = (RUNTIME, KV_EVENTS, KV_EVENTS_REPLAY, KV_EVENTS_TOPIC)
_ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
_SIDECAR = "runtime"
"""What Kthena calls the container of its sidecar, whose restarts leave the engine's cache as it is."""
_TCP = "tcp://"
_ANYWHERE = ("", "*", "0.0.0.0", "[::]")
_LONGEST_TOPIC = 1024
_LAST_PORT = 65_535


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


class Found(Struct, frozen=True):
    """The endpoints of pods, and what was odd about them: counts by reason."""

    endpoints: tuple[Endpoint, ...]
    odd: Mapping[str, int]


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


def find_endpoints(pods: Iterable[PodFacts], ports: Sequence[int], engine: str, engines: Iterable[str]) -> Found:
    """Return an endpoint for each port of each pod that is ready; the ports are those of data-parallel ranks 0, 1, ...

    `engine` is what a pod runs whose label names none of `engines`. Of two pods with one address, which share the
    network of their node, the one counts that says it listens there, else the younger.
    """
    odd: dict[str, int] = {}
    known = frozenset(engines)

    def count(reason: str) -> None:
        odd[reason] = odd.get(reason, 0) + 1

    by_address: dict[str, tuple[tuple[bool, str, str], Endpoint]] = {}
    for pod in pods:
        if not pod.ready:
            continue
        if not pod.ip:
            count("no_address")
            continue
        for rank, port in enumerate(ports):
            claim = (any(port in own for own in pod.ports.values()), pod.age, pod.name)
            endpoint = _endpoint(pod, port, rank, ports, _engine(pod.labels, engine, known, count), count)
            other = by_address.get(endpoint.address)
            if other is not None:
                count("duplicate_address")
            if other is None or claim > other[0]:
                by_address[endpoint.address] = (claim, endpoint)
    endpoints = sorted((endpoint for _, endpoint in by_address.values()), key=lambda endpoint: endpoint.identity)
    return Found(tuple(endpoints), odd)


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


def _endpoint(
    pod: PodFacts, port: int, rank: int, ports: Sequence[int], engine: str, count: Callable[[str], None]
) -> Endpoint:
    def own(name: str, read: Callable[[str], str]) -> str:
        try:
            return read(pod.annotations.get(name, ""))
        except ValueError:
            count("bad_annotation")
            return ""

    service = partial(_service, ip=pod.ip)
    publisher = partial(_publisher, ip=pod.ip, ranks=len(ports))
    topic = pod.annotations.get(KV_EVENTS_TOPIC, "")
    return Endpoint(
        name=pod.name,
        address=f"{pod.ip}:{port}",
        namespace=pod.namespace,
        engine=engine,
        labels=pod.labels,
        runtime=own(RUNTIME, service),
        kv_events=KvEvents(own(KV_EVENTS, publisher), own(KV_EVENTS_REPLAY, publisher), topic[:_LONGEST_TOPIC]),
        rank=rank,
        started_at=_engine_start(pod, ports),
    )


def _engine_start(pod: PodFacts, ports: Sequence[int]) -> float | None:
    """When the engine's container started: one that listens on a target port, else any but the sidecar's, else any.

    Of several it is the youngest, so that what was said before a restart is never believed.
    """
    listening = {name for name, own in pod.ports.items() if not set(own).isdisjoint(ports)}
    for wanted in (listening, pod.started_at.keys() - {_SIDECAR}, pod.started_at.keys()):
        starts = [pod.started_at[name] for name in wanted if name in pod.started_at]
        if starts:
            return max(starts)
    return None


def _engine(labels: Mapping[str, str], otherwise: str, known: frozenset[str], count: Callable[[str], None]) -> str:
    for label in _ENGINE_LABELS:
        if label in labels:
            named = labels[label].lower()
            if named in known:
                return named
            count("unknown_engine")
    return otherwise


def _service(text: str, ip: str) -> str:
    return addresses.service(ip + text if text.startswith(":") else text)


def _publisher(text: str, ip: str, ranks: int) -> str:
    """Where rank 0 publishes; the others do at the ports after."""
    if not text:
        return ""
    host, separator, port = text.removeprefix(_TCP).rpartition(":")
    if not (text.startswith(_TCP) and separator):
        raise ValueError("is not where an engine publishes; write tcp://*:port")
    place = addresses.service(f"{ip if host in _ANYWHERE else host}:{port}")
    if int(port) + ranks - 1 > _LAST_PORT:
        raise ValueError("leaves no port for the last rank")
    return _TCP + place
