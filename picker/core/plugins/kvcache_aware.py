"""`kvcache-aware`: prefer endpoints whose engine holds the beginning of the prompt, as its KV events say.

Source: seed "KV Cache Aware Plugin"; scores as in Kthena's router. Better than there: blocks that can never match do not
count (a partial one, and the one with the last token, which engines always compute), a pick is visible to the next
decision at once, and `direct` needs neither Redis nor sidecars.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from picker.core.arrays import Floats, Slots, slots_of
from picker.core.block_hashes.prompts import PromptHashes
from picker.core.block_index.holds import Hold
from picker.core.block_index.index import BlockIndex
from picker.core.block_index.prompt import Prompt
from picker.core.kv_index.hash_index import HashIndex
from picker.core.kv_index.owners import OwnedPrefix
from picker.core.plugins.kvcache_args import IndexMode, KvCacheArgs
from picker.core.plugins.kvcache_learning import Agreement, Expected, KvCacheLearning
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng
from picker.core.tokens.prompt import TokenPrompt
from picker.core.usage import Usage

NAME = "kvcache-aware"
TOKENS = "tokens"
"""In `Request.prepared`: a `TokenPrompt` for each prompt of the request."""
OWNERS = "owners"
"""In `Request.prepared`, in redis mode: an `OwnedPrefix` for each of them, or None for a prompt nobody can own."""

_MOST_MODELS = 100
_MOST_SHARED = 16_384
"""Blocks of one request that pickers tell each other of."""
_shared = msgspec.msgpack.Decoder(tuple[int, bytes])


class KvCacheProducer:
    """What engines hold. Others feed the indexes; requests come with their tokens, and in redis mode with owners.

    `index` has blocks with all that tells them apart, `hashes` those of sidecars that know hashes only.
    `prompt_hashes` says what they are, there and in Redis.
    Every endpoint is one slot in both. Models are not told apart there: an engine holds blocks of its own model, and
    of that model's adapters. `block_size` is what engines use; scores are shares of whole blocks of this size.
    """

    name = NAME

    def __init__(self, args: KvCacheArgs, _: object = None) -> None:
        self.picks: Counter[int] = Counter()
        """Requests sent, by slot."""
        self.lookups: Counter[str] = Counter()
        """Prompts looked up, by model or adapter; at most `_MOST_MODELS` of them."""
        self.matched_models: set[str] = set()
        """Those of which a prompt has matched."""
        self.agreement = Agreement()
        self._take(args)

    def reconfigure(self, args: KvCacheArgs) -> bool:
        """Take new arguments over; False when the indexes begin anew, since they come from other sources then."""
        if args == self.args:
            return True
        self._take(args)
        return False

    def _take(self, args: KvCacheArgs) -> None:
        self.args = args
        self.block_size = args.block_size_to_hash
        self.index = BlockIndex(max_blocks=args.max_blocks_per_pod, tier_weights=args.tier_weights)
        self.hashes = HashIndex(args.max_blocks_per_pod)
        self.prompt_hashes = PromptHashes(args.hash_protocol, args.hash_seed)

    def match(self, request: Request, candidates: Candidates, rng: Rng) -> KvCacheMatch | None:  # noqa: ARG002
        """Match every prompt of the request; None when its tokens are not known, or nobody could say who has them."""
        tokens: Sequence[TokenPrompt] = request.prepared.get(TOKENS, ())
        owners: Sequence[OwnedPrefix | None] | None = request.prepared.get(OWNERS)
        if not tokens or (owners is None and self.args.index_mode is IndexMode.REDIS):
            return None
        matched = np.zeros(len(candidates.table.endpoints))
        total = 0
        prompts = []
        for number, one in enumerate(tokens):
            prompt = indexed(self.index, one)
            prompts.append(prompt)
            most = self.most_tokens(one)
            if most:
                total += most
                matched += np.minimum(
                    self._held(one, prompt, None if owners is None else owners[number], candidates), most
                )
        length = sum(len(one.token_ids) for one in tokens)
        info = MatchInfo(matched[candidates.slots].astype(np.int64), total, "tokens", prompt_tokens=float(length))
        self._count(tokens[0], bool(info.matched.any()))
        return KvCacheMatch(self, prompts, owners, candidates.slots, info)

    def _count(self, tokens: TokenPrompt, found: bool) -> None:
        model = tokens.lora or tokens.model
        if model in self.lookups or len(self.lookups) < _MOST_MODELS:
            self.lookups[model] += 1
            if found:
                self.matched_models.add(model)

    def forget(self, slot: int) -> None:
        """Forget an endpoint, at once; what it held is swept out later."""
        self.index.forget(slot)
        self.hashes.forget(slot)
        self.agreement.forget(slot)
        del self.picks[slot]

    def restarted(self, slot: int) -> None:
        """Forget what a sidecar said that does not know of it; engines' own events, and Redis, tell it themselves."""
        self.hashes.forget(slot)

    def adopt(self, slot: int, shared: bytes, now: float) -> AdoptedBlocks | None:  # noqa: ARG002
        """Hold the blocks that another picker's request will make the engine hold, until it is over.

        What engines hold by then, their events tell every picker. None for blocks of another size, and what is no blocks.
        """
        try:
            size, packed = _shared.decode(shared)
            keys = array("Q", packed)
        except (msgspec.DecodeError, ValueError):
            return None
        if not 0 < len(keys) <= _MOST_SHARED or size != self.index.block_size(slot):
            return None
        return AdoptedBlocks(self.index, self.index.hold_keys(slot, keys))

    def most_tokens(self, tokens: TokenPrompt) -> int:
        """Return how many tokens of a prompt can match, in whole blocks of those that are looked up."""
        if not tokens.reads_cache:
            return 0
        blocks = max(len(tokens.token_ids) - 1, 0) // self.block_size
        if self.args.index_mode is not IndexMode.DIRECT:
            blocks = min(blocks, self.args.max_blocks_to_match)
        return blocks * self.block_size

    def _held(self, tokens: TokenPrompt, prompt: Prompt, owners: OwnedPrefix | None, candidates: Candidates) -> Floats:
        """Cached tokens by slot, by whatever knows most."""
        held = np.zeros(len(candidates.table.endpoints))
        for value, mask in self.index.match(prompt, candidates.mask):
            held[slots_of(mask)] = value
        size = self.block_size
        groups: Sequence[tuple[int, int]] = ()
        weights: Mapping[int, float] = {}
        if owners is not None:
            groups, weights = owners.groups, owners.weights
        elif self.hashes.blocks and (model := self.prompt_hashes.model(tokens)) is not None:
            hashes = self.prompt_hashes.hashes(tokens, size, self.args.max_blocks_to_match)
            groups = self.hashes.match(model, hashes, candidates.mask)
        for blocks, mask in groups:
            slots = slots_of(mask & candidates.mask)
            held[slots] = np.maximum(held[slots], blocks * size)
        for slot, worth in weights.items():
            held[slot] = worth * size
        return held


