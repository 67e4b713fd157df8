"""Looks for configurations that cannot work, and says so once for each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import structlog

from picker.core.block_index.source import SourceStats
from picker.core.endpoint_table import EndpointTable
from picker.core.plugins.kvcache_args import IndexMode
from picker.core.plugins.kvcache_aware import KvCacheProducer
from picker.core.tokens.prompt import TokenPrompt
from picker.io.kvcache.sources import Sources

logger = structlog.get_logger(__name__)

SILENT_SECONDS = 15.0
"""How long an engine may stay silent while requests go there."""
SILENT_PICKS = 20
NEVER_MATCHED = 200
"""Prompts of a model after which it should have matched once."""
DISAGREEING = 20
"""Requests in a row of which an engine reported other cached tokens than were predicted."""
_SAID_EVERY = 600.0
_MOST_NAMES = 100


_TOO_MANY = (
    "whether the engine restarted unnoticed (zmqReplay), keeps caches apart by what requests do not say (salts, adapters), "
    "or its events are another engine's"
)
_TOO_FEW = (
    "blockSizeToHash and hashProtocol with the sidecar's, hashSeed with PYTHONHASHSEED, model names, and the tokenizer and "
    "chat template with the engine's; /stats says what was heard"
)


class Watch:
    """What was seen of each endpoint and model. `look` is to be called now and then."""

    def __init__(
        self,
        table: EndpointTable,
        producer: KvCacheProducer,
        sources: Sources,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._producer = producer
        self._sources = sources
        self._clock = clock
        self._said: set[tuple[object, ...]] = set()
        self._silent: dict[tuple[int, int], tuple[float, int]] = {}
        self._unknown: Counter[str] = Counter()
        self._agreed_at = clock()
        self._agreed: Counter[str] = Counter()

    def asked_for(self, prompt: TokenPrompt) -> None:
        """Note which adapter a prompt is for, where no engine is known to serve it."""
        name = prompt.lora
        if name is None or len(self._unknown) >= _MOST_NAMES:
            return
        served = [self._table.models[slot] for slot in self._table.slots.tolist()]
        if served and all(models is not None and name not in models for models in served):
            self._unknown[name] += 1

    def look(self, held: Sequence[SourceStats]) -> None:
        """Warn of what has been odd for long enough. `held` is what the index says of each rank."""
        if self._producer.args.index_mode is not IndexMode.REDIS:
            blocks: Counter[int] = Counter()
            for source in held:
                blocks[source.slot] += source.blocks
            for slot in self._table.slots.tolist():
                self._look_at(slot, blocks[slot] + self._producer.hashes.blocks_of(slot))
        bases = {names for slot in self._table.slots.tolist() if (names := self._table.bases[slot])}
        if any(set(one).isdisjoint(other) for one, other in pairwise(sorted(bases))):
            self._warn(
                ("bases",),
                "Endpoints serve different base models; kvcache-aware makes tokens for one, so give each a picker of its own",
                models=[names[0][:80] for names in sorted(bases)][:5],
            )
        for name, count in self._unknown.items():
            if count >= SILENT_PICKS:
                self._warn(
                    ("name", name),
                    "No engine serves a model that requests name, so that its prompts never match; see modelAliases",
                    model=name[:80],
                )
        for model, count in self._producer.lookups.items():
            if count >= NEVER_MATCHED and model not in self._producer.matched_models:
                self._warn(
                    ("never", model),
                    "No prompt of a model has ever matched: compare its name with the sidecars' --model, blockSizeToHash "
                    "with the engines' blocks, and the tokenizer with theirs",
                    model=model[:80],
                    prompts=count,
                )

        for slot, streak in self._producer.agreement.streaks.items():
            if streak.requests >= DISAGREEING:
                self._warn(
                    ("disagrees", slot, self._table.generation[slot]),
                    "An engine's cached tokens are not what was predicted, request after request; compare "
                    + (_TOO_MANY if streak.error > 0 else _TOO_FEW),
                    endpoint=self._table.endpoints[slot].address,
                    requests=streak.requests,
                    predicted_minus_reported=streak.error,
                )
        self._say_how_far_they_agree()

    def _say_how_far_they_agree(self) -> None:
        """Say it every ten minutes, where there is something to say."""
        now, outcomes = self._clock(), self._producer.agreement.outcomes
        if now - self._agreed_at < _SAID_EVERY:
            return
        self._agreed_at = now
        new = outcomes - self._agreed
        self._agreed = Counter(outcomes)
        compared = new.total() - new["not_comparable"]
        if compared:
            share = round(new["exact"] / compared, 4)
            logger.info("Cached tokens, predicted and reported", requests=compared, exact_share=share, **new)

    def _look_at(self, slot: int, blocks: int) -> None:
        key = (slot, self._table.generation[slot])
        picks = self._producer.picks[slot]
        since, before = self._silent.setdefault(key, (self._clock(), 0))
        if blocks or picks < before:
            self._silent[key] = (self._clock(), picks)
            return
        if self._clock() - since < SILENT_SECONDS or picks - before < SILENT_PICKS:
            return
        place = self._sources.place(slot)
        if self._sources.is_connected(slot):
            text = "An engine says nothing of its cache, though requests go there; are its KV events enabled?"
        else:
            text = "An engine's KV events cannot be had, though requests go there; correct the address"
        self._warn(("silent", key), text, endpoint=self._table.endpoints[slot].address, events=place)

    def _warn(self, key: tuple[object, ...], text: str, **fields: object) -> None:
        if key not in self._said and len(self._said) < 10 * _MOST_NAMES:
            self._said.add(key)
            logger.warning(text, **fields)
