"""Who holds which token block: all engines' caches, fed by KV events, asked by prompts.

Every engine cache (endpoint slot and data-parallel rank, from one start or clear to the next) has a *lane*, a bit in
the masks of the planes `key -> lanes`. Forgetting a cache takes its lane away from its slot, so that it is invisible
at once; its bits are swept out later, in slices, before the lane is given to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter

from picker.core.block_index.cache import EngineCache, Planes
from picker.core.block_index.chains import KeyChains
from picker.core.block_index.holds import Hold, Holds
from picker.core.block_index.keys import Media
from picker.core.block_index.lanes import Lanes
from picker.core.block_index.layout import GPU, Layout, layout_of
from picker.core.block_index.limits import Limits
from picker.core.block_index.lookup import Lookup
from picker.core.block_index.prediction import Prediction, least
from picker.core.block_index.prompt import Prompt
from picker.core.block_index.source import Source, SourceStats
from picker.core.block_index.watches import Watches
from picker.core.kv_events.events import BlockRemoved, BlockStored, EventBatch, KvEvent

TIER_WEIGHTS: Mapping[str, float] = {GPU: 1.0, "CPU": 0.8, "CPU_PINNED": 0.8, "DISK": 0.5, "STORAGE": 0.5}
"""What a cached token is worth by medium; media that are not here do not count."""

DAY = 86_400.0
MOST_RANKS = 1024
_SWEPT_PER_BATCH = 256
_HASHES = attrgetter("block_hashes")


class BlockIndex:
    """Blocks of all engines.

    `max_blocks` is how many blocks an endpoint may have here, over all models and ranks; beyond that, those stored
    first go, of the rank that has most. `reports_reuse` is for engines whose clients ask for
    `kv_cache_report_mode: full`: blocks that are reused are reported like stored ones then, from block 0, and must not
    be counted as further copies; without it, such reports would leave blocks here that are gone.
    """

    def __init__(
        self,
        *,
        max_blocks: int = 1 << 20,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        tier_weights: Mapping[str, float] = TIER_WEIGHTS,
        reports_reuse: bool = False,
        chains: KeyChains | None = None,
    ) -> None:
        self.unknown_ranks = 0
        """Batches dropped because of a rank that no engine has."""
        self.expired = 0
        """Sources forgotten by `expire`."""
        self.chains = KeyChains() if chains is None else chains
        self.watches = Watches()
        self._max_blocks = max_blocks
        self._limits = limits
        self._tier_weights = tier_weights
        self._reports_reuse = reports_reuse
        self._planes: dict[tuple[int, str], Planes] = {}
        self._sources: dict[int, dict[int, Source]] = {}
        self._lanes = Lanes()
        self._holds = Holds()
        self._lookup = Lookup(self._planes, self._holds.plane, tier_weights)

    def open(self, slot: int, model: str, now: float, *, rank: int = 0, block_size: int | None = None) -> None:
        """Announce a rank of an endpoint before its first event; with its block size, holds are visible at once."""
        source = self._source(slot, rank, model, now)
        if block_size is not None:
            source.cache.expect(0, GPU, block_size)
            self._arrange(source)

    def apply(self, slot: int, model: str, batch: EventBatch, now: float) -> None:
        """Take over one batch of events of an endpoint, in order.

        `model` is what prompts call this engine's base model. Another name than before starts anew.
        """
        rank = batch.data_parallel_rank or 0
        if not 0 <= rank < MOST_RANKS:
            self.unknown_ranks += 1
            return
        source = self._source(slot, rank, model, now)
        stored = 0
        for pool, events in groupby(batch.events, _pool_removed_from):  # removals in a row are one step
            if pool is not None:
                source.cache.remove(chain.from_iterable(map(_HASHES, events)), *pool)
                continue
            for event in events:
                if isinstance(event, BlockStored):
                    stored += len(event.block_hashes)
                    keys = source.cache.store(event, reports_reuse=self._reports_reuse)
                    if self.watches.blocks:
                        self.watches.stored(slot, keys, now)
                    if source.cache.shapes_changed:
                        self._arrange(source)
                    self._enforce_cap(slot)
                else:
                    self._restart(source)
        if source.cache.take_losses():
            self._lookup.lost(source.cache.lane)
        self._lanes.sweep(_SWEPT_PER_BATCH + stored)

    def prompt(
        self,
        model: str,
        tokens: Sequence[int],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        media: Sequence[Media] = (),
        reads_cache: bool = True,
    ) -> Prompt:
        """Make a prompt to look up; token ids in an `array("I")` are the fastest.

        Raises OverflowError for token ids outside 0 .. 2**32-1 and TypeError for what is no integer.
        """
        return Prompt(
            self.chains,
            model,
            tokens,
            adapter=adapter,
            cache_salt=cache_salt,
            media=media,
            reads_cache=reads_cache,
        )

    def match(self, prompt: Prompt, candidates: int) -> list[tuple[float, int]]:
        """Group candidate slots by cached tokens, most first, for scheduling: held blocks count.

        Returns `(tokens, mask of slots)`; candidates in no pair have none. Tokens in lower tiers count with their
        weight. An endpoint with several ranks has their mean, since its engine chooses the rank.
        """
        groups: dict[float, int] = {}
        means: dict[int, float] = {}
        for _, value, lanes in self._lookup.find(prompt, self._lanes.of(candidates), held=True):
            own = lanes & self._lanes.own
            if own:
                groups[value] = groups.get(value, 0) | own
            for slot in self._lanes.slots(lanes ^ own):
                means[slot] = means.get(slot, 0.0) + value / len(self._sources[slot])
        for slot, value in means.items():
            groups[value] = groups.get(value, 0) | 1 << slot
        return sorted(groups.items(), reverse=True)

    def predict(self, prompt: Prompt, slot: int, rank: int | None = None) -> Prediction:
        """Predict what the engine will report as cached tokens.

        Blocks in lower tiers count in full, since vLLM and SGLang report tokens loaded from there as cached. Without a
        rank the answer is the least of all ranks, so that it is never too much.
        """
        sources = [one for number, one in self._sources.get(slot, {}).items() if rank is None or number == rank]
        return self._predict(prompt, {slot: sources})[slot] if sources else Prediction(0, complete=False)

    def predict_all(self, prompt: Prompt) -> dict[int, Prediction]:
        """Predict for every endpoint that there are events of, by slot; costs hardly more than for one."""
        return self._predict(prompt, {slot: list(ranks.values()) for slot, ranks in self._sources.items()})

    def _predict(self, prompt: Prompt, sources: Mapping[int, Sequence[Source]]) -> dict[int, Prediction]:
        wanted = {source.cache.bit: 0 for ranks in sources.values() for source in ranks}
        for tokens, _, lanes in self._lookup.find(prompt, sum(wanted), held=False):
            rest = lanes
            while rest:
                bit = rest & -rest
                wanted[bit] = tokens
                rest ^= bit
        return least(sources, wanted)

    def predict_named(self, names: Sequence[int]) -> dict[int, Prediction]:
        """Predict for a prompt whose blocks have these hashes, by those that the engines themselves give them."""
        sources = {slot: list(ranks.values()) for slot, ranks in self._sources.items()}
        return least(sources, {one.cache.bit: one.cache.leading(names) for ranks in sources.values() for one in ranks})

    def hold(self, slot: int, prompt: Prompt) -> Hold:
        """Make the blocks of a prompt that the slot lacks visible for `match` until the hold is released.

        Engines with windows are left out: which blocks they will keep is theirs to say.
        """
        parts = []
        sources = self._sources.get(slot, {}).values()
        cached: list[int] = []
        size = 0
        for source in sources:
            found = self._lookup.find(prompt, source.cache.bit, held=False)
            cached.append(found[0].tokens if found else 0)
            shape = source.layout.single
            if shape is not None:
                size = shape.block_size
                parts.append(self._holds.add(source.cache.lane, prompt.chain(size).keys[cached[-1] // size :]))
        complete = bool(sources) and all(source.incomplete_since is None for source in sources)
        return Hold(slot, min(cached, default=0), complete, size, parts)

    def block_size(self, slot: int) -> int:
        """Tokens in a block of the slot's engine; 0 where that is not known, or not one number."""
        sources = self._sources.get(slot, {}).values()
        sizes = {0 if source.layout.single is None else source.layout.single.block_size for source in sources}
        return sizes.pop() if len(sizes) == 1 else 0

    def hold_keys(self, slot: int, keys: Sequence[int]) -> Hold:
        """Make blocks visible that another picker sent to the slot, until the hold is released."""
        parts = [self._holds.add(source.cache.lane, keys) for source in self._sources.get(slot, {}).values()]
        return Hold(slot, 0, False, 0, parts)

    def release(self, hold: Hold) -> None:
        """Take a hold back, once. Nothing happens where the engine's cache was forgotten in the meantime."""
        self._holds.release(hold)

    def restart(self, slot: int, rank: int) -> None:
        """Forget what a rank holds, since its engine restarted. It is invisible at once."""
        source = self._sources.get(slot, {}).get(rank)
        if source is not None:
            self._restart(source)

    def forget(self, slot: int) -> None:
        """Forget an endpoint. It is invisible at once; `sweep` frees what it held."""
        for source in self._sources.pop(slot, {}).values():
            self._retire(source)
        self._assign(slot)
        self.watches.forget(slot)

    def sweep(self, blocks: int = 1000) -> bool:
        """Free up to so many blocks of forgotten caches, the default in less than 1 ms; returns if any are left."""
        return self._lanes.sweep(blocks)

    def heard(self, slot: int, rank: int, now: float) -> None:
        """Note a sign of life of an engine that has no events to send, such as an open connection."""
        source = self._sources.get(slot, {}).get(rank)
        if source is not None:
            source.heard_at = now

    def expire(self, now: float, age: float = DAY) -> int:
        """Forget ranks that gave no sign of life for more than `age` seconds; returns how many.

        An engine says when it drops a block, so that a block is there until then, however old it is. Nothing is known
        only of an engine that says nothing any more.
        """
        silent = [one for ranks in self._sources.values() for one in ranks.values() if now - one.heard_at > age]
        for source in silent:
            ranks = self._sources[source.slot]
            del ranks[source.rank]
            if not ranks:
                del self._sources[source.slot]
            self._retire(source)
            self._assign(source.slot)
        self.expired += len(silent)
        return len(silent)

    def mark_incomplete(self, slot: int, rank: int, since: float) -> None:
        """Say that events of a rank were lost at a time: it may hold more than is known here."""
        source = self._sources.get(slot, {}).get(rank)
        if source is not None and source.incomplete_since is None:
            source.incomplete_since = since

    def mark_complete(self, slot: int, rank: int) -> None:
        """Say that all that a rank holds is known."""
        source = self._sources.get(slot, {}).get(rank)
        if source is not None:
            source.incomplete_since = None

    def stats(self) -> list[SourceStats]:
        """Return counters and gauges of every rank of every endpoint."""
        return [source.stats() for ranks in self._sources.values() for source in ranks.values()]

    def _source(self, slot: int, rank: int, model: str, now: float) -> Source:
        ranks = self._sources.setdefault(slot, {})
        source = ranks.get(rank)
        if source is None:
            source = ranks[rank] = Source(slot, rank, model, now)
            self._start(source)
        elif source.model != model:
            source.model = model
            self._restart(source)
        source.heard_at = now
        return source

    def _start(self, source: Source) -> None:
        lane = self._lanes.take(source.slot)
        source.cache = EngineCache(source.model, lane, self._planes, self._limits, source.dropped)
        source.layout = Layout((), ())
        self._lookup.lost(lane)
        self._assign(source.slot)

    def _restart(self, source: Source) -> None:
        self._retire(source)
        self._start(source)

    def _retire(self, source: Source) -> None:
        cache = source.cache
        self._lookup.move(cache.bit, source.layout, None)
        self._lanes.retire(cache.lane, chain(cache.sweep(), self._holds.drop(cache.lane)))

    def _assign(self, slot: int) -> None:
        caches = [source.cache.bit for source in self._sources.get(slot, {}).values()]
        self._lanes.assign(slot, sum(caches))

    def _arrange(self, source: Source) -> None:
        layout = layout_of(source.cache.shapes.values(), self._tier_weights)
        self._lookup.move(source.cache.bit, source.layout, layout)
        source.layout = layout
        source.cache.shapes_changed = False

    def _enforce_cap(self, slot: int) -> None:
        ranks = self._sources[slot]
        excess = sum([source.cache.blocks for source in ranks.values()]) - self._max_blocks
        while excess > 0:
            source = max(ranks.values(), key=lambda one: one.cache.blocks)
            source.cache.evict()
            source.evicted += 1
            excess -= 1
            if source.cache.take_losses():
                self._lookup.lost(source.cache.lane)


def _pool_removed_from(event: KvEvent) -> tuple[int, str] | None:
    """Group and medium of a removal; None for other events."""
    return (event.group_idx or 0, (event.medium or GPU).upper()) if isinstance(event, BlockRemoved) else None