class KvCacheMatch(Struct, frozen=True, gc=False):
    """A request's prompts and who has how many of their tokens. `owners` are there in redis mode."""

    producer: KvCacheProducer
    prompts: Sequence[Prompt]
    owners: Sequence[OwnedPrefix | None] | None
    slots: Slots
    info: MatchInfo

    def shared(self, slot: int) -> bytes:
        """Keys of the blocks that the slot lacks, as far as it is known. Others know of the blocks before them."""
        size = self.producer.index.block_size(slot)
        if not size or len(self.prompts) != 1:
            return b""
        held = self.info.matched.item(self.slots.searchsorted(slot)) // size
        missing = self.prompts[0].chain(size).keys[held : held + _MOST_SHARED]
        return msgspec.msgpack.encode((size, array("Q", missing).tobytes())) if missing else b""

    def picked(self, slot: int) -> KvCacheLearning:
        producer = self.producer
        producer.picks[slot] += 1
        holds = [producer.index.hold(slot, prompt) for prompt in self.prompts]
        return KvCacheLearning(producer.index, producer.agreement, slot, holds, self._expected(slot, holds))

    def _expected(self, slot: int, holds: Sequence[Hold]) -> Expected | None:
        """What the engine should report; None where that is not known for sure."""
        producer = self.producer
        limit = producer.args.max_blocks_to_match
        if self.owners is not None:
            owned = [0 if one is None else _leading(one, slot) for one in self.owners]
            sure = None not in self.owners and max(owned) < limit
            return Expected(sum(owned) * producer.block_size, complete=True) if sure else None
        matched = self.info.matched.item(self.slots.searchsorted(slot))
        if producer.hashes.blocks_of(slot):
            return Expected(matched, complete=True) if matched < limit * producer.block_size else None
        cached = sum(hold.cached for hold in holds)
        if min(cached, self.info.total) != matched:
            return None  # blocks of others on their way: they may come in time, or not
        return Expected(cached, all(hold.complete for hold in holds))


class AdoptedBlocks(Struct, frozen=True, gc=False):
    """Blocks of another picker's request on its way."""

    index: BlockIndex
    hold: Hold

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:  # noqa: ARG002
        self.undo()

    def undo(self) -> None:
        self.index.release(self.hold)


def _leading(owned: OwnedPrefix, slot: int) -> int:
    return next((blocks for blocks, mask in owned.groups if mask >> slot & 1), 0)


def indexed(index: BlockIndex, tokens: TokenPrompt) -> Prompt:
    """Return a prompt to look up in an index of engines' own blocks."""
    return index.prompt(
        "",
        tokens.token_ids,
        adapter=tokens.lora,
        cache_salt=tokens.cache_salt,
        media=[(item.identifier, item.offset, item.length) for item in tokens.multimodal],
        reads_cache=tokens.reads_cache,
    )
