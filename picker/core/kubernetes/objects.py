"""What is read of the objects that the Kubernetes API serves, field by field; everything else is skipped.

Names and meanings are those of the API reference of `v1` Pod, ListMeta, Status and WatchEvent.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

T = TypeVar("T")

_ShortText = Annotated[str, Meta(max_length=1024)]
_Port = Annotated[int, Meta(ge=1, le=65_535)]


class MalformedError(ValueError):
    """Something that no API server sends."""


class Metadata(Struct, rename="camel"):
    """The part of `metadata` that names an object and tells its age."""

    name: _ShortText
    namespace: _ShortText = ""
    resource_version: _ShortText = ""
    creation_timestamp: _ShortText | None = None
    deletion_timestamp: _ShortText | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None

    @property
    def key(self) -> str:
        """What no other object of the same kind is called at the same time."""
        return f"{self.namespace}/{self.name}"


class Named(Struct):
    """Any object."""

    metadata: Metadata


class ListMetadata(Struct, rename={"resource_version": "resourceVersion", "more": "continue"}):
    """The state a page is of, and the token of the next page."""

    resource_version: _ShortText = ""
    more: str = ""


class Page(Struct):
    """One page of a list; `items` are not looked into."""

    metadata: ListMetadata
    items: list[Raw] | None = None


class Frame(Struct):
    """One line of a watch."""

    type: _ShortText
    object: Raw


class Position(Struct, rename="camel"):
    """The `metadata` of a bookmark, which names no object."""

    resource_version: _ShortText = ""


class Bookmark(Struct):
    """The object of a BOOKMARK frame."""

    metadata: Position


class StatusDetails(Struct, rename="camel"):
    """Of a `Status`: when to come again, in seconds."""

    retry_after_seconds: float | None = None


class Status(Struct):
    """What an API server answers when it refuses; also the object of an ERROR frame."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: StatusDetails | None = None


class Condition(Struct):
    """One of `status.conditions`; `status` is True, False or Unknown."""

    type: str
    status: str


class ContainerPort(Struct, rename="camel"):
    """A port that a container says it listens on."""

    container_port: _Port


class Container(Struct):
    """A container as it is wanted."""

    name: str
    ports: list[ContainerPort] | None = None


class ReadinessGate(Struct, rename="camel"):
    """A condition that has to be True besides the containers being ready."""

    condition_type: str


class PodSpec(Struct, rename="camel"):
    """What is wanted of a pod."""

    containers: list[Container] | None = None
    readiness_gates: list[ReadinessGate] | None = None


class Running(Struct, rename="camel"):
    """A container that runs."""

    started_at: str | None = None


class ContainerState(Struct):
    """`running` is left out for a container that does not run."""

    running: Running | None = None


class ContainerStatus(Struct):
    """A container as it is."""

    name: str
    state: ContainerState | None = None


class PodIp(Struct):
    """One of the addresses of a pod."""

    ip: str | None = None


class PodStatus(Struct, rename={"pod_ip": "podIP", "pod_ips": "podIPs", "container_statuses": "containerStatuses"}):
    """What a pod is."""

    phase: str = ""
    conditions: list[Condition] | None = None
    pod_ip: str | None = None
    pod_ips: list[PodIp] | None = None
    container_statuses: list[ContainerStatus] | None = None


class Pod(Struct):
    """A pod."""

    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


def decode(data: bytes | Raw, kind: type[T]) -> T:
    """Read JSON as one of the types above. Raises MalformedError."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(str(error)[:200]) from None


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]
