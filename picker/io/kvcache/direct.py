"""The engines' own KV events, one subscriber for each endpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from msgspec import Struct

from picker.core.block_index.index import BlockIndex
from picker.core.endpoints import Endpoint
from picker.core.plugins.kvcache_args import KvCacheArgs
from picker.io.keep import Failed, keep
from picker.io.kv_events.frames import endpoint_of_rank
from picker.io.kv_events.share import LoopShare
from picker.io.kv_events.sockets import Context, new_context
from picker.io.kv_events.source import KvEventSource
from picker.io.kv_events.subscriber import KvEventSubscriber
from picker.io.kvcache.sources import EngineFeed, Followed

logger = structlog.get_logger(__name__)


class _Engine(Struct):
    generation: int
    subscriber: KvEventSubscriber
    feed: EngineFeed
    task: asyncio.Task[None] | None = None


def event_source(endpoint: Endpoint, args: KvCacheArgs) -> KvEventSource:
    """Return where an endpoint's events are: as it says, else at the ports of the arguments on its host, plus its rank.

    An endpoint that names its publisher has replays only where it says so: those at the default port may be another's.
    """
    own = endpoint.kv_events
    replay = own.replay_endpoint
    if not replay and not own.endpoint and args.zmq_replay:
        replay = f"tcp://{endpoint.host}:{args.zmq_replay_port}"
    return KvEventSource(
        endpoint=endpoint_of_rank(own.endpoint or f"tcp://{endpoint.host}:{args.zmq_port}", endpoint.rank),
        replay_endpoint=endpoint_of_rank(replay, endpoint.rank) if replay else None,
        topic=own.topic or args.topic,
        ranks=args.zmq_ranks,
    )


class DirectSources:
    """See `Sources`. Of endpoints with one publisher none is followed: it cannot be told whose events these are."""

    def __init__(
        self,
        index: BlockIndex,
        args: KvCacheArgs,
        share: LoopShare,
        clock: Callable[[], float],
        failed: Failed | None = None,
    ) -> None:
        self._index = index
        self._failed = failed
        self._args = args
        self._engines: dict[int, _Engine] = {}
        self._past_events: Counter[str] = Counter()
        self._past_dropped: Counter[str] = Counter()
        self._context: Context | None = None
        self._share = share
        self._clock = clock
        self._stopped: set[asyncio.Task[None]] = set()

    @property
    def events(self) -> Counter[str]:
        total = Counter(self._past_events)
        for engine in self._engines.values():
            for rank in engine.subscriber.ranks:
                total.update(rank.counts)
        return total

    @property
    def dropped(self) -> Counter[str]:
        total = Counter(self._past_dropped)
        for engine in self._engines.values():
            for rank in engine.subscriber.ranks:
                total.update(rank.dropped)
        return total

    def follow(self, endpoints: Mapping[int, Followed]) -> None:
        sources = {slot: event_source(followed.endpoint, self._args) for slot, followed in endpoints.items()}
        shared = Counter(source.endpoint for source in sources.values())
        for slot, engine in list(self._engines.items()):
            source = engine.subscriber.source
            same = sources.get(slot) == source and endpoints[slot].generation == engine.generation
            if not same or shared[source.endpoint] > 1:
                self._end(slot)
        for slot, source in sources.items():
            if shared[source.endpoint] > 1:
                logger.warning(
                    "Endpoints share a publisher of KV events, so that it is not followed; give each its own kvEvents",
                    endpoint=endpoints[slot].endpoint.address,
                    publisher=source.endpoint,
                )
            elif slot not in self._engines:
                self._begin(slot, endpoints[slot], source)

    def _begin(self, slot: int, followed: Followed, source: KvEventSource) -> None:
        self._index.forget(slot)
        feed = EngineFeed(self._index, slot, self._clock)
        feed.open(source.ranks)
        if self._context is None:
            self._context = new_context()
        subscriber = KvEventSubscriber(source, feed, context=self._context, share=self._share)
        engine = _Engine(followed.generation, subscriber, feed)
        run = keep("kv_events", subscriber.run, failed=self._failed, endpoint=source.endpoint)
        engine.task = asyncio.create_task(run)
        self._engines[slot] = engine

    def _end(self, slot: int) -> None:
        engine = self._engines.pop(slot)
        engine.feed.closed = True
        self._index.forget(slot)
        for rank in engine.subscriber.ranks:
            self._past_events.update(rank.counts)
            self._past_dropped.update(rank.dropped)
        if engine.task is not None:
            engine.task.cancel()
            self._stopped.add(engine.task)
            engine.task.add_done_callback(self._stopped.discard)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for slot in list(self._engines):
                self._end(slot)
            await asyncio.gather(*self._stopped, return_exceptions=True)
            if self._context is not None:
                self._context.destroy(0)
                self._context = None

    def tend(self) -> None:
        """Note which engines are there, though they have nothing to say."""
        for slot, engine in self._engines.items():
            for rank in engine.subscriber.ranks:
                if rank.connected:
                    self._index.heard(slot, rank.rank, self._clock())

    def is_connected(self, slot: int) -> bool:
        engine = self._engines.get(slot)
        return engine is not None and all(rank.connected for rank in engine.subscriber.ranks)

    def is_complete(self, slot: int) -> bool:
        engine = self._engines.get(slot)
        return engine is not None and all(rank.connected and rank.complete for rank in engine.subscriber.ranks)

    def place(self, slot: int) -> str:
        engine = self._engines.get(slot)
        return "" if engine is None else engine.subscriber.source.endpoint

    def lag(self, slot: int) -> float | None:
        engine = self._engines.get(slot)
        lags = [rank.lag for rank in engine.subscriber.ranks if rank.lag is not None] if engine else []
        return max(lags, default=None)

    def stats(self, slot: int) -> dict[str, Any]:
        engine = self._engines.get(slot)
        return {} if engine is None else {"ranks": engine.subscriber.stats()}
