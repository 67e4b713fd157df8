"""Endpoints as people write them down, in the configuration or in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from picker.core import addresses
from picker.core.endpoints import Endpoint, KvEvents
from picker.core.strict import ConfigError, Findings, Problem, child, decode
from picker.io import strict_yaml
from picker.io.kv_events.frames import endpoint_of_rank

MOST_BYTES = 4 * 1024 * 1024
MOST_ENDPOINTS = 10_000

_Address = Annotated[str, Meta(extra={"read": addresses.endpoint})]
_Name = Annotated[
    str, Meta(max_length=253, pattern="^[!-~]*$", extra={"remedy": "use printable ASCII characters without spaces"})
]
_Label = Annotated[str, Meta(max_length=317)]


def _publisher(data: object) -> str:
    if not isinstance(data, str):
        raise ValueError("expected text")  # noqa: TRY004  all that is wrong is a ValueError
    try:
        return endpoint_of_rank(data, 0) if data else ""
    except ValueError:
        raise ValueError("is not where an engine publishes; write tcp://host:port") from None


class Engine(StrEnum):
    """Model servers whose metrics and events are understood."""

    VLLM = "vllm"
    SGLANG = "sglang"


_Publisher = Annotated[str, Meta(extra={"read": _publisher})]


class KvEventsEntry(Struct, frozen=True, rename="camel"):
    """Where its KV events are, where the arguments of `kvcache-aware` do not say it."""

    endpoint: _Publisher = ""
    """Its publisher, `tcp://host:port`; with data-parallel ranks that of rank 0."""
    replay_endpoint: _Publisher = ""
    """Its replays, `tcp://host:port`."""
    topic: Annotated[str, Meta(max_length=1024)] = ""
    """What the topic of its events has to begin with."""


class EndpointEntry(Struct, frozen=True, rename="camel"):
    """One model server."""

    address: _Address
    """Where it listens: "ip:port", IPv6 in brackets. Host names need discovery."""
    name: _Name = ""
    """What logs and metrics call it. Left out: its address."""
    namespace: _Name = "default"
    """The Kubernetes namespace it belongs to; with the name it identifies the endpoint."""
    engine: Engine = Engine.VLLM
    """Which model server it runs."""
    model: _Label = ""
    """The model it serves, for display; which models it takes requests for is asked of the engine."""
    labels: Mapping[str, _Label] = {}
    """Labels, as a Kubernetes pod has them."""
    runtime: Annotated[str, Meta(extra={"read": addresses.service})] = ""
    """Its sidecar, `host:port`, where the arguments of `kvcache-aware` do not say it."""
    kv_events: KvEventsEntry = KvEventsEntry()
    """Where its KV events are."""

    def endpoint(self) -> Endpoint:
        events = KvEvents(self.kv_events.endpoint, self.kv_events.replay_endpoint, self.kv_events.topic)
        return Endpoint(
            self.name, self.address, self.namespace, str(self.engine), self.model, self.labels, self.runtime, events
        )


class _Document(Struct, frozen=True):
    endpoints: tuple[EndpointEntry, ...]


def parse(document: str | bytes) -> list[Endpoint]:
    """The endpoints of a YAML or JSON file: a list of entries, or a mapping with the list as `endpoints`.

    Raises ConfigError. A file without any content is refused, since it may be one that is about to be written; no
    endpoints are `[]`.
    """
    data = strict_yaml.parse(document, most_bytes=MOST_BYTES)
    if data is None:
        raise ConfigError([Problem("", "is empty; write [] for no endpoints")])
    findings = Findings()
    if isinstance(data, list):
        entries = decode(tuple[EndpointEntry, ...], data, "endpoints", findings) or ()
    else:
        read = decode(_Document, data, "", findings)
        entries = read.endpoints if read else ()
    findings.check()
    settled = settle(entries, "endpoints", findings)
    findings.check()
    return [entry.endpoint() for entry in settled]


def settle(entries: Sequence[EndpointEntry], path: str, findings: Findings) -> tuple[EndpointEntry, ...]:
    """Name what has no name, and look for what only the whole list can have: duplicates, and too many entries."""
    if len(entries) > MOST_ENDPOINTS:
        findings.add(path, f"has {len(entries)} entries; at most {MOST_ENDPOINTS} are supported")
        return ()
    settled = tuple(msgspec.structs.replace(entry, name=entry.name or entry.address) for entry in entries)
    by_address: dict[str, int] = {}
    by_name: dict[tuple[str, str], int] = {}
    for index, entry in enumerate(settled):
        first = by_address.setdefault(entry.address, index)
        if first != index:
            same = f"is the address of {child(path, first)} too"
            findings.add(child(child(path, index), "address"), same, entry.address, "remove one of them")
        first = by_name.setdefault((entry.namespace, entry.name), index)
        if first != index:
            same = f"is the name of {child(path, first)} too"
            findings.add(child(child(path, index), "name"), same, entry.name, "give them different names")
    return settled
