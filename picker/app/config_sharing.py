"""The `sharing` section: pickers that know of each other's picks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from picker.core.plugins.kvcache_args import RedisArgs


class SharingSettings(Struct, frozen=True, rename="camel"):
    """Whether pickers tell each other of their picks. Switch it on with more than one replica."""

    enabled: bool = False
    """Share picks, first tokens and ends of requests with all pickers on the channel."""
    redis: RedisArgs = RedisArgs()
    """How Redis is reached; `budgetSeconds` has no meaning here. While it is away, each picker goes on alone."""
    channel: Annotated[str, Meta(min_length=1, max_length=256)] = "picker:picks"
    """The channel of the pickers of one pool. Pools that share a Redis need channels of their own."""
    batch_seconds: Annotated[float, Meta(ge=0.001, le=1)] = 0.02
    """How long a pick may wait to be told with others; others know of it this much later."""
