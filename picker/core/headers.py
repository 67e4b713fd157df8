"""Header and metadata names of the endpoint-picker protocol, and which of them a client may never send.

Source: the endpoint-picker protocol (proposal 004) and the control headers its implementations use.
"""

from __future__ import annotations

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
