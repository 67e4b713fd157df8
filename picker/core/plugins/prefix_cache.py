"""`prefix-cache`: prefer endpoints that were sent the same beginning of a prompt.

Source: seed "Prefix Cache Plugin"; hashes and rounding as in Kthena's router. Better than the seed: a pick is
visible to the next decision at once, and vanishes if its request fails.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import msgspec
import numpy as np

from picker.core.arrays import Floats, Integers, slots_of
from picker.core.plugins.prefix_cache_args import PrefixCacheArgs
from picker.core.prefix_cache.hashing import BlockHasher
from picker.core.prefix_cache.index import Hold, PrefixIndex
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng, sample
from picker.core.usage import Usage

_shared = msgspec.msgpack.Decoder(tuple[str, int, list[bytes]])
_NO_INFO = MatchInfo(np.zeros(0, np.int64), 0, "blocks")


_EXPORTED_BLOCKS = 8192
"""Blocks in a piece of what is exported; a run is not cut."""
_MOST_SHARED = 200_000
"""Blocks that another picker may share at once."""


class PrefixCacheProducer:
    """Matches prompts against what was sent where.

    `on_evict(model, blocks)` is told the entries that a full list drops.
    """

    name = "prefix-cache"

    def __init__(self, args: PrefixCacheArgs, on_evict: Callable[[str, int], None]) -> None:
        self._args = args.effective()
        self._on_evict = on_evict
        self._hasher = BlockHasher()
        self.index = PrefixIndex(self._args.maxHashCacheSize, on_evict)

    def reconfigure(self, args: PrefixCacheArgs) -> bool:
        """Take new arguments over; False when entries had to go, because blocks have another size now."""
        args = args.effective()
        kept = args.blockSizeToHash == self._args.blockSizeToHash
        if kept:
            self.index.resize(args.maxHashCacheSize)
        else:
            # Requests on their way keep the old index, so that they cannot record blocks of the old size in the new.
            self.index = PrefixIndex(args.maxHashCacheSize, self._on_evict)
        self._args = args
        return kept

    def match(self, request: Request, candidates: Candidates, rng: Rng) -> PrefixMatch | None:
        """Match every prompt of the request; None when there is none."""
        prompt, args = request.prompt, self._args
        if not prompt.texts:
            return None
        chains = [
            self._hasher.hashes(prompt.model, text, args.blockSizeToHash, args.maxBlocksToMatch)
            for text in prompt.texts
        ]
        groups = [self.index.match(chain, candidates.mask) for chain in chains]
        by_slot = np.zeros(len(candidates.table.endpoints), np.int64)
        left = args.topKMatches
        for blocks, mask in groups[0] if len(groups) == 1 else _sums(groups):
            count = mask.bit_count()
            if count > left:
                by_slot[sample(slots_of(mask).tolist(), left, rng)] = blocks
                break
            by_slot[mask.bit_length() - 1 if count == 1 else slots_of(mask)] = blocks
            left -= count
        ratio, size = request.bytes_per_token, args.blockSizeToHash
        info = MatchInfo(
            by_slot.take(candidates.slots),
            sum(map(len, chains)),
            "blocks",
            size / ratio,
            sum(map(len, prompt.texts)) / ratio,
        )
        sizes = candidates.table.cache_tokens if args.sizeFromEngine else None
        return PrefixMatch(self.index, prompt.model, size, chains, info, args.recordAtPick, sizes, args.sizeMargin)

    def adopt(self, slot: int, shared: bytes, now: float) -> PrefixLearning | None:  # noqa: ARG002
        """Hold the blocks of another picker's pick; None for blocks of another size, and for what is not blocks."""
        try:
            model, size, packed = _shared.decode(shared)
            chains = [array("Q", chain).tolist() for chain in packed]
        except (msgspec.DecodeError, ValueError):
            return None
        blocks = 0
        for chain in chains:
            blocks += len(chain)
            if len(set(chain)) < len(chain):
                return None
        if size != self._args.blockSizeToHash or blocks > _MOST_SHARED:
            return None
        return PrefixMatch(self.index, model, size, chains, _NO_INFO, self._args.recordAtPick).picked(slot)

    def export(self, slot: int) -> Iterator[bytes]:
        """What is recorded for a slot, in pieces for `adopt`, the least recent first."""
        size = self._args.blockSizeToHash
        for model, runs in groupby(self.index.export(slot), key=itemgetter(0)):
            chains: list[bytes] = []
            blocks = 0
            for _, hashes in runs:
                chains.append(array("Q", hashes).tobytes())
                blocks += len(hashes)
                if blocks >= _EXPORTED_BLOCKS:
                    yield msgspec.msgpack.encode((model, size, chains))
                    chains, blocks = [], 0
            if chains:
                yield msgspec.msgpack.encode((model, size, chains))

    @property
    def remembered_bytes(self) -> int:
        """Text that is kept to hash prompts faster."""
        return self._hasher.remembered

    def forget(self, slot: int) -> None:
        self.index.forget(slot)

    def restarted(self, slot: int) -> None:
        self.index.forget(slot)


