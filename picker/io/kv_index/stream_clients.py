"""The picker's streams: one to the sidecar of every endpoint.

Endpoints whose sidecars cannot be told apart, as they share an address, are not streamed from.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
import structlog

from picker.core.kv_index.hash_index import HashIndex
from picker.io.keep import Failed, keep
from picker.io.kv_events.source import KvEventHandler
from picker.io.kv_index.stream_client import SLICE, ClientSettings, StartedAt, Stream

logger = structlog.get_logger(__name__)


class StreamClients:
    """Streams from all endpoints. `follow` says which there are; `run` keeps them, and the index, in order.

    `engine(slot)` gives what applies an endpoint's own events where its sidecar sends them; None: they are not asked
    for, and Kthena's hashes go into `index`, but for those that were stored at or before the engine's start, as a sidecar
    tells them that has not noticed it. `counts` has streams by how they ended, and `lines`, `unknown_events`, `throttled`,
    `before_start` (blocks); `shared_address` is the number of endpoints that are not streamed from, as they share an address.
    """

    def __init__(
        self,
        settings: ClientSettings,
        index: HashIndex,
        engine: Callable[[int], KvEventHandler] | None = None,
        *,
        clock: Callable[[], float] = time.time,
        started_at: StartedAt = lambda _: None,
        stale_after: float = 86_400.0,
        failed: Failed | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.streams: dict[int, Stream] = {}
        self.shared_address = 0
        self._settings = settings
        self._index = index
        self._engine = engine
        self._clock = clock
        self._started_at = started_at
        self._stale_after = stale_after
        self._failed = failed
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._wanted: dict[int, tuple[Any, str]] = {}
        self._changed = asyncio.Event()

    def follow(self, endpoints: Mapping[int, tuple[Any, str]]) -> None:
        """Stream from these: slot -> (identity, `host:port` of the sidecar).

        A slot with another identity or address than before begins anew. Of endpoints with one address none is
        streamed from: it cannot be told whose blocks these are.
        """
        shared = Counter(address for _, address in endpoints.values())
        wanted = {slot: target for slot, target in endpoints.items() if shared[target[1]] == 1}
        refused = len(endpoints) - len(wanted)
        if refused > self.shared_address:
            logger.warning("Endpoints that share an address are not streamed from", endpoints=refused)
        self.shared_address = refused
        self._wanted = wanted
        self._changed.set()

    async def run(self) -> None:
        """Stream until cancelled."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._settings.connect, sock_read=self._settings.silence
        )
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
            keeping = asyncio.create_task(keep("kv_stream_index", self._keep_index, failed=self._failed))
            running: dict[int, tuple[Any, str]] = {}
            try:
                while True:
                    self._changed.clear()
                    gone = [slot for slot in running if running[slot] != self._wanted.get(slot)]
                    for slot in gone:
                        self._tasks[slot].cancel()
                        del running[slot], self.streams[slot]
                    await asyncio.gather(*[self._tasks.pop(slot) for slot in gone], return_exceptions=True)
                    for slot, target in self._wanted.items():
                        if slot not in running:
                            running[slot] = target
                            self._begin(slot, target[1], session)
                    await self._changed.wait()
            finally:
                tasks = [*self._tasks.values(), keeping]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._tasks.clear()
                self.streams.clear()

    def _begin(self, slot: int, address: str, session: aiohttp.ClientSession) -> None:
        engine = self._engine(slot) if self._engine else None
        stream = Stream(slot, address, self._settings, self._index, engine, self.counts, self._clock, self._started_at)
        self.streams[slot] = stream
        run = keep("kv_stream", partial(stream.run, session), failed=self._failed, address=address)
        self._tasks[slot] = asyncio.create_task(run, name=f"kv stream {address}")

    async def _keep_index(self) -> None:
        """Sweep what was forgotten, what is from before an engine's start and what is a day old, in slices."""
        while True:
            for stream in self.streams.values():
                stream.notice_start()
            busy = self._index.sweep(SLICE)
            busy = bool(self._index.expire(self._clock() - self._stale_after, SLICE)) or busy
            await asyncio.sleep(0 if busy else 0.25)
