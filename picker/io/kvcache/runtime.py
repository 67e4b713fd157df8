"""What `kvcache-aware` needs while it is enabled: sources of what engines hold, and tokens for every request.

One runtime stands for one set of arguments; another one takes over when they change.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import replace

from picker.core.arrays import slots_of
from picker.core.block_hashes.prompts import PromptHashes
from picker.core.block_index.prediction import Prediction
from picker.core.director import Director
from picker.core.exchange.effects import Decide
from picker.core.kv_index.owners import OwnedPrefix
from picker.core.plugins.kvcache_args import IndexMode, KvCacheArgs
from picker.core.plugins.kvcache_aware import OWNERS, TOKENS, KvCacheProducer
from picker.core.scheduling.api import Request
from picker.core.tokens.prompt import EngineRequest, ModelNames, TokenPrompt, read_engine_request
from picker.io.keep import Failed, log_failure
from picker.io.kv_events.share import LoopShare
from picker.io.kvcache.oracle import NOTHING, Held, block_size_of, held_by_events
from picker.io.kvcache.sources import Followed, Sources
from picker.io.kvcache.tokenizers import open_tokenizers
from picker.io.kvcache.watch import Watch
from picker.io.tokenize.chain import TokenizerChain
from picker.io.tokenize.remote import Target, engine_targets

if TYPE_CHECKING:
    from picker.io.kvcache.redis import RedisOwners

logger = structlog.get_logger(__name__)

_USUAL_PORTS = {"vllm": KvCacheArgs().vllm_tokenizer_port, "sglang": KvCacheArgs().sglang_tokenizer_port}
_TEND_SECONDS = 0.5
_SWEEP_SECONDS = 0.02
_SWEPT = 500
_TOKENIZING_SHARE = 0.8
"""Of the time for a preparation; the rest is for what comes after it."""


class KvCacheRuntime:
    """See the module. It is the director's `Preparation`, and knows what every endpoint holds.

    `outcomes` counts preparations: `ok`, `not_tokenized`, `no_owners` (Redis gave no answer), `deadline`, `unusable`
    (a body that is no request of an engine), `starting`. `failed` is told of unexpected errors that were survived.
    """

    def __init__(self, director: Director, producer: KvCacheProducer, failed: Failed = log_failure) -> None:
        args = producer.args
        self.producer = producer
        self.outcomes: Counter[str] = Counter(dict.fromkeys(("ok", "not_tokenized", "deadline"), 0))
        self.chain: TokenizerChain | None = None
        self.redis: RedisOwners | None = None
        self.sources: Sources
        share = LoopShare()
        # In the other modes nobody reads engines' events on this loop.
        self._precedence = share.precedence if args.index_mode is IndexMode.DIRECT else None
        # Only those who use a mode need its libraries.
        if args.index_mode is IndexMode.DIRECT:
            from picker.io.kvcache.direct import DirectSources  # noqa: PLC0415

            self.sources = DirectSources(producer.index, args, share, director.now, failed)
        elif args.index_mode is IndexMode.MEMORY:
            from picker.io.kvcache.memory import MemorySources  # noqa: PLC0415

            self.sources = MemorySources(producer, args, director.table, director.now, failed=failed)
        else:
            from picker.io.kvcache.redis import RedisOwners  # noqa: PLC0415

            self.redis = RedisOwners(producer, args, director.table, director.now, failed=failed)
            self.sources = self.redis
        self.args = args
        self._director = director
        self._failed = failed
        self.followed: dict[int, Followed] = {}
        self._targets: Sequence[Target] = ()
        self._watch = Watch(director.table, producer, self.sources)

    def follow(self) -> None:
        """Take over the endpoints of the director's table. To be called whenever they changed, before anything else."""
        table = self._director.table
        self.followed = {slot: Followed(table.generation[slot], table.endpoints[slot]) for slot in table.slots.tolist()}
        args = self.args
        ports = {"vllm": args.vllm_tokenizer_port, "sglang": args.sglang_tokenizer_port}
        ports = {engine: port for engine, port in ports.items() if port != _USUAL_PORTS[engine]}
        endpoints = [replace(followed.endpoint, model="") for followed in self.followed.values()]
        self._targets = engine_targets(endpoints, ports)
        self.sources.follow(self.followed)

    async def run(self) -> None:
        """Work until cancelled."""
        self.follow()
        async with AsyncExitStack() as stack:
            self.chain = await open_tokenizers(self.args, lambda: self._targets, stack, self._failed, self._precedence)
            logger.info(
                f"KVCacheAware: {self.args.index_mode} mode active, runtimePort={self.args.runtime_port}",  # noqa: G004  Kthena's words
                tokenizers=[str(way) for way in self.args.ways],
            )
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.sources.run())
                    group.create_task(self._tend())
                    group.create_task(self._sweep())
            finally:
                self.chain = None

    def begin(self, asked: Decide, request: Request, seconds: float) -> Awaitable[Mapping[str, Any]] | None:
        """See `Preparation`."""
        chain = self.chain
        if chain is None:
            self.outcomes["starting"] += 1
            return None
        if not chain.settings.names.base:
            self._name_models()
        wanted = read_engine_request(request.path, asked.body)
        if not isinstance(wanted, EngineRequest):
            self.outcomes["unusable"] += 1
            return None
        return self._prepare(chain, wanted, seconds)

    async def _prepare(self, chain: TokenizerChain, wanted: EngineRequest, seconds: float) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        outcome = "ok"
        try:
            async with asyncio.timeout(seconds):
                tokenized = await chain.tokenize(wanted)
                if not tokenized.prompts:
                    outcome = "not_tokenized"
                else:
                    found[TOKENS] = tokenized.prompts
                    self._watch.asked_for(tokenized.prompts[0])
                    if self.redis is not None:
                        owners = await self.redis.owners(tokenized.prompts)
                        if owners is None:
                            outcome = "no_owners"
                        else:
                            found[OWNERS] = owners
        except TimeoutError:
            outcome = "deadline"
        self.outcomes[outcome] += 1
        return found

    @property
    def block_size(self) -> int:
        return self.producer.block_size

    async def held(self, prompts: Sequence[TokenPrompt]) -> list[Held] | None:
        """See `Holders`."""
        if self.redis is not None:
            return await self._owned(prompts)
        return self._held(held_by_events(self.producer.index, prompts), self._held_by_hashes(prompts))

    async def held_named(self, model: str, hashes: Sequence[int]) -> list[Held] | None:
        """See `Holders`. Where engines' own events are known, hashes are the engines'; else those of `hashProtocol`."""
        if self.redis is not None:
            owned = await self.redis.owned(model, hashes)
            return None if owned is None else self._held_by_owners([owned])
        blocks = {slot: 0 for slot in self.followed if self.producer.hashes.blocks_of(slot)}
        for count, mask in self.producer.hashes.match(model, hashes, sum(1 << slot for slot in blocks)):
            blocks.update(dict.fromkeys(slots_of(mask).tolist(), count))
        return self._held(self.producer.index.predict_named(hashes), blocks)

    @property
    def prompt_hashes(self) -> PromptHashes:
        return self.producer.prompt_hashes

    def _held(self, by_events: Mapping[int, Prediction], by_hashes: Mapping[int, int]) -> list[Held]:
        size = self.block_size
        found = []
        for slot, followed in self.followed.items():
            tokens, complete = by_events.get(slot, NOTHING)
            if slot in by_hashes:
                tokens, complete = by_hashes[slot] * size, True
            complete = complete and self.sources.is_complete(slot)
            found.append(Held(followed.endpoint.name, tokens, tokens // size, complete))
        return found

    def _held_by_hashes(self, prompts: Sequence[TokenPrompt]) -> dict[int, int]:
        """What sidecars' hashes say, where they send nothing better: leading blocks, by slot."""
        hashes, names = self.producer.hashes, self.producer.prompt_hashes
        blocks = {slot: 0 for slot in self.followed if hashes.blocks_of(slot)}
        slots = sum(1 << slot for slot in blocks)
        for prompt in prompts if blocks else ():
            model = names.model(prompt)
            if model is not None:
                for count, mask in hashes.match(model, names.hashes(prompt, self.block_size), slots):
                    for slot in slots_of(mask).tolist():
                        blocks[slot] += count
        return blocks

    async def _owned(self, prompts: Sequence[TokenPrompt]) -> list[Held] | None:
        assert self.redis is not None  # noqa: S101  the caller looked
        owners = await self.redis.all_owners(prompts)
        return None if owners is None else self._held_by_owners(owners)

    def _held_by_owners(self, owners: Sequence[OwnedPrefix | None]) -> list[Held]:
        blocks: Counter[int] = Counter()
        for owned in owners:
            for count, mask in owned.groups if owned else ():
                for slot in self.followed:
                    blocks[slot] += count if mask >> slot & 1 else 0
        # Redis does not say whether a sidecar has missed anything.
        return [
            Held(followed.endpoint.name, blocks[slot] * self.block_size, blocks[slot], complete=False)
            for slot, followed in self.followed.items()
        ]

    def incomplete(self) -> int:
        """Return how many endpoints may hold more than is known."""
        gaps = {source.slot for source in self.producer.index.stats() if source.incomplete_since is not None}
        return sum(slot in gaps or not self.sources.is_complete(slot) for slot in self.followed)

    def stats(self) -> list[dict[str, Any]]:
        """Return what is known of every endpoint, by its ranks, for people."""
        ranks: dict[int, dict[str, Any]] = {slot: {} for slot in self.followed}
        for source in self.producer.index.stats():
            if source.slot in ranks:
                ranks[source.slot][str(source.rank)] = {
                    "blocks": source.blocks,
                    "block_sizes": source.block_sizes,
                    "complete": source.incomplete_since is None,
                    "evicted": source.evicted,
                    "dropped": dict(source.dropped),
                }
        found = []
        for slot, followed in self.followed.items():
            seen = self.sources.stats(slot)
            told = seen.pop("ranks", {})
            for rank in ranks[slot].keys() - told.keys():
                ranks[slot][rank]["complete"] &= self.sources.is_complete(slot)
            for rank, more in told.items():
                own = ranks[slot].setdefault(rank, {})
                dropped = Counter(more.pop("dropped", {})) + Counter(own.get("dropped", {}))
                own.update(more, complete=bool(more["complete"] and own.get("complete")), dropped=dict(dropped))
            endpoint = followed.endpoint
            found.append({"pod_id": endpoint.name, "address": endpoint.address, **seen, "ranks": ranks[slot]})
        return found

    async def _tend(self) -> None:
        while True:
            self.sources.tend()
            self._name_models()
            self.producer.index.expire(self._director.now())
            held = self.producer.index.stats()
            size = block_size_of(held) if self.redis is None else None
            if size is not None and size != self.producer.block_size:
                logger.warning(
                    "Engines use other blocks than blockSizeToHash says; theirs are used",
                    configured=self.args.block_size_to_hash,
                    engines=size,
                )
                self.producer.block_size = size
            self._watch.look(held)
            await asyncio.sleep(_TEND_SECONDS)

    def _name_models(self) -> None:
        """Tell the tokenizers what engines call their model, and how long they have."""
        table, chain = self._director.table, self.chain
        if chain is None:
            return
        names: dict[str, None] = {}
        for slot in self.followed:
            names |= dict.fromkeys(table.bases[slot] or ())
        for followed in self.followed.values():
            if followed.endpoint.model:
                names.setdefault(followed.endpoint.model)
        deadline = self._director.decision_seconds * _TOKENIZING_SHARE
        settings = replace(
            chain.settings,
            deadline=deadline,
            names=ModelNames(tuple(names), self.args.model_aliases),
        )
        if settings != chain.settings:
            chain.settings = settings

    async def _sweep(self) -> None:
        """Free what was forgotten, in slices of less than a millisecond."""
        while True:
            busy = self.producer.index.sweep(_SWEPT)
            if self.redis is None:
                busy = self.producer.hashes.sweep(_SWEPT) or busy
            await asyncio.sleep(0 if busy else _SWEEP_SECONDS)
