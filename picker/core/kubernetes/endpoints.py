"""The endpoints that pods are: one for each of the ports of each pod that is ready.

An annotation has the form that the engine's own configuration has, so that it can be written into a pod template,
where the address of the pod is not known yet: `:9000` and `tcp://*:5557` are ports of the pod itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from picker.core import addresses
from picker.core.endpoints import Endpoint, KvEvents
from picker.core.kubernetes.pods import KV_EVENTS, KV_EVENTS_REPLAY, KV_EVENTS_TOPIC, RUNTIME, PodFacts

MOST_ENDPOINTS = 10_000
_ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
_SIDECAR = "runtime"
"""What Kthena calls the container of its sidecar, whose restarts leave the engine's cache as it is."""
_TCP = "tcp://"
_ANYWHERE = ("", "*", "0.0.0.0", "[::]")
_LONGEST_TOPIC = 1024
_LAST_PORT = 65_535


class Found(Struct, frozen=True):
    """The endpoints of pods, and what was odd about them: counts by reason."""

    endpoints: tuple[Endpoint, ...]
    odd: Mapping[str, int]


class _Claim(NamedTuple):
    """An endpoint, and how much its pod can be believed that it is the one at its address."""

    strength: tuple[bool, str, str]
    endpoint: Endpoint


class _Read(NamedTuple):
    """What a pod is, as long as its facts are these."""

    facts: PodFacts
    claims: tuple[_Claim, ...]
    odd: Counter[str]


class EndpointFinder:
    """Finds the endpoints of pods again and again; what it costs goes with the pods that changed since the last time.

    The ports are those of data-parallel ranks 0, 1, ... `engine` is what a pod runs whose label names none of `engines`.
    """

    def __init__(self, ports: Sequence[int], engine: str, engines: Iterable[str]) -> None:
        self._ports = tuple(ports)
        self._engine = engine
        self._engines = frozenset(engines)
        self._known: dict[str, _Read] = {}

    def find(self, pods: Mapping[str, PodFacts]) -> Found:
        """Return the endpoints of these pods, by their names.

        Of two pods with one address, which share the network of their node, the one counts that says it listens there,
        else the younger.
        """
        known = self._known
        self._known = {
            key: read if (read := known.get(key)) is not None and read.facts is facts else self._read(facts)
            for key, facts in pods.items()
            if facts.ready
        }
        odd: Counter[str] = Counter()
        by_address: dict[str, _Claim] = {}
        for read in self._known.values():
            if read.odd:
                odd.update(read.odd)
            for claim in read.claims:
                other = by_address.setdefault(claim.endpoint.address, claim)
                if other is not claim:
                    odd["duplicate_address"] += 1
                    by_address[claim.endpoint.address] = max(claim, other, key=_strength)
        endpoints = sorted((claim.endpoint for claim in by_address.values()), key=_identity)
        if len(endpoints) > MOST_ENDPOINTS:
            odd["too_many"] = len(endpoints) - MOST_ENDPOINTS
        return Found(tuple(endpoints[:MOST_ENDPOINTS]), odd)

    def _read(self, pod: PodFacts) -> _Read:
        odd: Counter[str] = Counter()
        if not pod.ip:
            odd["no_address"] += 1
            return _Read(pod, (), odd)
        service = partial(_service, ip=pod.ip)
        publisher = partial(_publisher, ip=pod.ip, ranks=len(self._ports))

        def own(name: str, read: Callable[[str], str]) -> str:
            try:
                return read(pod.annotations.get(name, ""))
            except ValueError:
                odd["bad_annotation"] += 1
                return ""

        topic = pod.annotations.get(KV_EVENTS_TOPIC, "")[:_LONGEST_TOPIC]
        events = KvEvents(own(KV_EVENTS, publisher), own(KV_EVENTS_REPLAY, publisher), topic)
        engine, runtime, started = self._engine_of(pod, odd), own(RUNTIME, service), _engine_start(pod, self._ports)
        claims = []
        for rank, port in enumerate(self._ports):
            endpoint = Endpoint(
                name=pod.name,
                address=f"{pod.ip}:{port}",
                namespace=pod.namespace,
                engine=engine,
                labels=pod.labels,
                runtime=runtime,
                kv_events=events,
                rank=rank,
                started_at=started,
            )
            says_so = any(port in own_ports for own_ports in pod.ports.values())
            claims.append(_Claim((says_so, pod.age, pod.name), endpoint))
        return _Read(pod, tuple(claims), odd)

    def _engine_of(self, pod: PodFacts, odd: Counter[str]) -> str:
        for label in _ENGINE_LABELS:
            if label in pod.labels:
                named = pod.labels[label].lower()
                if named in self._engines:
                    return named
                odd["unknown_engine"] += 1
        return self._engine


def _strength(claim: _Claim) -> tuple[bool, str, str]:
    return claim.strength


def _identity(endpoint: Endpoint) -> tuple[str, str, str]:
    return endpoint.identity


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
