"""The blocks of one data-parallel rank of one engine, from its events: what each hash means, and its copies by pool.

A *pool* is a cache group on a medium. A block lives while any pool has a copy. What its hash means is kept beyond that,
for its children may be stored after it is gone; and it may become known late, since an event need not say which tokens
its hashes stand for (placeholders of offloading connectors, groups that skip blocks).
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from picker.core.block_index.keys import event_identifiers
from picker.core.block_index.layout import GPU
from picker.core.kv_events.events import BlockRemoved, BlockStored, ExtraKeys

Pool = tuple[int, str]
"""Group and medium."""


class PoolKind(Struct, frozen=True):
    """What a pool's blocks are: as events say, and from then on."""

    block_size: int
    kind: str | None
    window: int | None

    @property
    def whole_prefix(self) -> bool:
        """Whether a hit needs this pool's blocks from the first on."""
        return self.window is None and self.kind in {None, "full_attention", "mla_attention", "sink_full_attention"}


class Prompt(Struct, frozen=True):
    """What the blocks of one store have in common."""

    pool: Pool
    block_size: int
    lora_id: int | None
    lora_name: str | None
    cache_salt: str | None


class Meaning(Struct, frozen=True, gc=False):
    """What a hash stands for. `tokens` are 32-bit integers, little endian.

    `private`: the block, or one before it, depends on more than tokens and adapter: a cache salt, multimodal items.
    `key` is the name that others chained to that of the block before, where it is known.
    """

    parent: int | None
    tokens: bytes
    extra_keys: ExtraKeys | None
    private: bool
    prompt: Prompt
    key: int | None = None


Following = Callable[[int | None, Prompt, bytes, Sequence[str]], int]
"""Names a block after the one before it, None for the first of a prompt, given its tokens and what tells it apart."""


