"""What sidecars stream: the engines' own events where they know them, else Kthena's standardized hashes."""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from picker.core.endpoint_table import EndpointTable
from picker.core.plugins.kvcache_args import KvCacheArgs
from picker.core.plugins.kvcache_aware import KvCacheProducer
from picker.io.keep import Failed
from picker.io.kv_index.stream_client import ClientSettings
from picker.io.kv_index.stream_clients import StreamClients
from picker.io.kvcache.sources import EngineFeed, Followed, engine_start


def router_id(environment: Mapping[str, str]) -> str:
    """Return what sidecars know this picker by: `namespace/pod` where that is known.

    Else the host's name and something random: two pickers of one name would end each other's streams for ever.
    """
    namespace, pod = environment.get("POD_NAMESPACE"), environment.get("POD_NAME")
    return f"{namespace}/{pod}" if namespace and pod else f"{socket.gethostname()}-{secrets.token_hex(4)}"


class MemorySources:
    """See `Sources`."""

    def __init__(
        self,
        producer: KvCacheProducer,
        args: KvCacheArgs,
        table: EndpointTable,
        clock: Callable[[], float],
        environment: Mapping[str, str] | None = None,
        failed: Failed | None = None,
    ) -> None:
        environment = os.environ if environment is None else environment
        settings = ClientSettings(router_id(environment), token=environment.get("KV_EVENT_TOKEN", ""))
        started_at = partial(engine_start, table)
        self.clients = StreamClients(settings, producer.hashes, self._feed, started_at=started_at, failed=failed)
        self.dropped: Counter[str] = Counter()
        self._producer = producer
        self._args = args
        self._clock = clock
        self._feeds: dict[int, EngineFeed] = {}
        self._targets: dict[int, tuple[Any, str]] = {}

    @property
    def events(self) -> Counter[str]:
        return self.clients.counts

    def follow(self, endpoints: Mapping[int, Followed]) -> None:
        targets = {
            slot: (
                (followed.generation, followed.endpoint.identity),
                followed.endpoint.runtime or f"{followed.endpoint.host}:{self._args.runtime_port}",
            )
            for slot, followed in endpoints.items()
        }
        for slot, target in self._targets.items():
            if targets.get(slot) != target:
                self._close(slot)
        self._targets = targets
        self.clients.follow(targets)

    def _feed(self, slot: int) -> EngineFeed:
        self._close(slot)
        feed = self._feeds[slot] = EngineFeed(self._producer.index, slot, self._clock)
        feed.open(1)
        return feed

    def _close(self, slot: int) -> None:
        feed = self._feeds.pop(slot, None)
        if feed is not None:
            feed.closed = True
            self._producer.index.forget(slot)

    async def run(self) -> None:
        try:
            await self.clients.run()
        finally:
            for slot in list(self._feeds):
                self._close(slot)

    def tend(self) -> None:
        """Note which sidecars are there. Picks of those that know hashes only have to be visible, too."""
        now, size = self._clock(), self._producer.block_size
        for slot, stream in self.clients.streams.items():
            if stream.connected:
                self._producer.index.heard(slot, 0, now)
                if not stream.extended and self._producer.hashes.blocks_of(slot):
                    self._producer.index.open(slot, "", now, block_size=size)

    def is_connected(self, slot: int) -> bool:
        stream = self.clients.streams.get(slot)
        return stream is not None and stream.connected

    def is_complete(self, slot: int) -> bool:
        return self.is_connected(slot)

    def place(self, slot: int) -> str:
        return self._targets[slot][1] if slot in self._targets else ""

    def lag(self, slot: int) -> float | None:  # noqa: ARG002
        return None

    def stats(self, slot: int) -> dict[str, Any]:
        stream, feed = self.clients.streams.get(slot), self._feeds.get(slot)
        if stream is None:
            return {"connected": False}
        return {
            "sidecar": stream.address,
            "connected": stream.connected,
            "engine_events": stream.extended,
            "streams": stream.opened,
            "error": stream.error,
            "batches": feed.batches if feed else 0,
            "hashes_held": self._producer.hashes.blocks_of(slot),
        }
