"""Keeps in Redis what a sidecar's engine holds, in Kthena's layout.

    matrix:kv:block:{model}@{standardized hash}   HASH: {pod}.{namespace} -> Unix seconds, or `seconds|medium`
    vllm:kv:block:{pod}.{namespace}@{engine hash} the standardized hash; ends by itself after a day

Nothing is queued but the names of blocks that may have changed: what to write is looked up when it is written. So
a flush can be repeated, and when Redis is away for so long that there are too many names, they are dropped and
everything is written anew. That also happens with a Redis that is not the one from before. Whatever it says there of us
that is not so any more, left by a predecessor that crashed, is deleted first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import hiredis
import structlog
from msgspec import Struct

from picker.core.kv_index.owners import BLOCK_PREFIX, block_key
from picker.core.kv_index.ownership import Changes, Ownership
from picker.io.kv_index.backoff import Backoff
from picker.io.kv_index.redis_connection import Command, RedisConnection, RedisSettings, RedisUnavailableError, scanned

logger = structlog.get_logger(__name__)

MAPPING_SECONDS = 86_400
_INT64 = 1 << 63


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


class RedisWriter:
    """Writes one engine's ownership. `note` tells it what changed; `run` writes.

    `owner` is `{pod}.{namespace}`; `engine` is the prefix of the engine's own names, "vllm" or "sglang". `counts`:
    `written`, `deleted`, `swept` (of a predecessor), `batches`, `retries`, `connects`, `resyncs`, `overflows`, and
    commands that Redis refused as `refused_` and its word for why.
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
        self._owner = owner
        self._engine = engine
        self._settings = settings
        self._backoff = Backoff(settings.reconnect, settings.most_reconnect)
        self._blocks: dict[tuple[str, int], None] = {}
        self._names: dict[int, None] = {}
        self._under_way = 0
        self._wake = asyncio.Event()
        self._everything = True
        self._run_id: str | None = None
        self._said = ""

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
        while True:
            connection: RedisConnection | None = None
            try:
                connection = await RedisConnection.open(self._redis)
                await self._serve(connection)
            except (RedisUnavailableError, TimeoutError) as error:
                self.counts["retries"] += 1
                reason = str(error) or f"no answer within {self._settings.timeout} s"
                if reason != self._said:
                    self._said = reason
                    logger.warning("Failed to initialize Redis client" if connection is None else reason, error=reason)
            finally:
                self.connected = False
                if connection is not None:
                    connection.close()
            await asyncio.sleep(self._backoff.next())

    async def withdraw(self, seconds: float) -> bool:
        """Delete all that is written, as nobody will keep it true; returns whether that went well. End `run` first."""
        try:
            async with asyncio.timeout(seconds):
                connection = await RedisConnection.open(self._redis)
                try:
                    for model in self._ownership.models:
                        blocks = [block for block, _ in self._ownership.holdings(model)]
                        for some in _batches(blocks, self._settings.batch):
                            await connection.ask([("HDEL", block_key(model, block), self._owner) for block in some])
                    for names in _batches(self._ownership.engine_hashes(), self._settings.batch):
                        await connection.ask([("DEL", self._mapping_key(name)) for name in names])
                finally:
                    connection.close()
        except (RedisUnavailableError, TimeoutError):
            return False
        return True

    async def _serve(self, connection: RedisConnection) -> None:
        run_id = await self._identify(connection)
        if run_id is None or run_id != self._run_id:
            self._drop_all()
        self._run_id = run_id
        self.counts["connects"] += 1
        self.connected = True
        self._said = ""
        logger.info("Redis client initialized successfully", host=self._redis.host, port=self._redis.port)
        while True:
            if self._everything:
                await self._resync(connection)
            await self._flush(connection)
            self._backoff.reset()
            if not self.behind and not self._everything:
                self._wake.clear()
                await self._until_woken(connection)

    async def _until_woken(self, connection: RedisConnection) -> None:
        waits = {asyncio.ensure_future(self._wake.wait()), asyncio.ensure_future(connection.closed.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if connection.closed.is_set():
            raise RedisUnavailableError("the connection broke")

    async def _identify(self, connection: RedisConnection) -> str | None:
        """Return what tells this Redis process from others, None if it does not say."""
        (reply,) = await self._ask(connection, [("INFO", "server")])
        if isinstance(reply, bytes):
            for line in reply.decode("utf-8", "replace").splitlines():
                name, _, value = line.partition(":")
                if name == "run_id":
                    return value
        return None

    async def _resync(self, connection: RedisConnection) -> None:
        """Delete what is not so, and write what is."""
        self.counts["resyncs"] += 1
        self._everything = False
        self._under_way = 1
        try:
            await self._sweep(connection)
            for model in self._ownership.models:
                blocks = [(model, block) for block, _ in self._ownership.holdings(model)]
                for some in _batches(blocks, self._settings.batch):
                    await self._write(connection, some, ())
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
                not_ours = [key for key in some if not self._is_held(key)]
                replies = await self._ask(connection, [("HDEL", key, self._owner) for key in not_ours])
                self.counts["swept"] += sum(reply for reply in replies if isinstance(reply, int))
            if cursor == b"0":
                return

    def _is_held(self, key: bytes) -> bool:
        model, _, block = key.decode("utf-8", "replace").removeprefix(BLOCK_PREFIX).rpartition("@")
        if not block.isascii() or not block.isdecimal() or len(block) > 20 or str(int(block)) != block:
            return False
        return self._ownership.holding(model, int(block)) is not None

    async def _flush(self, connection: RedisConnection) -> None:
        while (self._blocks or self._names) and not self._everything:
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

    async def _write(
        self, connection: RedisConnection, blocks: Sequence[tuple[str, int]], names: Sequence[int]
    ) -> None:
        """Write how things are with these blocks. Raises RedisUnavailableError also when Redis refuses for now."""
        writes: list[Command] = []
        deletes: list[Command] = []
        for model, block in blocks:
            holding = self._ownership.holding(model, block)
            key = block_key(model, block)
            if holding is None:
                deletes.append(("HDEL", key, self._owner))
            else:
                value = f"{holding.stored_at}|{holding.medium}" if self._settings.media else str(holding.stored_at)
                writes.append(("HSET", key, self._owner, value))
        for name in names:
            standard = self._ownership.standard_hash(name)
            key = self._mapping_key(name)
            if standard is None:
                deletes.append(("DEL", key))
            else:
                writes.append(("SET", key, str(standard), "EX", MAPPING_SECONDS))
        # Deletions first: a Redis that is full still takes them.
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
            raise RedisUnavailableError(f"Redis refuses to write: {passing}")

    async def _ask(self, connection: RedisConnection, commands: Sequence[Command]) -> list[Any]:
        async with asyncio.timeout(self._settings.timeout):
            return await connection.ask(commands)

    def _mapping_key(self, name: int) -> str:
        """Return the key of an engine's block; SGLang writes its hashes as signed integers."""
        signed = name - 2 * _INT64 if self._engine == "sglang" and name >= _INT64 else name
        return f"{self._engine}:kv:block:{self._owner}@{signed}"

    def _drop_all(self) -> None:
        self._blocks.clear()
        self._names.clear()
        self._everything = True


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    items = iter(items)
    while some := list(islice(items, size)):
        yield some
