"""The arguments of `least-request`."""

from __future__ import annotations

from msgspec import Struct


class LeastRequestArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `least-request`."""

    maxWaitingRequests: int = 10  # noqa: N815  the configuration's name
    """Endpoints with this many waiting requests or more are filtered out. Zero or less means the default."""
