"""`kvcache-aware`: prefer endpoints whose engine holds the beginning of the prompt, as its KV events say.

Source: seed "KV Cache Aware Plugin"; scores as in Kthena's router. Better than there: blocks that can never match do not
count (a partial one, and the one with the last token, which engines always compute), a pick is visible to the next
decision at once, and `direct` needs neither Redis nor sidecars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from picker.core.block_hashes.prompts import PromptHashes
from picker.core.block_index.holds import Hold
from picker.core.block_index.index import BlockIndex
from picker.core.block_index.prompt import Prompt
from picker.core.endpoints import Floats, slots_of
from picker.core.kv_index.hash_index import HashIndex
from picker.core.kv_index.owners import OwnedPrefix
from picker.core.plugins.kvcache_args import IndexMode, KvCacheArgs
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng
from picker.core.tokens.prompt import TokenPrompt
from picker.core.usage import Usage

NAME = "kvcache-aware"
TOKENS = "tokens"
"""In `Request.prepared`: a `TokenPrompt` for each prompt of the request."""
OWNERS = "owners"
"""In `Request.prepared`, in redis mode: an `OwnedPrefix` for each of them, or None for a prompt nobody can own."""

_MOST_MODELS = 100


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
        return KvCacheMatch(self, prompts, info)

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
        del self.picks[slot]

    def restarted(self, slot: int) -> None:
        """Forget what a sidecar said that does not know of it; engines' own events, and Redis, tell it themselves."""
        self.hashes.forget(slot)

    def adopt(self, slot: int, shared: bytes, now: float) -> None:
        """Nothing: engines' events reach every picker by themselves."""

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
    """A request's prompts and who has how many of their tokens."""

    producer: KvCacheProducer
    prompts: Sequence[Prompt]
    info: MatchInfo

    def shared(self) -> bytes:
        return b""

    def picked(self, slot: int) -> KvCacheLearning:
        index = self.producer.index
        self.producer.picks[slot] += 1
        return KvCacheLearning(index, [index.hold(slot, prompt) for prompt in self.prompts])


class KvCacheLearning(Struct, frozen=True, gc=False):
    """Blocks that are visible for the picked endpoint while the request is on its way. Events say what remains."""

    index: BlockIndex
    holds: Sequence[Hold]

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:  # noqa: ARG002
        self.undo()

    def undo(self) -> None:
        for hold in self.holds:
            self.index.release(hold)


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
