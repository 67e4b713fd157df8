"""What one engine's cache holds, from its events: one data-parallel rank, from one start or clear to the next.

Blocks lie in pools, one for each cache group and medium. Pools with the same block size share a table of names, since
engines use the same hash for the same block in every group: a group whose event does not say which tokens its hashes
stand for (sliding windows, Mamba, offloading) is understood as soon as another group's event names them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from picker.core.block_index.keys import block_keys, event_suffixes, pack, root_key
from picker.core.block_index.layout import GPU, PoolShape, tail_blocks
from picker.core.block_index.limits import Limits
from picker.core.block_index.table import BlockTable, Pool
from picker.core.kv_events.events import BlockStored

Planes = dict[int, int]
"""Key -> lanes that hold a block: one for each group and medium."""

MOST_BLOCK_TOKENS = 1 << 20


class _Orphan:
    """Blocks of a store whose parent is unknown."""

    __slots__ = ("names", "suffixes", "table", "tokens")

    def __init__(self, names: Sequence[int], tokens: memoryview, suffixes: dict[int, bytes], table: BlockTable) -> None:
        self.names = names
        self.tokens = tokens
        self.suffixes = suffixes
        self.table = table


class EngineCache:
    """One cache. `lane` is its bit number in `planes`; events that cannot be used are counted in `dropped`."""

    def __init__(
        self, model: str, lane: int, planes: dict[tuple[int, str], Planes], limits: Limits, dropped: Counter[str]
    ) -> None:
        self.lane = lane
        self.bit = 1 << lane
        self.tables: dict[int, BlockTable] = {}
        self.shapes: dict[tuple[int, str], PoolShape] = {}
        self.shapes_changed = False
        """Set whenever a pool came or changed its shape; whoever reads it sets it back."""
        self.orphans = 0
        """Blocks that wait for their parent."""
        self._model = model
        self._planes = planes
        self._limits = limits
        self._dropped = dropped
        self._pools: dict[tuple[int, str], tuple[BlockTable, Pool]] = {}
        self._waiting: OrderedDict[tuple[int, int], list[_Orphan]] = OrderedDict()  # by block size and parent

    @property
    def blocks(self) -> int:
        """Blocks with at least one copy."""
        return sum(table.live for table in self.tables.values())

    @property
    def tombstones(self) -> int:
        """Removed blocks whose meaning is kept."""
        return sum(table.dead for table in self.tables.values())

    def take_losses(self) -> bool:
        """Return whether any block went since the last time this was asked."""
        lost = False
        for table in self.tables.values():
            lost |= table.lost
            table.lost = False
        return lost

    def expect(self, group: int, medium: str, block_size: int, tail: int | None = None) -> tuple[BlockTable, Pool]:
        """Return the pool of a group and medium, made or made anew if its blocks turn out to be larger.

        Smaller blocks than known are for the caller to refuse: they are parts of blocks, which never match.
        """
        place = (group, medium)
        before = self._pools.get(place)
        if before is not None:
            if self.shapes[place].block_size >= block_size:
                return before
            before[0].drain(before[1])
        table = self.tables.get(block_size)
        if table is None:
            table = self.tables[block_size] = BlockTable(self.bit, self._limits.tombstones)
        found = (table, table.add_pool(self._planes.setdefault(place, {})))
        self._pools[place] = found
        self._shape(PoolShape(group, medium, block_size, tail))
        return found

    def store(self, event: BlockStored, *, reports_reuse: bool) -> Sequence[int]:
        """Take over stored blocks; returns their keys, none while they are not known.

        With `reports_reuse` blocks of a store from block 0 are not counted twice.
        """
        names = event.block_hashes
        size = event.block_size
        group, medium = place = (event.group_idx or 0, (event.medium or GPU).upper())
        shape = self.shapes.get(place)
        if not size and shape is None:
            shape = self.shapes.get((group, GPU))
        if shape is not None and not event.token_ids:
            size = shape.block_size
        if not 0 < size <= MOST_BLOCK_TOKENS:
            self._dropped["block size"] += 1
            return ()
        if shape is not None and size < shape.block_size and place in self._pools:
            self._dropped["partial block"] += 1
            return ()
        if place not in self._pools and len(self._pools) >= self._limits.pools:
            self._dropped["too many pools"] += 1
            return ()
        tail = tail_blocks(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, size)
        table, pool = self.expect(group, medium, size, tail)
        if self.shapes[place].tail != tail:
            self._shape(PoolShape(group, medium, size, tail))
        if not names:
            return ()
        first_block = event.parent is None
        count_again = not (reports_reuse and first_block)
        if len(event.token_ids) != len(names) * size:
            table.store(names, [0] * len(names), pool, count_again=count_again)
            return ()
        try:
            tokens = pack(event.token_ids)
        except (TypeError, OverflowError):
            self._dropped["token ids"] += 1
            return ()
        adapter = event.lora_name if event.lora_name is not None else _numbered(event.lora_id)
        suffixes = event_suffixes(event.extra_keys, event.lora_name, first_block, event.cache_salt)
        parent = root_key(self._model, adapter, size) if event.parent is None else table.key_of(event.parent)
        if not parent:
            table.store(names, [0] * len(names), pool, count_again=count_again)
            self._wait(event.parent or 0, size, _Orphan(names, tokens, suffixes, table))
            return ()
        keys = block_keys(parent, tokens, size, len(names), suffixes)
        table.store(names, keys, pool, count_again=count_again)
        if self._waiting:
            self._adopt(names, keys, size)
        return keys

    def remove(self, names: Iterable[int], group: int, medium: str) -> None:
        """Take over that one copy of each block is gone."""
        found = self._pools.get((group, medium))
        missing = sum(1 for _ in names) if found is None else found[0].remove(names, found[1])
        if missing:
            self._dropped["removed unknown block"] += missing

    def leading(self, names: Sequence[int]) -> int:
        """Return how many tokens of blocks with these names are there, from the first on.

        0 where other groups of blocks decide, too, how much of a prompt is cached.
        """
        found = self._pools.get((0, GPU))
        shape = self.shapes.get((0, GPU))
        if found is None or shape is None or shape.tail is not None or any(group for group, _ in self.shapes):
            return 0
        return found[0].leading(names, found[1]) * shape.block_size

    def evict(self) -> None:
        """Forget the block that was stored first, of those of the block size that has most."""
        max(self.tables.values(), key=lambda table: table.live).evict()

    def sweep(self) -> Iterator[None]:
        """Take everything out of the planes, one block for each step. The cache must not be used any more."""
        for table in self.tables.values():
            yield from table.sweep()

    def _shape(self, shape: PoolShape) -> None:
        self.shapes[shape.group, shape.medium] = shape
        self.shapes_changed = True

    def _wait(self, parent: int, size: int, orphan: _Orphan) -> None:
        self._waiting.setdefault((size, parent), []).append(orphan)
        self.orphans += len(orphan.names)
        while self.orphans > self._limits.orphans:
            _, dropped = self._waiting.popitem(last=False)
            lost = sum(len(one.names) for one in dropped)
            self.orphans -= lost
            self._dropped["orphan"] += lost

    def _adopt(self, names: Sequence[int], keys: Sequence[int], size: int) -> None:
        """Give orphans of these blocks their keys, and then their own orphans."""
        found = list(zip(names, keys, strict=True))
        while found:
            name, key = found.pop()
            for orphan in self._waiting.pop((size, name), ()):
                self.orphans -= len(orphan.names)
                own = block_keys(key, orphan.tokens, size, len(orphan.names), orphan.suffixes)
                orphan.table.name(orphan.names, own)
                found.extend(zip(orphan.names, own, strict=True))


def _numbered(lora_id: int | None) -> str | None:
    """Name an adapter that the engine only gave a number (releases before 0.14)."""
    return None if lora_id is None else f"lora_id {lora_id}"
