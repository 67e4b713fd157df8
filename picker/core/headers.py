"""Header and metadata names of the endpoint-picker protocol, and which of them a client may never send.

Source: the endpoint-picker protocol (proposal 004) and the control headers its implementations use.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
PREFILLER = "x-prefiller-host-port"
REQUEST_ID = "x-request-id"
FALLBACKS_WANTED = "x-picker-fallbacks"
"""gRPC metadata of the ext_proc stream: how many fallback endpoints this Envoy configuration can use."""

LB_METADATA = "envoy.lb"
SUBSET_METADATA = "envoy.lb.subset_hint"

CLIENT_FORBIDDEN = frozenset(
    {
        DESTINATION,
        SERVED,
        SUBSET,
        PREFILLER,
        "x-data-parallel-host-port",
        "x-encoder-hosts-ports",
        "x-picker-fallbacks",
    }
)
"""Request headers that steer routing; only the picker and the gateway may set them."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,127}")
_FRAMING = frozenset(("connection", "content-length", "host", "te", "trailer", "transfer-encoding", "upgrade"))


def _name(data: object) -> str:
    if not isinstance(data, str) or not _NAME.fullmatch(data):
        raise ValueError("is not the name of a header; use letters, digits and hyphens, 127 at most")
    return data.lower()


def _name_or_none(data: object) -> str:
    return "" if data == "" else _name(data)


def _name_to_set(data: object) -> str:
    name = _name(data)
    if name in _FRAMING or name in CLIENT_FORBIDDEN - {PREFILLER}:
        raise ValueError(f"has a meaning of its own; use another header, such as {PREFILLER}")
    return name


HeaderName = Annotated[str, Meta(extra={"read": _name})]
"""The name of a header in a configuration, in lower case, as Envoy says it."""
OptionalHeaderName = Annotated[str, Meta(extra={"read": _name_or_none})]
"""The same, or empty for none."""
SettableHeaderName = Annotated[str, Meta(extra={"read": _name_to_set})]
"""The name of a header that the picker sets, and that clients may not."""
