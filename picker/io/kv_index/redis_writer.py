"""Keeps in Redis what a sidecar's engine holds, in Kthena's layout: see `redis_layout`.

Nothing is queued but the names of blocks that may have changed: what to write is looked up when it is written. So
a flush can be repeated, and when Redis is away for so long that there are too many names, they are dropped and
everything is written anew. That also happens with a Redis that is not the one from before, or that has lost it (see
`redis_losses`). Whatever it says of us that is not so any more, left by a predecessor that crashed, is deleted first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import hiredis
import structlog
from msgspec import Struct

from picker.core.kv_index.owners import BLOCK_PREFIX
from picker.core.kv_index.ownership import Changes, Ownership
from picker.io.kv_index.reconnecting import Reconnecting
from picker.io.kv_index.redis_connection import (
    Away,
    Command,
    RedisConnection,
    RedisSettings,
    RedisUnavailableError,
    run_id,
    scanned,
)
from picker.io.kv_index.redis_layout import Block, Layout
from picker.io.kv_index.redis_losses import Losses, Marker

logger = structlog.get_logger(__name__)

_DELETIONS = ("HDEL", "DEL")
_SHARE_OF_RESYNCS = 0.01
"""Of the time, what may go into writing everything anew because Redis loses it again and again."""
_EVICTION = "it was flushed, or evicts keys: set maxmemory-policy noeviction and give it the memory it needs"
_USURPED = "another sidecar writes under the same --pod: give each its own"


class WriterSettings(Struct, frozen=True):
    """Times in seconds."""

    batch: int = 512
    """Commands in one round trip."""
    most_changed: int = 1 << 17
    """Names of changed blocks that are kept while Redis is away."""
    timeout: float = 5.0
    reconnect: float = 0.1
    most_reconnect: float = 5.0
    media: bool = False
    """Whether values name the medium."""
    look_every: float = 5.0
    """How often it is looked whether `batch` of the blocks are still there."""
    resync_pause: float = 30.0
    """After everything was written anew because Redis had lost it, so long that is not done again."""


class RedisWriter:
    """Writes one engine's ownership. `note` tells it what changed; `run` writes.

    `owner` is `{pod}.{namespace}`; `engine` is the prefix of the engine's own names, "vllm" or "sglang". `counts`:
    `written`, `deleted`, `swept` (of a predecessor), `batches`, `connects`, `resyncs`, `overflows`; of blocks that were
    looked at, `missing` and `altered`; looks that found everything `lost`, or `usurped` by another sidecar; and commands
    that Redis refused as `refused_` and its word for why.
    """

    def __init__(
        self,
        redis: RedisSettings,
        ownership: Ownership,
        owner: str,
        engine: str,
        settings: WriterSettings = WriterSettings(),  # noqa: B008 (frozen)
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.connected = False
        self._redis = redis
        self._ownership = ownership
        self._layout = Layout(ownership, owner, engine, media=settings.media)
        self._losses = Losses(self._layout, settings.batch)
        self._settings = settings
        self._reconnecting = Reconnecting(
            away="Failed to initialize Redis client; what changes is written when it is back",
            back="Redis client initialized successfully",
            shortest=settings.reconnect,
            longest=settings.most_reconnect,
        )
        self._look_at = 0.0
        self._resync_took = 0.0
        self._no_resync_before = 0.0
        self._blocks: dict[Block, None] = {}
        self._names: dict[int, None] = {}
        self._under_way = 0
        self._wake = asyncio.Event()
        self._everything = True
        self._run_id: str | None = None

    @property
    def failures(self) -> Mapping[str, int]:
        """How often Redis was found not to be available, by reason."""
        return self._reconnecting.failures

    @property
    def behind(self) -> int:
        """Names of changed blocks that are not written yet."""
        return len(self._blocks) + len(self._names) + self._under_way

    @property
    def in_step(self) -> bool:
        """Whether Redis says what the engine holds."""
        return self.connected and not self._everything and not self.behind

    def note(self, changes: Changes) -> None:
        """Take in what changed, to be written soon."""
        if self._everything:
            return  # it is all written anew
        self._blocks.update(dict.fromkeys(changes.touched))
        self._names.update(dict.fromkeys(changes.engine_hashes))
        if self.behind > self._settings.most_changed:
            self.counts["overflows"] += 1
            self._drop_all()
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled; Redis may come and go meanwhile."""
        await self._reconnecting.run(self._stay_connected)

    async def _stay_connected(self) -> NoReturn:
        connection = await RedisConnection.open(self._redis)
        try:
            await self._serve(connection)
        finally:
            self.connected = False
            connection.close()

    async def withdraw(self, seconds: float) -> bool:
        """Delete all that is written, as nobody will keep it true; returns whether that went well. End `run` first."""
        try:
            async with asyncio.timeout(seconds):
                connection = await RedisConnection.open(self._redis)
                try:
                    for blocks in _batches(self._layout.held(), self._settings.batch):
                        await connection.ask([self._layout.disowned(block) for block in blocks])
                    for names in _batches(self._ownership.engine_hashes(), self._settings.batch):
                        await connection.ask([self._layout.unmapped(name) for name in names])
                    await connection.ask([self._losses.unmark])
                finally:
                    connection.close()
        except (RedisUnavailableError, TimeoutError):
            return False
        return True

    async def _serve(self, connection: RedisConnection) -> NoReturn:
        clock = asyncio.get_running_loop().time
        (info,) = await self._ask(connection, [("INFO", "server")])
        before, self._run_id = self._run_id, run_id(info)
        if self._run_id is None or self._run_id != before:
            self._drop_all()
        self.counts["connects"] += 1
        self.connected = True
        self._reconnecting.is_back(clock(), host=self._redis.host, port=self._redis.port)
        self._look_at = clock()
        while True:
            if self._everything:
                began = clock()
                await self._resync(connection)
                self._resync_took = clock() - began
            await self._flush(connection)
            if clock() >= self._look_at:
                self._look_at = clock() + self._settings.look_every
                await self._look_for_losses(connection, clock())
            elif not self.behind and not self._everything:
                self._wake.clear()
                await self._until_woken(connection, self._look_at - clock())

    async def _until_woken(self, connection: RedisConnection, seconds: float) -> None:
        waits = {asyncio.ensure_future(self._wake.wait()), asyncio.ensure_future(connection.closed.wait())}
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if connection.closed.is_set():
            raise RedisUnavailableError("the connection broke")

    async def _resync(self, connection: RedisConnection) -> None:
        """Delete what is not so, and write what is."""
        self.counts["resyncs"] += 1
        self._everything = False
        self._under_way = 1
        try:
            # First, so that whatever is lost from here on is missed.
            await self._ask(connection, [self._losses.mark])
            await self._sweep(connection)
            for blocks in _batches(self._layout.held(), self._settings.batch):
                await self._write(connection, blocks, ())
            for names in _batches(self._ownership.engine_hashes(), self._settings.batch):
                await self._write(connection, (), names)
        except BaseException:
            self._everything = True
            raise
        finally:
            self._under_way = 0

    async def _sweep(self, connection: RedisConnection) -> None:
        """Delete the ownerships under our name that are none, of any model."""
        cursor = b"0"
        while True:
            scan: Command = ("SCAN", cursor, "MATCH", BLOCK_PREFIX + "*", "COUNT", self._settings.batch)
            (reply,) = await self._ask(connection, [scan])
            cursor, keys = scanned(reply)
            for some in _batches(dict.fromkeys(keys), self._settings.batch):
                replies = await self._ask(connection, self._layout.false_ones(some))
                self.counts["swept"] += sum(reply for reply in replies if isinstance(reply, int))
            if cursor == b"0":
                return

    async def _look_for_losses(self, connection: RedisConnection, now: float) -> None:
        """Look at some of the blocks. What is wrong is written again, everything if much is."""
        found = self._losses.read(await self._ask(connection, self._losses.questions(self._blocks)))
        self.counts["missing"] += found.missing
        self.counts["altered"] += found.altered
        if found.marker is not Marker.OURS or found.many:
            usurped = found.marker is Marker.ANOTHERS
            self.counts["usurped" if usurped else "lost"] += 1
            if now >= self._no_resync_before:
                pause = max(self._settings.resync_pause, self._resync_took / _SHARE_OF_RESYNCS)
                self._no_resync_before = now + pause
                remedy = _USURPED if usurped else _EVICTION
                logger.warning("Redis has lost what was written; everything is written anew", remedy=remedy)
                self._drop_all()
                return
        elif found.round_missing:
            logger.warning(
                "Redis has lost single blocks; they were written again", blocks=found.round_missing, remedy=_EVICTION
            )
        await self._write(connection, found.wrong, ())

    async def _flush(self, connection: RedisConnection) -> None:
        """Write one batch of what changed."""
        blocks = list(islice(self._blocks, self._settings.batch))
        names = list(islice(self._names, self._settings.batch))
        for block in blocks:
            del self._blocks[block]
        for name in names:
            del self._names[name]
        self._under_way = len(blocks) + len(names)
        try:
            await self._write(connection, blocks, names)
        except BaseException:
            self._blocks.update(dict.fromkeys(blocks))
            self._names.update(dict.fromkeys(names))
            raise
        finally:
            self._under_way = 0

    async def _write(self, connection: RedisConnection, blocks: Sequence[Block], names: Sequence[int]) -> None:
        """Write how things are with these blocks. Raises RedisUnavailableError also when Redis refuses for now."""
        if not blocks and not names:
            return
        commands = [*map(self._layout.block, blocks), *map(self._layout.mapping, names)]
        # Deletions first: a Redis that is full still takes them.
        deletes = [command for command in commands if command[0] in _DELETIONS]
        writes = [command for command in commands if command[0] not in _DELETIONS]
        replies = await self._ask(connection, [*deletes, *writes])
        self.counts["batches"] += 1
        self.counts["written"] += len(writes)
        self.counts["deleted"] += len(deletes)
        passing: str | None = None
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                word = str(reply).partition(" ")[0].lower()[:32]
                self.counts[f"refused_{word}"] += 1
                # Somebody else's key under this name stays; all else may work later.
                passing = passing or (None if word == "wrongtype" else str(reply))
        if passing is not None:
            raise RedisUnavailableError(f"Redis refuses to write: {passing}", Away.REFUSED)

    async def _ask(self, connection: RedisConnection, commands: Sequence[Command]) -> list[Any]:
        try:
            async with asyncio.timeout(self._settings.timeout):
                return await connection.ask(commands)
        except TimeoutError as error:
            raise RedisUnavailableError(f"no answer within {self._settings.timeout} s", Away.TIMEOUT) from error

    def _drop_all(self) -> None:
        self._blocks.clear()
        self._names.clear()
        self._everything = True


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    items = iter(items)
    while some := list(islice(items, size)):
        yield some
