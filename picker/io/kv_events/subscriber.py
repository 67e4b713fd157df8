"""Subscribes to the KV events of one engine, all its data-parallel ranks, over ZMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from picker.core.kv_events.decode import decode
from picker.core.kv_events.events import EventBatch
from picker.io.kv_events.rank import RankSubscription
from picker.io.kv_events.share import LoopShare
from picker.io.kv_events.sockets import Context, new_context
from picker.io.kv_events.source import KvEventHandler, KvEventSource, SubscriberSettings


class KvEventSubscriber:
    """Follows one engine. `ranks` has what can be said about each of its ranks.

    `decode` makes a batch of a payload. An own ZMQ context is made, and ended with `run`, unless one is given.
    Subscribers on one loop should have one `share` of it.
    """

    def __init__(
        self,
        source: KvEventSource,
        handler: KvEventHandler,
        *,
        settings: SubscriberSettings | None = None,
        context: Context | None = None,
        decode: Callable[[bytes], EventBatch] = decode,
        share: LoopShare | None = None,
    ) -> None:
        self.source = source
        self._context = context
        settings = settings or SubscriberSettings()
        share = share or LoopShare()
        self.ranks = tuple(
            RankSubscription(source, rank, handler, settings, decode, share) for rank in range(source.ranks)
        )

    async def run(self) -> None:
        """Follow the engine until cancelled; it may come and go meanwhile."""
        context = self._context or new_context()
        try:
            async with asyncio.TaskGroup() as group:
                for rank in self.ranks:
                    group.create_task(rank.run(context), name=f"kv events {rank.endpoint}")
        finally:
            if self._context is None:
                context.term()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return what each rank has seen, by its number, for people."""
        return {str(rank.rank): rank.stats() for rank in self.ranks}
