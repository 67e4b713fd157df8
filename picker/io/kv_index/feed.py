"""Takes an engine's events over into its ownership, and tells whoever passes it on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from picker.core.kv_events.events import EventBatch
from picker.core.kv_index.ownership import Ownership
from picker.io.kv_events.source import KvEventHandler
from picker.io.kv_index.redis_writer import RedisWriter
from picker.io.kv_index.stream_server import StreamServer

REFRESH_AFTER = 6 * 3600.0
"""Seconds after which it is said again that a block is held. Others drop what they have not heard of for a day."""
_REFRESHED_AT_ONCE = 1000


class OwnershipFeed:
    """A handler of KV events. `then` are told of every event as well."""

    def __init__(
        self,
        ownership: Ownership,
        *,
        redis: RedisWriter | None = None,
        streams: StreamServer | None = None,
        then: Sequence[KvEventHandler] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ownership = ownership
        self._redis = redis
        self._streams = streams
        self._then = then
        self._clock = clock

    def on_batch(self, batch: EventBatch, rank: int) -> None:
        def apply() -> None:
            changes = self._ownership.apply(rank, batch.events, self._clock())
            if self._redis is not None:
                self._redis.note(changes)
            if self._streams is not None:
                self._streams.changed(changes, rank, batch)

        self._do(apply)
        for handler in self._then:
            handler.on_batch(batch, rank)

    def on_restart(self, rank: int) -> None:
        self._begin(rank, 0)
        for handler in self._then:
            handler.on_restart(rank)

    def on_incomplete(self, rank: int, since: int) -> None:
        self._begin(rank, since)
        for handler in self._then:
            handler.on_incomplete(rank, since)

    def refresh(self) -> None:
        """Say again some of what is held for long; to be called every few seconds."""

        def again() -> None:
            now = self._clock()
            changes = self._ownership.refresh(now - REFRESH_AFTER, now, _REFRESHED_AT_ONCE)
            if self._redis is not None:
                self._redis.note(changes)
            if self._streams is not None:
                self._streams.refreshed(changes)

        self._do(again)

    def _begin(self, rank: int, since: int) -> None:
        def begin() -> None:
            changes = self._ownership.forget(rank, self._clock())
            if self._redis is not None:
                self._redis.note(changes)
            if self._streams is not None:
                self._streams.begun(changes, rank, since)

        self._do(begin)

    def _do(self, change: Callable[[], None]) -> None:
        if self._streams is None:
            change()
        else:
            self._streams.do(change)