class EngineBlocks:
    """Blocks of one rank. `live` and `dead` map a hash to its meaning (None: not known), each oldest first.

    At most `most_live` blocks are kept, the oldest go first, and of those that are gone the meanings of `most_dead`.
    """

    def __init__(self, most_live: int, most_dead: int, following: Following | None = None) -> None:
        self.live: OrderedDict[int, Meaning | None] = OrderedDict()
        self.dead: OrderedDict[int, Meaning] = OrderedDict()
        self.kinds: dict[Pool, PoolKind] = {}
        self._copies: dict[Pool, dict[int, int]] = {}
        self._following = following
        self._most_live = most_live
        self._most_dead = most_dead

    def pools_of(self, name: int) -> list[Pool]:
        """Return the pools that have a copy of a block."""
        return [pool for pool, copies in self._copies.items() if name in copies]

    def meaning(self, name: int) -> Meaning | None:
        """Return what a hash means, whether or not the block is still there."""
        return self.live.get(name) or self.dead.get(name)

    def learn(self, event: BlockStored) -> dict[int, Meaning]:
        """Return what a store says its hashes mean: nothing unless it has the tokens of all its blocks."""
        names = event.block_hashes
        size = len(event.token_ids) // len(names) if names else 0
        if not size or size * len(names) != len(event.token_ids) or event.block_size not in {0, size}:
            return {}
        packed = array("I", event.token_ids)
        if sys.byteorder == "big":
            packed.byteswap()
        tokens = packed.tobytes()
        prompt = Prompt(_pool(event), size, event.lora_id, event.lora_name, event.cache_salt)
        apart = event_identifiers(event.extra_keys, event.lora_name, event.parent is None, event.cache_salt)
        before = None if event.parent is None else self.meaning(event.parent)
        private = before is not None and before.private
        key = before.key if before else None
        following = self._following if event.parent is None or key is not None else None
        found: dict[int, Meaning] = {}
        parent = event.parent
        for number, name in enumerate(names):
            private = private or number in apart
            own_keys = event.extra_keys[number : number + 1] if event.extra_keys else None
            data = tokens[4 * size * number : 4 * size * (number + 1)]
            if following is not None:
                key = following(key, prompt, data, [text for text in apart.get(number, ()) if isinstance(text, str)])
            found[name] = Meaning(parent, data, own_keys, private, prompt, key)
            parent = name
        return found

    def note(self, name: int, meaning: Meaning) -> None:
        """Let a hash mean this from now on."""
        if name in self.live:
            self.live[name] = meaning
        else:
            self._bury(name, meaning)

    def add(self, event: BlockStored) -> tuple[Pool, list[int]]:
        """Count one more copy of each block of a store, after its meanings were noted.

        Returns the pool, and the blocks that had no copy there. A pool's kind is what its first store says.
        """
        pool = _pool(event)
        if pool not in self.kinds:
            kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            self.kinds[pool] = PoolKind(event.block_size, kind, window)
            self._copies[pool] = {}
        copies = self._copies[pool]
        gained: list[int] = []
        for name in event.block_hashes:
            count = copies.get(name, 0)
            copies[name] = count + 1
            if not count:
                gained.append(name)
                if name not in self.live:
                    self.live[name] = self.dead.pop(name, None)
        return pool, gained

    def remove(self, event: BlockRemoved) -> tuple[Pool, list[int], int]:
        """Count one copy less of each block; returns the pool, its blocks that are gone, and how many never were."""
        pool = _pool(event)
        copies = self._copies.get(pool, {})
        gone: list[int] = []
        unknown = 0
        for name in event.block_hashes:
            count = copies.get(name, 0)
            if count > 1:
                copies[name] = count - 1
            elif count:
                del copies[name]
                gone.append(name)
                if not any(name in others for others in self._copies.values()):
                    self._die(name)
            else:
                unknown += 1
        return pool, gone, unknown

    def overdue(self) -> list[int]:
        """Return the oldest blocks, as many as there are too many."""
        excess = len(self.live) - self._most_live
        return [name for name, _ in zip(self.live, range(excess), strict=False)] if excess > 0 else []

    def drop(self, name: int) -> None:
        """Forget all copies of a block."""
        for copies in self._copies.values():
            copies.pop(name, None)
        self._die(name)

    def replay(self, most: int) -> Iterator[list[BlockStored | BlockRemoved]]:
        """Tell it all again, as events that lead from nothing to the same copies and meanings.

        Parents come before their children. Each list covers `most` blocks or few more. The blocks must not change
        between two of them.
        """
        events: list[BlockStored | BlockRemoved] = []
        blocks = 0
        for run in self._runs(most):
            events.extend(self._tell(run))
            blocks += len(run)
            if blocks >= most:
                yield events
                events, blocks = [], 0
        if events:
            yield events

    def _runs(self, most: int) -> Iterator[list[int]]:
        """All blocks, parents first, in runs that one event can tell of."""
        told: set[int] = set()
        run: list[int] = []
        told_alike: object = None
        for name in chain.from_iterable(self._lineage(start, told) for start in (*self.dead, *self.live)):
            meaning = self.meaning(name)
            alike = None if meaning is None else meaning.prompt, self._copies_of(name)
            follows = meaning is not None and run and meaning.parent == run[-1]
            if run and not (follows and alike == told_alike and len(run) < most):
                yield run
                run = []
            run.append(name)
            told_alike = alike
        if run:
            yield run

    def _lineage(self, name: int, told: set[int]) -> list[int]:
        """A block and those before it, first one first, that were not told yet."""
        line: list[int] = []
        step: int | None = name
        while step is not None and step not in told and (step in self.live or step in self.dead):
            told.add(step)
            line.append(step)
            meaning = self.meaning(step)
            step = meaning.parent if meaning else None
        line.reverse()
        return line

    def _copies_of(self, name: int) -> list[tuple[Pool, int]]:
        return [(pool, copies[name]) for pool, copies in self._copies.items() if name in copies]

    def _tell(self, run: list[int]) -> Iterator[BlockStored | BlockRemoved]:
        copies = self._copies_of(run[0])
        meanings = [meaning for name in run if (meaning := self.meaning(name)) is not None]
        if not meanings:
            for pool, count in copies:
                size = self.kinds[pool].block_size
                yield from [self._stored(pool, BlockStored(tuple(run), None, (), size))] * count
            return
        first, prompt = meanings[0], meanings[0].prompt
        tokens = array("I", b"".join([meaning.tokens for meaning in meanings]))
        if sys.byteorder == "big":
            tokens.byteswap()
        keys = [meaning.extra_keys[0] if meaning.extra_keys else None for meaning in meanings]
        event = BlockStored(
            tuple(run),
            first.parent,
            tuple(tokens),
            prompt.block_size,
            lora_id=prompt.lora_id,
            lora_name=prompt.lora_name,
            extra_keys=tuple(keys) if any(keys) else None,
            cache_salt=prompt.cache_salt,
        )
        for pool, count in copies or [(prompt.pool, 1)]:
            yield from [self._stored(pool, event)] * count
        if not copies:
            yield BlockRemoved(tuple(run), prompt.pool[1], prompt.pool[0])

    def _stored(self, pool: Pool, event: BlockStored) -> BlockStored:
        group, medium = pool
        kind = self.kinds.get(pool)
        return replace(
            event,
            medium=medium,
            group_idx=group,
            kv_cache_spec_kind=kind and kind.kind,
            kv_cache_spec_sliding_window=kind and kind.window,
        )

    def _die(self, name: int) -> None:
        meaning = self.live.pop(name)
        if meaning is not None:
            self._bury(name, meaning)

    def _bury(self, name: int, meaning: Meaning) -> None:
        self.dead[name] = meaning
        if len(self.dead) > self._most_dead:
            self.dead.popitem(last=False)


def _pool(event: BlockStored | BlockRemoved) -> Pool:
    return event.group_idx or 0, (event.medium or GPU).upper()
