"""Which pods an InferencePool selects, and on which ports they serve.

Facts: `inference.networking.k8s.io/v1` (`selector.matchLabels`, `targetPorts[].number`) and its predecessor
`inference.networking.x-k8s.io/v1alpha2` (`selector` itself is the labels, `targetPortNumber` the one port).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Raw, Struct

from picker.core.kubernetes.objects import MalformedError, decode

MOST_PORTS = 8

_Port = Annotated[int, Meta(ge=1, le=65_535)]
_NAME = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_LABEL = re.compile(f"{_NAME}={_VALUE}")
_VALUES = rf"\(\s*{_VALUE}(?:\s*,\s*{_VALUE})*\s*\)"
_REQUIREMENT = re.compile(
    rf"\s*(?:!\s*{_NAME}|{_NAME}|{_NAME}\s*(?:=|==|!=)\s*{_VALUE}|{_NAME}\s+(?:in|notin)\s*{_VALUES})\s*"
)
_COMMAS_OUTSIDE = re.compile(r",(?![^(]*\))")


class PoolGroup(StrEnum):
    """The API groups of InferencePools."""

    V1 = "inference.networking.k8s.io"
    V1ALPHA2 = "inference.networking.x-k8s.io"

    @property
    def version(self) -> str:
        """The version that is read of it."""
        return "v1" if self is PoolGroup.V1 else "v1alpha2"


class Selection(Struct, frozen=True):
    """Pods by label selector, as it stands in a query, and the ports of their data-parallel ranks from 0 on."""

    selector: str
    ports: tuple[int, ...]


class _TargetPort(Struct):
    number: _Port


class _MatchLabels(Struct, rename="camel"):
    match_labels: dict[str, str]


class _Spec(Struct, rename="camel"):
    selector: _MatchLabels
    target_ports: Annotated[list[_TargetPort], Meta(min_length=1, max_length=MOST_PORTS)]


class _Pool(Struct):
    spec: _Spec


class _OldSpec(Struct, rename="camel"):
    selector: dict[str, str]
    target_port_number: _Port


class _OldPool(Struct):
    spec: _OldSpec


def read_pool(data: Raw, group: PoolGroup) -> Selection:
    """Read the JSON of an InferencePool. Raises MalformedError, also for a selector that would select everything."""
    if group is PoolGroup.V1:
        spec = decode(data, _Pool).spec
        labels, ports = spec.selector.match_labels, tuple(port.number for port in spec.target_ports)
    else:
        old = decode(data, _OldPool).spec
        labels, ports = old.selector, (old.target_port_number,)
    if not labels:
        raise MalformedError("the selector has no labels")
    for name, value in labels.items():
        if not _LABEL.fullmatch(f"{name}={value}"):
            raise MalformedError(f"{name[:80]}={value[:80]} is no label")
    selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return Selection(selector, tuple(dict.fromkeys(ports)))


def read_selector(data: object) -> str:
    """Check a label selector in the syntax of Kubernetes, which may not be empty. Raises ValueError."""
    if not isinstance(data, str):
        raise ValueError("expected text")  # noqa: TRY004  all that is wrong is a ValueError
    if not data.strip():
        raise ValueError('selects everything; write labels of the model servers, such as "app=vllm"')
    if len(data) > 4096:
        raise ValueError("is longer than 4096 characters")
    for part in _COMMAS_OUTSIDE.split(data):
        if not _REQUIREMENT.fullmatch(part):
            raise ValueError(
                f'"{part.strip()[:80]}" is no label selector; write such as "app=vllm,role in (decode,both)"'
            )
    return data
