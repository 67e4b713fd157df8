"""One engine's names for its blocks: `hash -> (key, copies)`, in typed arrays, some 35 bytes a block and without pauses.

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

LIVE = 0
DEAD = 1
_MOST_COPIES = 0xFFFF
_GROWTH = 256


class Pool:
    """Physical copies of one group and medium. `planes` is `key -> lanes that hold it`, shared by all engines."""

    __slots__ = ("copies", "planes")

    def __init__(self, planes: dict[int, int], rows: int) -> None:
        self.planes = planes
        self.copies = array("H", bytes(2 * rows))


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
        self._names = array("Q", bytes(16))
        self._keys = array("Q", bytes(16))
        self._chain = array("I", bytes(8))
        self._older = array("I", (LIVE, DEAD))
        self._newer = array("I", (LIVE, DEAD))
        self._heads = array("I", bytes(4))
        self._low = 0  # the number of buckets is between low + 1 and 2 * low + 2
        self._free = 0  # rows that were dropped, linked by their chain
        self._unused = 2  # rows from here on were never used

    def add_pool(self, planes: dict[int, int]) -> Pool:
        """Add a pool whose copies are counted here."""
        pool = Pool(planes, len(self._names))
        self.pools.append(pool)
        return pool

    def key_of(self, name: int) -> int:
        """Return the key that a hash stands for, 0 if that is not known."""
        return self._keys[self._find(name)]

    def store(self, names: Sequence[int], keys: Sequence[int], pool: Pool, *, count_again: bool = True) -> None:
        """Add a copy of each block to `pool`. A key of 0 leaves a block's meaning as it is.

        Without `count_again` only blocks without copies get one.
        """
        if self._unused + len(names) > len(self._names):
            self._grow(len(names))
        heads, chain, table_names, table_keys = self._heads, self._chain, self._names, self._keys
        older, newer, copies, bit = self._older, self._newer, pool.copies, self.bit
        planes = pool.planes
        show = planes.setdefault
        low, buckets, free, unused, last = self._low, len(heads), self._free, self._unused, older[LIVE]
        high, only = 2 * low + 1, len(self.pools) == 1
        added = revived = 0
        for name, key in zip(names, keys, strict=True):
            bucket = name & high
            if bucket >= buckets:
                bucket &= low
            row = first = heads[bucket]
            while row and table_names[row] != name:
                row = chain[row]
            if not row:
                if free:
                    row = free
                    free = chain[row]
                else:
                    row = unused
                    unused += 1
                table_names[row] = name
                table_keys[row] = key
                chain[row] = first
                heads[bucket] = row
                newer[last] = row
                older[row] = last
                last = row
                copies[row] = 1
                added += 1
            else:
                if key and key != table_keys[row]:
                    self._name(row, key)
                count = copies[row]
                if count:
                    if count_again and count < _MOST_COPIES:
                        copies[row] = count + 1
                    continue
                if only or not self._has_copies(row):
                    before, after = older[row], newer[row]
                    newer[before], older[after] = after, before
                    newer[last], older[row] = row, last
                    last = row
                    revived += 1
                copies[row] = 1
                key = table_keys[row]  # noqa: PLW2901 (the meaning may have been known before)
            if key:
                lanes = show(key, bit)
                if not lanes & bit:
                    planes[key] = lanes | bit
        newer[last], older[LIVE] = LIVE, last
        self._free, self._unused = free, unused
        self.live += added + revived
        self.dead -= revived
        self._split((unused >> 1) - buckets)

    def remove(self, names: Iterable[int], pool: Pool) -> int:
        """Take one copy of each block out of `pool`; returns how many blocks had none to take."""
        heads, chain, table_names, table_keys = self._heads, self._chain, self._names, self._keys
        older, newer, copies, planes, bit = self._older, self._newer, pool.copies, pool.planes, self.bit
        low, buckets, last, only = self._low, len(heads), older[DEAD], len(self.pools) == 1
        high = 2 * low + 1
        missing = died = 0
        for name in names:
            bucket = name & high
            if bucket >= buckets:
                bucket &= low
            row = heads[bucket]
            while row and table_names[row] != name:
                row = chain[row]
            count = copies[row]
            if count != 1:
                if count:
                    copies[row] = count - 1
                else:
                    missing += 1
                continue
            copies[row] = 0
            key = table_keys[row]
            lanes = planes.get(key, 0)
            if lanes & bit:
                self.lost = True
                if lanes == bit:
                    del planes[key]
                else:
                    planes[key] = lanes ^ bit
            if only or not self._has_copies(row):
                before, after = older[row], newer[row]
                newer[before], older[after] = after, before
                newer[last], older[row] = row, last
                last = row
                died += 1
        newer[last], older[DEAD] = DEAD, last
        self.live -= died
        self.dead += died
        while self.dead > self._tombstones:
            self._drop_tombstone()
        return missing

    def leading(self, names: Iterable[int], pool: Pool) -> int:
        """Return how many of the blocks `pool` has from the first on."""
        return sum(1 for _ in takewhile(lambda name: pool.copies[self._find(name)], names))

    def name(self, names: Sequence[int], keys: Sequence[int]) -> None:
        """Say what hashes stand for, without storing anything."""
        for name, key in zip(names, keys, strict=True):
            row = self._find(name)
            if row and self._keys[row] != key:
                self._name(row, key)

    def evict(self) -> None:
        """Forget all copies of the block that was stored first."""
        row = self._newer[LIVE]
        self._drop_copies(row)
        self._bury(row)

    def drain(self, pool: Pool) -> None:
        """Forget all copies in one pool, and the pool."""
        self.pools.remove(pool)
        for row in range(2, self._unused):
            if pool.copies[row]:
                self._hide(self._keys[row], pool)
                if not self._has_copies(row):
                    self._bury(row)

    def sweep(self) -> Iterator[None]:
        """Take the bit out of all planes, row by row. The table must not be used any more."""
        for row in range(2, self._unused):
            self._drop_copies(row)
            yield

    def _find(self, name: int) -> int:
        """Return the row of a name, or row 0, which has no key and no copies."""
        bucket = name & (2 * self._low + 1)
        if bucket >= len(self._heads):
            bucket &= self._low
        row = self._heads[bucket]
        names, chain = self._names, self._chain
        while row and names[row] != name:
            row = chain[row]
        return row

    def _grow(self, rows: int) -> None:
        more = max(_GROWTH, rows, len(self._names) >> 5)
        for column in (self._names, self._keys, self._chain, self._older, self._newer):
            column.frombytes(bytes(more * column.itemsize))
        for pool in self.pools:
            pool.copies.frombytes(bytes(more * pool.copies.itemsize))

    def _split(self, times: int) -> None:
        heads, chain, names = self._heads, self._chain, self._names
        for _ in range(times):
            bit = self._low + 1
            first = len(heads) & self._low
            row, stay, move = heads[first], 0, 0
            while row:
                following = chain[row]
                if names[row] & bit:
                    chain[row], move = move, row
                else:
                    chain[row], stay = stay, row
                row = following
            heads[first] = stay
            heads.append(move)
            if first == self._low:
                self._low = 2 * self._low + 1

    def _has_copies(self, row: int) -> bool:
        return any(pool.copies[row] for pool in self.pools)

    def _name(self, row: int, key: int) -> None:
        """Give a row its meaning, or, when the engine uses one hash for different blocks, its latest."""
        before = self._keys[row]
        self._keys[row] = key
        for pool in self.pools:
            if pool.copies[row]:
                self._hide(before, pool)
                pool.planes[key] = pool.planes.get(key, 0) | self.bit

    def _hide(self, key: int, pool: Pool) -> None:
        lanes = pool.planes.get(key, 0)
        if lanes & self.bit:
            self.lost = True
            if lanes == self.bit:
                del pool.planes[key]
            else:
                pool.planes[key] = lanes ^ self.bit

    def _drop_copies(self, row: int) -> None:
        for pool in self.pools:
            if pool.copies[row]:
                pool.copies[row] = 0
                self._hide(self._keys[row], pool)

    def _bury(self, row: int) -> None:
        """Move a row without copies to the end of the other ring."""
        older, newer = self._older, self._newer
        before, after, last = older[row], newer[row], older[DEAD]
        newer[before], older[after] = after, before
        newer[last] = older[DEAD] = row
        older[row], newer[row] = last, DEAD
        self.live -= 1
        self.dead += 1
        if self.dead > self._tombstones:
            self._drop_tombstone()

    def _drop_tombstone(self) -> None:
        row = self._newer[DEAD]
        newer = self._newer[row]
        self._newer[DEAD] = newer
        self._older[newer] = DEAD
        self.dead -= 1
        bucket = self._names[row] & (2 * self._low + 1)
        if bucket >= len(self._heads):
            bucket &= self._low
        chain = self._chain
        before = self._heads[bucket]
        if before == row:
            self._heads[bucket] = chain[row]
        else:
            while chain[before] != row:
                before = chain[before]
            chain[before] = chain[row]
        self._keys[row] = 0
        chain[row] = self._free
        self._free = row
