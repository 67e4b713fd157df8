"""One engine's names for its blocks: `hash -> (key, copies)`, in typed arrays, 40 bytes a block and no pauses.

The engine's hash is opaque: it names a block in events. A row keeps what it means (our key, 0 while unknown) and how
many physical copies there are in each pool. When the last copy is gone the row stays as a *tombstone*, because a
child may be stored after its parent was removed; the longest dead tombstone is dropped when there are too many.

Rows hang in hash buckets that are split one by one as rows are added (linear hashing), and in one of two rings,
oldest first: rows with copies in the order in which they were stored, tombstones in the order in which they died.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

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
        self._total = array("H", bytes(4))
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
        row = self._find(name)
        return self._keys[row] if row else 0

    def store(self, names: Sequence[int], keys: Sequence[int], pool: Pool, *, count_again: bool = True) -> None:
        """Add a copy of each block to `pool`. A key of 0 leaves a block's meaning as it is.

        Without `count_again` only blocks without copies get one.
        """
        heads, chain, table_names, table_keys = self._heads, self._chain, self._names, self._keys
        total, copies, planes, bit = self._total, pool.copies, pool.planes, self.bit
        high, low, buckets = 2 * self._low + 1, self._low, len(heads)
        for name, key in zip(names, keys, strict=True):
            bucket = name & high
            if bucket >= buckets:
                bucket &= low
            row = heads[bucket]
            while row and table_names[row] != name:
                row = chain[row]
            if not row:
                row = self._add(name, key, bucket)
                high, low, buckets = 2 * self._low + 1, self._low, len(heads)
                self._link(row, LIVE)
                self.live += 1
                total[row] = copies[row] = 1
            else:
                if key and key != table_keys[row]:
                    self._name(row, key)
                count = copies[row]
                if count and (not count_again or count == _MOST_COPIES or total[row] == _MOST_COPIES):
                    continue
                if not total[row]:
                    self._unlink(row)
                    self._link(row, LIVE)
                    self.dead -= 1
                    self.live += 1
                copies[row] = count + 1
                total[row] += 1
                if count:
                    continue
            meaning = table_keys[row]
            if meaning:
                lanes = planes.get(meaning)
                if lanes is None:
                    planes[meaning] = bit
                elif not lanes & bit:
                    planes[meaning] = lanes | bit

    def remove(self, names: Sequence[int], pool: Pool) -> int:
        """Take one copy of each block out of `pool`; returns how many blocks had none to take."""
        copies, total = pool.copies, self._total
        missing = 0
        for name in names:
            row = self._find(name)
            count = copies[row] if row else 0
            if not count:
                missing += 1
                continue
            copies[row] = count - 1
            if count == 1:
                self._hide(self._keys[row], pool)
            total[row] -= 1
            if not total[row]:
                self._bury(row)
        return missing

    def name(self, names: Sequence[int], keys: Sequence[int]) -> None:
        """Say what hashes stand for, without storing anything."""
        for name, key in zip(names, keys, strict=True):
            row = self._find(name)
            if row and self._keys[row] != key:
                self._name(row, key)

    def evict(self, blocks: int) -> None:
        """Forget all copies of the blocks that were stored first."""
        for _ in range(min(blocks, self.live)):
            row = self._newer[LIVE]
            self._drop_copies(row)
            self._bury(row)

    def drain(self, pool: Pool) -> None:
        """Forget all copies in one pool, and the pool."""
        for row in range(2, self._unused):
            count = pool.copies[row]
            if count:
                self._hide(self._keys[row], pool)
                self._total[row] -= count
                if not self._total[row]:
                    self._bury(row)
        self.pools.remove(pool)

    def sweep(self) -> Iterator[None]:
        """Take the bit out of all planes, row by row. The table must not be used any more."""
        for row in range(2, self._unused):
            if self._total[row]:
                self._drop_copies(row)
            yield

    def _find(self, name: int) -> int:
        bucket = name & (2 * self._low + 1)
        if bucket >= len(self._heads):
            bucket &= self._low
        row = self._heads[bucket]
        names, chain = self._names, self._chain
        while row and names[row] != name:
            row = chain[row]
        return row

    def _add(self, name: int, key: int, bucket: int) -> int:
        row = self._free
        if row:
            self._free = self._chain[row]
        else:
            row = self._unused
            self._unused = row + 1
            if row == len(self._names):
                self._grow()
        self._names[row] = name
        self._keys[row] = key
        self._chain[row] = self._heads[bucket]
        self._heads[bucket] = row
        if self._unused > len(self._heads):
            self._split()
        return row

    def _grow(self) -> None:
        more = max(_GROWTH, len(self._names) >> 5)
        for column in (self._names, self._keys, self._chain, self._older, self._newer, self._total):
            column.frombytes(bytes(more * column.itemsize))
        for pool in self.pools:
            pool.copies.frombytes(bytes(more * pool.copies.itemsize))

    def _split(self) -> None:
        heads, chain, names = self._heads, self._chain, self._names
        high = 2 * self._low + 1
        number = len(heads)
        first = number & self._low
        row, stay, move = heads[first], 0, 0
        while row:
            following = chain[row]
            if names[row] & high == number:
                chain[row], move = move, row
            else:
                chain[row], stay = stay, row
            row = following
        heads[first] = stay
        heads.append(move)
        if number == high:
            self._low = high

    def _link(self, row: int, ring: int) -> None:
        last = self._older[ring]
        self._newer[last] = row
        self._older[row] = last
        self._newer[row] = ring
        self._older[ring] = row

    def _unlink(self, row: int) -> None:
        older, newer = self._older[row], self._newer[row]
        self._newer[older] = newer
        self._older[newer] = older

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
        if not lanes & self.bit:
            return
        rest = lanes ^ self.bit
        if rest:
            pool.planes[key] = rest
        else:
            del pool.planes[key]
        self.lost = True

    def _drop_copies(self, row: int) -> None:
        key = self._keys[row]
        for pool in self.pools:
            if pool.copies[row]:
                pool.copies[row] = 0
                self._hide(key, pool)
        self._total[row] = 0

    def _bury(self, row: int) -> None:
        self._unlink(row)
        self._link(row, DEAD)
        self.live -= 1
        self.dead += 1
        if self.dead > self._tombstones:
            self._drop_tombstone()

    def _drop_tombstone(self) -> None:
        row = self._newer[DEAD]
        self._unlink(row)
        self.dead -= 1
        bucket = self._names[row] & (2 * self._low + 1)
        if bucket >= len(self._heads):
            bucket &= self._low
        following = self._chain[row]
        before = self._heads[bucket]
        if before == row:
            self._heads[bucket] = following
        else:
            while self._chain[before] != row:
                before = self._chain[before]
            self._chain[before] = following
        self._keys[row] = 0
        self._chain[row] = self._free
        self._free = row
