"""The `sessionSticky` section: Kthena's of that name in its configuration and in a ModelServer's traffic policy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from picker.core.plugins.kvcache_args import RedisArgs
from picker.core.sticky import Source
from picker.core.strict import Findings

MOST_SOURCES = 16

_ModelServer = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9.-]+/[a-z0-9.-]+)?$",
        max_length=512,
        extra={"remedy": "use namespace/name of a ModelServer, or leave it out"},
    ),
]


class StickyBackend(StrEnum):
    """Where it is kept which endpoint a session is bound to."""

    MEMORY = "memory"
    REDIS = "redis"


class SessionSticky(Struct, frozen=True, rename="camel"):
    """Requests of one session go to one endpoint, for as long as it passes the filters. Off without `sources`."""

    sources: tuple[Source, ...] = ()
    """Where the key of a session stands, at most 16 places; the first that has something counts."""
    session_affinity_seconds: Annotated[int, Meta(ge=1, le=31_536_000)] = 300
    """How long after its last request a session is bound, in seconds."""
    backend: StickyBackend = StickyBackend.MEMORY
    """`memory`: in this picker; `redis`: shared with other pickers, and with Kthena's routers where `modelServer` is set."""
    redis: RedisArgs = RedisArgs()
    """How Redis is reached, for `redis`. While it is away, each picker goes by what it knows."""
    model_server: _ModelServer = ""
    """`namespace/name` of the ModelServer that bindings belong to. Left out: they belong to the model of the request."""
    max_sessions: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Sessions that this picker knows, some 400 bytes each; the ones with the oldest last request are dropped."""


def check(sticky: SessionSticky, path: str, findings: Findings) -> None:
    """Look at the section as a whole."""
    if len(sticky.sources) > MOST_SOURCES:
        findings.add(f"{path}.sources", f"has {len(sticky.sources)} entries", remedy=f"keep at most {MOST_SOURCES}")
    if not sticky.sources and sticky != SessionSticky():
        findings.warn(f"{path}.sources", "is empty, so that no session sticks; add those of the ModelServer")
    if sticky.backend is not StickyBackend.REDIS and sticky.redis != RedisArgs():
        findings.warn(f"{path}.redis", f"is not used with backend: {sticky.backend}; use backend: redis")