class PrefixMatch:
    """A prompt's blocks and who has how many of them.

    `at_pick` says whether the blocks are visible from the pick on. `sizes` are the tokens that each slot's engine has room
    for, where the index follows that, and `margin` how much more than that it keeps.
    """

    __slots__ = ("at_pick", "block_size", "chains", "info", "margin", "model", "prefixes", "sizes")

    def __init__(
        self,
        prefixes: PrefixIndex,
        model: str,
        block_size: int,
        chains: Sequence[Sequence[int]],
        info: MatchInfo,
        at_pick: bool,
        sizes: Floats | None = None,
        margin: float = 1.0,
    ) -> None:
        self.prefixes = prefixes
        self.model = model
        self.block_size = block_size
        self.chains = chains
        self.info = info
        self.at_pick = at_pick
        self.sizes = sizes
        self.margin = margin

    def shared(self, slot: int) -> bytes:  # noqa: ARG002
        chains = [array("Q", chain).tobytes() for chain in self.chains]
        return msgspec.msgpack.encode((self.model, self.block_size, chains))

    def picked(self, slot: int) -> PrefixLearning:
        if self.sizes is not None and (tokens := self.sizes.item(slot)) > 0:
            self.prefixes.limit(slot, int(tokens / self.info.tokens_per_unit * self.margin) + 1)
        if not self.at_pick:
            return PrefixLearning(self, slot, ())
        hold = self.prefixes.hold
        return PrefixLearning(self, slot, [hold(slot, chain) for chain in self.chains])


class PrefixLearning:
    """Blocks that are visible for the picked endpoint while the request is on its way."""

    __slots__ = ("holds", "match", "picked")

    def __init__(self, match: PrefixMatch, picked: int, holds: Sequence[Hold]) -> None:
        self.match = match
        self.picked = picked
        self.holds = holds

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:  # noqa: ARG002
        match, index = self.match, self.match.prefixes
        if slot == self.picked and match.at_pick:
            for hold in self.holds:
                index.keep(hold, match.model)
            return
        if slot is not None:
            for chain in match.chains:
                index.record(slot, match.model, chain)
        self.undo()

    def undo(self) -> None:
        for hold in self.holds:
            self.match.prefixes.release(hold)


_MOST_KNOWN = 1024
"""Totals up to this have a table of their scores."""


def _rate(matched: Integers, total: int) -> Floats:
    scores: Floats = matched / total
    scores *= 100.0
    return np.trunc(scores, out=scores)


@lru_cache(maxsize=_MOST_KNOWN)
def _rates(total: int) -> Floats:
    """The score of every number of units that can match."""
    return _rate(np.arange(total + 1), total)


class PrefixScorer:
    """Rates by the share of the prompt's blocks that match: `int(matched / total * 100)`."""

    def __init__(self, name: str, producer: str) -> None:
        self.name = name
        self.producer: str | None = producer

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats | None:  # noqa: ARG002
        if match is None or not match.total:
            return None
        if match.total <= _MOST_KNOWN:
            return _rates(match.total).take(match.matched)
        return _rate(match.matched, match.total)


def _sums(prompts: Sequence[Sequence[tuple[int, int]]]) -> Sequence[tuple[int, int]]:
    """Add up what each slot has of several prompts. Groups as from `PrefixIndex.match`, longest first."""
    blocks_by_slot: defaultdict[int, int] = defaultdict(int)
    for groups in prompts:
        for blocks, mask in groups:
            for slot in slots_of(mask).tolist():
                blocks_by_slot[slot] += blocks
    masks: defaultdict[int, int] = defaultdict(int)
    for slot, blocks in blocks_by_slot.items():
        masks[blocks] |= 1 << slot
    return sorted(masks.items(), reverse=True)
