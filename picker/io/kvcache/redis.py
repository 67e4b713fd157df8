"""What sidecars wrote into Redis, asked for prompt by prompt."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from picker.core.endpoint_table import EndpointTable
from picker.core.kv_index.owners import Candidate, OwnedPrefix
from picker.core.plugins.kvcache_args import KvCacheArgs, RedisArgs
from picker.core.plugins.kvcache_aware import KvCacheProducer
from picker.core.tokens.prompt import TokenPrompt
from picker.io.keep import Failed
from picker.io.kv_index.redis_connection import RedisSettings
from picker.io.kv_index.redis_reader import ReaderSettings, RedisReader
from picker.io.kvcache.sources import Followed, engine_start

_CHUNK = 512
"""Blocks of a prediction that are asked for at once."""
_NOBODY = OwnedPrefix([], {})


def redis_settings(args: RedisArgs, environment: Mapping[str, str]) -> RedisSettings:
    """Return where Redis is. The environment completes what the arguments leave out; only it has the password."""
    host, _, port = args.address.rpartition(":")
    if not args.address:
        host, port = environment.get("REDIS_HOST") or "redis-server", environment.get("REDIS_PORT") or "6379"
    return RedisSettings(
        host=host.strip("[]"),
        port=int(port) if port.isdecimal() else 6379,
        db=args.db,
        username=args.username,
        password=environment.get("REDIS_PASSWORD", ""),
        tls=ssl.create_default_context() if args.tls else None,
    )


class RedisOwners:
    """See `Sources`; nothing is known before it is asked for."""

    def __init__(
        self,
        producer: KvCacheProducer,
        args: KvCacheArgs,
        table: EndpointTable,
        clock: Callable[[], float],
        environment: Mapping[str, str] | None = None,
        failed: Failed | None = None,
    ) -> None:
        settings = redis_settings(args.redis, os.environ if environment is None else environment)
        self.reader = RedisReader(settings, ReaderSettings(budget=args.redis.budget_seconds), failed=failed)
        self.events: Counter[str] = Counter()
        self._producer = producer
        self._args = args
        self._clock = clock
        self._table = table
        self._place = f"{settings.host}:{settings.port}"
        self._owners: dict[bytes, Candidate] = {}

    @property
    def dropped(self) -> Counter[str]:
        return self.reader.owners

    def follow(self, endpoints: Mapping[int, Followed]) -> None:
        self._owners = {
            f"{followed.endpoint.name}.{followed.endpoint.namespace}".encode(): Candidate(slot)
            for slot, followed in endpoints.items()
        }
        self.tend()

    async def run(self) -> None:
        await self.reader.run()

    def tend(self) -> None:
        """Learn when engines started, and let picks be visible to the next decisions."""
        now = self._clock()
        for name, candidate in self._owners.items():
            started = engine_start(self._table, candidate.slot)
            if started != candidate.started_at:
                self._owners[name] = replace(candidate, started_at=started)
            self._producer.index.open(candidate.slot, "", now, block_size=self._producer.block_size)

    def is_connected(self, slot: int) -> bool:  # noqa: ARG002
        return self.reader.connected

    def is_complete(self, slot: int) -> bool:  # noqa: ARG002
        return False

    def place(self, slot: int) -> str:  # noqa: ARG002
        return self._place

    def lag(self, slot: int) -> float | None:  # noqa: ARG002
        return None

    def stats(self, slot: int) -> dict[str, Any]:  # noqa: ARG002
        return {"redis": self._place, "connected": self.reader.connected}

    async def owners(self, prompts: Sequence[TokenPrompt]) -> list[OwnedPrefix | None] | None:
        """Return who owns the leading blocks of each prompt, None for one that nobody can own; None without an answer."""
        return await self._for_each([self._lookup(prompt) for prompt in prompts])

    async def all_owners(self, prompts: Sequence[TokenPrompt]) -> list[OwnedPrefix | None] | None:
        """The same without a limit on the blocks that are looked up."""
        return await self._for_each([self._lookup_all(prompt) for prompt in prompts])

    async def _for_each(self, lookups: Sequence[Any]) -> list[OwnedPrefix | None] | None:
        try:
            return list(await asyncio.gather(*lookups))
        except _NoAnswerError:
            return None

    async def _lookup(self, prompt: TokenPrompt) -> OwnedPrefix | None:
        model = self._producer.prompt_hashes.model(prompt)
        if model is None:
            return None
        hashes = self._producer.prompt_hashes.hashes(prompt, self._producer.block_size, self._args.max_blocks_to_match)
        return await self._ask(model, hashes, self._owners)

    async def owned(self, model: str, hashes: Sequence[int]) -> OwnedPrefix | None:
        """Return who owns blocks with these hashes, from the first on; None without an answer."""
        found = await self._for_each([self._ask_all(model, hashes)])
        return None if found is None else found[0]

    async def _lookup_all(self, prompt: TokenPrompt) -> OwnedPrefix | None:
        model = self._producer.prompt_hashes.model(prompt)
        if model is None:
            return None
        return await self._ask_all(model, self._producer.prompt_hashes.hashes(prompt, self._producer.block_size))

    async def _ask_all(self, model: str, hashes: Sequence[int]) -> OwnedPrefix:
        """Ask for so many blocks at once, and for more as long as somebody owns all of them."""
        lengths: dict[int, int] = {}
        candidates = self._owners
        for start in range(0, len(hashes), _CHUNK):
            some = hashes[start : start + _CHUNK]
            found = await self._ask(model, some, candidates)
            whole = 0
            for blocks, mask in found.groups:
                lengths.update({one.slot: start + blocks for one in candidates.values() if mask >> one.slot & 1})
                whole |= mask if blocks == len(some) else 0
            candidates = {name: one for name, one in candidates.items() if whole >> one.slot & 1}
            if not candidates:
                break
        return OwnedPrefix([(blocks, 1 << slot) for slot, blocks in lengths.items()], {})

    async def _ask(self, model: str, hashes: Sequence[int], candidates: Mapping[bytes, Candidate]) -> OwnedPrefix:
        if not hashes:
            return _NOBODY
        found = await self.reader.lookup(model, hashes, candidates, self._args.tier_weights)
        if found is None:
            raise _NoAnswerError
        return found


class _NoAnswerError(Exception):
    pass
