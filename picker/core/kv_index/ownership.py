"""What one engine holds, as Kthena says it: which block hashes of which model, and since when.

A hash is Kthena's standardized one, unless another protocol was chosen. That covers the tokens of one block and nothing
else, so several blocks of an engine can have the same. It is owned for as long as any of them is there, in any rank,
group or medium. Not owned is what a hash does not describe: blocks of adapters without a name, of groups that do not
need the whole prefix and, with a hash that covers tokens only, of prompts with a cache salt or multimodal items. The
blocks of an adapter belong to a model by the adapter's name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from picker.core.block_hashes.registry import HashName
from picker.core.block_index.index import TIER_WEIGHTS
from picker.core.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from picker.core.kv_index.engine_blocks import EngineBlocks, Meaning, Pool
from picker.core.kv_index.naming import Naming


class Stored(Struct, frozen=True):
    """These blocks are held, and were stored again or for the first time at `timestamp` (Unix seconds)."""

    model: str
    hashes: tuple[int, ...]
    timestamp: int


class Removed(Struct, frozen=True):
    """These blocks are held no more."""

    model: str
    hashes: tuple[int, ...]


class Cleared(Struct, frozen=True):
    """No block of the model is held any more; `hashes` were."""

    model: str
    hashes: tuple[int, ...]


Change = Removed | Cleared | Stored


class Changes(Struct, frozen=True):
    """What a batch changed in sum.

    `touched` are `(model, hash)` of all blocks of which anything changed, the medium included;
    `engine_hashes` are the engine's names of blocks that came or went.
    """

    changes: tuple[Change, ...] = ()
    touched: tuple[tuple[str, int], ...] = ()
    engine_hashes: tuple[int, ...] = ()


class Holding(Struct):
    """One owned block. `references` counts engine blocks by medium, `stored_at` is in Unix seconds."""

    stored_at: int
    references: dict[str, int]

    @property
    def medium(self) -> str:
        """The fastest medium that has it."""
        return max(self.references, key=lambda medium: TIER_WEIGHTS.get(medium, 0.0))


class Limits(Struct, frozen=True):
    """How many blocks of one rank are known of: there, and gone but remembered."""

    live: int = 1 << 20
    dead: int = 1 << 16


class Ownership:
    """Blocks of one engine, over its data-parallel ranks. `model` is the name that the base model is asked for by.

    `counts` has blocks by reason: `evicted` (too many), `removed_unknown` (removed without having been stored) and
    those that are there but not owned: `private`, `unnamed_adapter`, `partial_prefix` (groups with windows and the
    like), `unknown_tokens`, `unknown_parent` (hashes that are chained). `protocol` and `seed` say what hashes are.
    """

    def __init__(
        self,
        model: str,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        *,
        protocol: HashName = HashName.KTHENA,
        seed: str = "",
    ) -> None:
        self.model = model
        self.counts: Counter[str] = Counter()
        self._limits = limits
        self._naming = Naming(model, protocol, seed)
        self._ranks: dict[int, EngineBlocks] = {}
        self._models: dict[str, OrderedDict[int, Holding]] = {model: OrderedDict()}
        self._before: dict[tuple[str, int], int | None] = {}  # touched in this batch -> when stored, None: not held
        self._names: dict[int, None] = {}

    @property
    def models(self) -> list[str]:
        """The base model, and adapters with blocks."""
        return list(self._models)

    @property
    def ranks(self) -> list[int]:
        return list(self._ranks)

    @property
    def held(self) -> int:
        """Owned blocks over all models."""
        return sum(map(len, self._models.values()))

    @property
    def blocks(self) -> dict[str, int]:
        """Owned blocks by model."""
        return {model: len(holdings) for model, holdings in self._models.items()}

    def holding(self, model: str, block: int) -> Holding | None:
        """Return what is held of a block by its hash; it is the caller's to read only."""
        holdings = self._models.get(model)
        return None if holdings is None else holdings.get(block)

    def holdings(self, model: str) -> Iterator[tuple[int, Holding]]:
        """The owned blocks of a model, the longest stored first. They must not change between two steps."""
        holdings = self._models.get(model)
        return iter(()) if holdings is None else iter(holdings.items())

    def engine_hashes(self) -> list[int]:
        """Return the engine's names of all blocks that are there."""
        return list({name: None for blocks in self._ranks.values() for name in blocks.live})

    def standard_hash(self, engine_hash: int) -> int | None:
        """Return the hash of an engine's block that is there, None if it is not or has none."""
        for blocks in self._ranks.values():
            meaning = blocks.live.get(engine_hash)
            if meaning is not None and (key := self._naming.key(engine_hash, meaning)) is not None:
                return key[1]
        return None

    def apply(self, rank: int, events: Iterable[KvEvent], now: float) -> Changes:
        """Take over events of a rank, in order; returns what they changed in sum."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(self._rank(rank), event, int(now))
            elif isinstance(event, BlockRemoved):
                self._remove(self._rank(rank), event)
            elif isinstance(event, AllBlocksCleared):
                self._forget(rank)
        return self._settle(int(now))

    def forget(self, rank: int, now: float) -> Changes:
        """Forget all blocks of a rank: its engine restarted, or events were lost."""
        self._forget(rank)
        return self._settle(int(now))

    def refresh(self, before: float, now: float, most: int) -> Changes:
        """Say again what was stored before a time and is still held, so that nobody takes it for stale.

        At most `most` blocks; call it again until nothing comes.
        """
        for model, holdings in self._models.items():
            for block, holding in holdings.items():
                if holding.stored_at >= before or len(self._before) >= most:
                    break
                self._before[model, block] = holding.stored_at
        for model, block in self._before:
            self._models[model][block].stored_at = int(now)
            self._models[model].move_to_end(block)
        return self._settle(int(now))

    def replay(self, rank: int, most: int) -> Iterator[Sequence[KvEvent]]:
        """Tell a rank's blocks again, as events, in lists of `most` blocks or few more: see `EngineBlocks.replay`."""
        blocks = self._ranks.get(rank)
        return iter(()) if blocks is None else blocks.replay(most)

    def _rank(self, rank: int) -> EngineBlocks:
        blocks = self._ranks.get(rank)
        if blocks is None:
            blocks = self._ranks[rank] = EngineBlocks(self._limits.live, self._limits.dead, self._naming.following)
        return blocks

    def _store(self, blocks: EngineBlocks, event: BlockStored, now: int) -> None:
        for name, meaning in blocks.learn(event).items():
            self._note(blocks, name, meaning, now)
        pool, gained = blocks.add(event)
        fresh = set(gained)
        for name in event.block_hashes:
            if name in fresh:
                fresh.discard(name)
                self._acquire(blocks, name, pool, now, why_not=True)
            elif (key := self._owned_key(blocks, name, pool)) is not None:
                self._touch(key, now)
        self._names.update(dict.fromkeys(gained))
        for name in blocks.overdue():
            self._release_all(blocks, name)
            blocks.drop(name)
            self.counts["evicted"] += 1

    def _note(self, blocks: EngineBlocks, name: int, meaning: Meaning, now: int) -> None:
        """Let a hash mean something; blocks that are there under another meaning move to the new one."""
        moves = name in blocks.live and _differs(blocks.live[name], meaning)
        if moves:
            self._release_all(blocks, name)
        blocks.note(name, meaning)
        if moves:
            for pool in blocks.pools_of(name):
                self._acquire(blocks, name, pool, now)

    def _remove(self, blocks: EngineBlocks, event: BlockRemoved) -> None:
        meanings = {name: blocks.live.get(name) for name in event.block_hashes}
        pool, gone, unknown = blocks.remove(event)
        self.counts["removed_unknown"] += unknown
        for name in gone:
            self._release(blocks, name, meanings[name], pool)
        self._names.update(dict.fromkeys(gone))

    def _forget(self, rank: int) -> None:
        blocks = self._ranks.pop(rank, None)
        if blocks is None:
            return
        for name in blocks.live:
            self._release_all(blocks, name)

    def _release_all(self, blocks: EngineBlocks, name: int) -> None:
        for pool in blocks.pools_of(name):
            self._release(blocks, name, blocks.live[name], pool)
        self._names[name] = None

    def _owned_key(self, blocks: EngineBlocks, name: int, pool: Pool) -> tuple[str, int] | None:
        meaning = blocks.live.get(name)
        return self._naming.key(name, meaning) if meaning is not None and blocks.kinds[pool].whole_prefix else None

    def _acquire(self, blocks: EngineBlocks, name: int, pool: Pool, now: int, *, why_not: bool = False) -> None:
        key = self._owned_key(blocks, name, pool)
        if key is None:
            if why_not:
                self.counts[self._why_not(blocks, name, pool)] += 1
            return
        holding = self._touch(key, now)
        holding.references[pool[1]] = holding.references.get(pool[1], 0) + 1

    def _touch(self, key: tuple[str, int], now: int) -> Holding:
        model, block = key
        holdings = self._models.setdefault(model, OrderedDict())
        holding = holdings.get(block)
        self._before.setdefault(key, None if holding is None else holding.stored_at)
        if holding is None:
            holding = holdings[block] = Holding(now, {})
        else:
            holding.stored_at = now
            holdings.move_to_end(block)
        return holding

    def _release(self, blocks: EngineBlocks, name: int, meaning: Meaning | None, pool: Pool) -> None:
        key = self._naming.key(name, meaning) if meaning is not None and blocks.kinds[pool].whole_prefix else None
        if key is None:
            return
        model, block = key
        holding = self._models[model][block]
        self._before.setdefault(key, holding.stored_at)
        holding.references[pool[1]] -= 1
        if not holding.references[pool[1]]:
            del holding.references[pool[1]]
            if not holding.references:
                del self._models[model][block]

    def _why_not(self, blocks: EngineBlocks, name: int, pool: Pool) -> str:
        meaning = blocks.live.get(name)
        if not blocks.kinds[pool].whole_prefix:
            return "partial_prefix"
        if meaning is None:
            return "unknown_tokens"
        return self._naming.why_not(meaning)

    def _settle(self, now: int) -> Changes:
        stored: dict[str, list[int]] = {}
        removed: dict[str, list[int]] = {}
        for (model, block), before in self._before.items():
            holding = self._models[model].get(block)
            if holding is not None and holding.stored_at != before:
                stored.setdefault(model, []).append(block)
            elif holding is None and before is not None:
                removed.setdefault(model, []).append(block)
        changes: list[Change] = []
        for model, blocks in removed.items():
            changes.append((Removed if self._models[model] else Cleared)(model, tuple(blocks)))
        changes.extend(Stored(model, tuple(blocks), now) for model, blocks in stored.items())
        result = Changes(tuple(changes), tuple(self._before), tuple(self._names))
        for model in {model for model, _ in self._before} - {self.model}:
            if not self._models[model]:
                del self._models[model]
        self._before.clear()
        self._names.clear()
        return result


def _differs(known: Meaning | None, told: Meaning) -> bool:
    """Whether a block moves to another hash."""
    if known is None:
        return True
    ours, theirs = known.prompt, told.prompt
    return (known.tokens, known.key, known.private, ours.lora_name, ours.lora_id) != (
        told.tokens,
        told.key,
        told.private,
        theirs.lora_name,
        theirs.lora_id,
    )
