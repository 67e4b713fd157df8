"""What a ProcessingRequest carries besides what happened: modes, and what metadata and attributes say of endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value
from msgspec import Struct as Record

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from picker.core.exchange.events import BodyMode, Event, ProtocolConfig
from picker.core.headers import LB_METADATA, SERVED, SUBSET, SUBSET_METADATA

_ATTRIBUTES: Final = "envoy.filters.http.ext_proc"
_UPSTREAM_ADDRESS: Final = "upstream.address"
_MODES: Final = {mode.value: mode for mode in BodyMode}
MOST_REMEMBERED: Final = 4096


class Context(Record, frozen=True, gc=False):
    """`subset` and `served` as in the events; `observed` in observability mode, where no answer is expected."""

    protocol: ProtocolConfig | None
    subset: tuple[str, ...] | None
    served: str | None
    observed: bool


class Observed(Record, frozen=True, gc=False):
    """What happened, told in observability mode: Envoy expects no answer, and would ignore one."""

    event: Event


def read_context(message: pb.ProcessingRequest) -> Context:
    """Read what is there in a message, whatever it is about."""
    return Context(_protocol(message), _subset(message), _served(message), message.observability_mode)


def context_of(data: bytes) -> Context | None:
    """Read the fields of a ProcessingRequest that follow what happened; None when there are others or no fields."""
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError:
        return None
    return None if message.WhichOneof("request") else read_context(message)


remembered_context = lru_cache(maxsize=1024)(context_of)
"""The same for at most `MOST_REMEMBERED` bytes: few different ones come in great numbers."""


def _protocol(message: pb.ProcessingRequest) -> ProtocolConfig | None:
    if not message.HasField("protocol_config"):
        return None
    modes = message.protocol_config
    request, response = _MODES.get(modes.request_body_mode), _MODES.get(modes.response_body_mode)
    if request is None or response is None:
        return None
    return ProtocolConfig(request, response)


def _metadata(message: pb.ProcessingRequest, namespace: str, key: str) -> Value | None:
    values: Struct | None = message.metadata_context.filter_metadata.get(namespace)
    return None if values is None else values.fields.get(key)


def _subset(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """The subset hint: a list, or a string with commas, of "ip" or "ip:port"; None when there is none."""
    value = _metadata(message, SUBSET_METADATA, SUBSET)
    if value is None:
        return None
    return tuple(part.strip() for text in _strings(value) for part in text.split(",") if part.strip())


def _strings(value: Value) -> Iterator[str]:
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        yield value.string_value
    elif kind == "list_value":
        for item in value.list_value.values:
            yield item.string_value


def _served(message: pb.ProcessingRequest) -> str | None:
    """The endpoint that answered: what the gateway says it was, else the upstream address Envoy used."""
    value = _metadata(message, LB_METADATA, SERVED)
    if value is not None and value.string_value:
        return value.string_value
    attributes: Struct | None = message.attributes.get(_ATTRIBUTES)
    value = None if attributes is None else attributes.fields.get(_UPSTREAM_ADDRESS)
    return None if value is None else value.string_value or None
