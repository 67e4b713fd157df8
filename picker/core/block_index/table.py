"""One engine's names for its blocks: `hash -> (key, copies)`, in typed columns, some 35 bytes a block and without pauses.

The engine's hash is opaque: it names a block in events. A row keeps what it means (our key, 0 while unknown) and how
many physical copies there are in each pool. When the last copy is gone the row stays as a *tombstone*, because a
child may be stored after its parent was removed; the longest dead tombstone is dropped when there are too many.

Rows hang in hash buckets that are split one by one as rows are added (linear hashing), and in one of two rings,
oldest first: rows with copies in the order in which they were stored, tombstones in the order in which they died.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Final

from librt.strings import read_i64_le
from mypy_extensions import i64

from picker.core.block_index.columns import (
    CHUNK,
    Column,
    WideColumn,
    extend,
    extend_wide,
    get,
    get_wide,
    put,
    put_wide,
)

_LIVE: Final[i64] = 0
_DEAD: Final[i64] = 1
"""Rows that are none: the rings of rows with copies and of tombstones begin and end there."""
_MOST_COPIES: Final[i64] = (1 << 31) - 1


class Pool:
    """Physical copies of one group and medium. `planes` is `key -> lanes that hold it`, shared by all engines."""

    __slots__ = ("copies", "planes")

    def __init__(self, planes: dict[int, int], chunks: int) -> None:
        self.planes = planes
        self.copies: Column = []
        for _ in range(chunks):
            extend(self.copies)


class BlockTable:
    """Rows of one engine and block size. `bit` stands for the engine in the planes of its pools.

    `lost` is set whenever the bit was taken out of a plane; whoever reads it sets it back.
    """

    def __init__(self, bit: int, tombstones: int) -> None:
        self.bit = bit
        self.live = 0
        """Rows with copies."""
        self.dead = 0
        """Tombstones."""
        self.lost = False
        self.pools: list[Pool] = []
        self._tombstones = tombstones
        self._names: WideColumn = []
        self._keys: WideColumn = []
        self._chain: Column = []
        self._older: Column = []
        self._newer: Column = []
        self._heads: Column = []
        self._buckets: i64 = 1
        self._low: i64 = 0  # the number of buckets is between low + 1 and 2 * low + 2
        self._free: i64 = 0  # rows that were dropped, linked by their chain
        self._unused: i64 = 2  # rows from here on were never used
        self._rows: i64 = 0
        extend(self._heads)
        self._grow(2)
        for ring in (self._older, self._newer):
            put(ring, _LIVE, _LIVE)
            put(ring, _DEAD, _DEAD)

    def add_pool(self, planes: dict[int, int]) -> Pool:
        """Add a pool whose copies are counted here."""
        pool = Pool(planes, len(self._names))
        self.pools.append(pool)
        return pool

    def key_of(self, name: int) -> int:
        """Return the key that a hash stands for, 0 if that is not known."""
        return self._key(self._find(name))

    def store(self, names: Sequence[int], keys: Sequence[int], pool: Pool, *, count_again: bool = True) -> None:
        """Add a copy of each block to `pool`. A key of 0 leaves a block's meaning as it is.

        Without `count_again` only blocks without copies get one.
        """
        packed = array("Q", names).tobytes()
        count: i64 = len(keys)
        if len(packed) != 8 * count:
            raise ValueError(f"{len(names)} names for {count} keys")
        if self._unused + count > self._rows:
            self._grow(count)
        copies, planes, bit = pool.copies, pool.planes, self.bit
        only = len(self.pools) == 1
        index: i64 = 0
        while index < count:
            name = read_i64_le(packed, 8 * index)
            key = keys[index]
            index += 1
            row = self._row_of(name)
            if row == 0:
                row = self._add(name, key)
                self.live += 1
            else:
                if key and key != self._key(row):
                    self._name(row, key)
                held = get(copies, row)
                if held:
                    if count_again and held < _MOST_COPIES:
                        put(copies, row, held + 1)
                    continue
                if only or not self._has_copies(row):
                    self._move(row, _LIVE)
                    self.live += 1
                    self.dead -= 1
                key = self._key(row)  # the meaning may have been known before
            put(copies, row, 1)
            if key:
                lanes = planes.setdefault(key, bit)
                if not lanes & bit:
                    planes[key] = lanes | bit

    def remove(self, names: Iterable[int], pool: Pool) -> int:
        """Take one copy of each block out of `pool`; returns how many blocks had none to take."""
        packed = array("Q", names).tobytes()
        count: i64 = len(packed) >> 3
        copies, only = pool.copies, len(self.pools) == 1
        missing = 0
        index: i64 = 0
        while index < count:
            row = self._row_of(read_i64_le(packed, 8 * index))
            index += 1
            held = get(copies, row)
            if held == 0:
                missing += 1
                continue
            put(copies, row, held - 1)
            if held == 1:
                self._hide(self._key(row), pool)
                if only or not self._has_copies(row):
                    self._bury(row)
        return missing

    def leading(self, names: Iterable[int], pool: Pool) -> int:
        """Return how many of the blocks `pool` has from the first on."""
        return sum(1 for _ in takewhile(lambda name: self._copies(self._find(name), pool), names))

    def name(self, names: Sequence[int], keys: Sequence[int]) -> None:
        """Say what hashes stand for, without storing anything."""
        for name, key in zip(names, keys, strict=True):
            row = self._find(name)
            if row and self._key(row) != key:
                self._name(row, key)

    def evict(self) -> None:
        """Forget all copies of the block that was stored first."""
        row = get(self._newer, _LIVE)
        self._drop_copies(row)
        self._bury(row)

    def drain(self, pool: Pool) -> None:
        """Forget all copies in one pool, and the pool."""
        self.pools.remove(pool)
        row: i64 = 2
        while row < self._unused:
            if self._copies(row, pool):
                self._hide(self._key(row), pool)
                if not self._has_copies(row):
                    self._bury(row)
            row += 1

    def sweep(self) -> Iterator[None]:
        """Take the bit out of all planes, row by row. The table must not be used any more."""
        row: i64 = 2
        while row < self._unused:
            self._drop_copies(row)
            row += 1
            yield

    def _find(self, name: int) -> i64:
        """Return the row of a name, or row 0, which has no key and no copies."""
        return self._row_of(read_i64_le(array("Q", (name,)).tobytes(), 0))

    def _bucket(self, name: i64) -> i64:
        bucket = name & (2 * self._low + 1)
        return bucket if bucket < self._buckets else bucket & self._low

    def _row_of(self, name: i64) -> i64:
        row = get(self._heads, self._bucket(name))
        names, chain = self._names, self._chain
        while row and get_wide(names, row) != name:
            row = get(chain, row)
        return row

    def _key(self, row: i64) -> int:
        return int(get_wide(self._keys, row))

    def _copies(self, row: i64, pool: Pool) -> i64:
        return get(pool.copies, row)

    def _add(self, name: i64, key: int) -> i64:
        """Put a new row into its bucket, and at the end of the ring of rows with copies."""
        row = self._free
        if row:
            self._free = get(self._chain, row)
        else:
            row = self._unused
            self._unused += 1
            if row >> 1 > self._buckets:  # at once: one event may have many times the rows that there are
                self._split()
        bucket = self._bucket(name)
        put_wide(self._names, row, name)
        put_wide(self._keys, row, key)
        put(self._chain, row, get(self._heads, bucket))
        put(self._heads, bucket, row)
        self._append(row, _LIVE)
        return row

    def _append(self, row: i64, ring: i64) -> None:
        """Put a row at the end of a ring."""
        older, newer = self._older, self._newer
        last = get(older, ring)
        put(newer, last, row)
        put(older, row, last)
        put(newer, row, ring)
        put(older, ring, row)

    def _move(self, row: i64, ring: i64) -> None:
        """Take a row out of the ring it is in, and put it at the end of this one."""
        older, newer = self._older, self._newer
        before = get(older, row)
        after = get(newer, row)
        put(newer, before, after)
        put(older, after, before)
        self._append(row, ring)

    def _grow(self, rows: i64) -> None:
        while self._unused + rows > self._rows:
            for wide in (self._names, self._keys):
                extend_wide(wide)
            for column in (self._chain, self._older, self._newer, *[pool.copies for pool in self.pools]):
                extend(column)
            self._rows += CHUNK

    def _split(self) -> None:
        """Divide the next bucket in two."""
        heads, chain, names = self._heads, self._chain, self._names
        low, new = self._low, self._buckets
        first = new & low
        row = get(heads, first)
        stay: i64 = 0
        move: i64 = 0
        while row:
            following = get(chain, row)
            if get_wide(names, row) & (low + 1):
                put(chain, row, move)
                move = row
            else:
                put(chain, row, stay)
                stay = row
            row = following
        if new % CHUNK == 0:
            extend(heads)
        put(heads, first, stay)
        put(heads, new, move)
        self._buckets = new + 1
        if first == low:
            self._low = 2 * low + 1

    def _has_copies(self, row: i64) -> bool:
        for pool in self.pools:  # noqa: SIM110 (compiled, a generator costs more than this loop)
            if self._copies(row, pool):
                return True
        return False

    def _name(self, row: i64, key: int) -> None:
        """Give a row its meaning, or, when the engine uses one hash for different blocks, its latest."""
        before = self._key(row)
        put_wide(self._keys, row, key)
        for pool in self.pools:
            if self._copies(row, pool):
                self._hide(before, pool)
                pool.planes[key] = pool.planes.get(key, 0) | self.bit

    def _hide(self, key: int, pool: Pool) -> None:
        planes, bit = pool.planes, self.bit
        lanes = planes.get(key, 0)
        if lanes & bit:
            self.lost = True
            if lanes == bit:
                del planes[key]
            else:
                planes[key] = lanes ^ bit

    def _drop_copies(self, row: i64) -> None:
        for pool in self.pools:
            if self._copies(row, pool):
                put(pool.copies, row, 0)
                self._hide(self._key(row), pool)

    def _bury(self, row: i64) -> None:
        """Move a row without copies to the end of the other ring."""
        self._move(row, _DEAD)
        self.live -= 1
        self.dead += 1
        if self.dead > self._tombstones:
            self._drop_tombstone()

    def _drop_tombstone(self) -> None:
        older, newer, chain = self._older, self._newer, self._chain
        row = get(newer, _DEAD)
        after = get(newer, row)
        put(newer, _DEAD, after)
        put(older, after, _DEAD)
        self.dead -= 1
        bucket = self._bucket(get_wide(self._names, row))
        before = get(self._heads, bucket)
        if before == row:
            put(self._heads, bucket, get(chain, row))
        else:
            while True:
                following = get(chain, before)
                if following == row:
                    break
                before = following
            put(chain, before, get(chain, row))
        put_wide(self._keys, row, 0)
        put(chain, row, self._free)
        self._free = row
