"""What `session-prefix-cache-producer` learns of a pick: of its own ones, and of those that other pickers tell of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from picker.core.sessions.chain import Chain
from picker.core.sessions.declared import response_key
from picker.core.sessions.index import Claim
from picker.core.sessions.shared import end_of, packed_end
from picker.core.usage import Usage

if TYPE_CHECKING:
    from picker.core.plugins.session_prefix_cache import SessionMatch, SessionPrefixCacheProducer

_SURE_TOKENS = 1024
"""Fewer tokens that an engine was to have, but computed, tell nothing of its cache."""


class SessionLearning:
    """What is assumed of the picked endpoint while the request is on its way."""

    __slots__ = ("_after", "_claims", "_ids", "_match", "_slot")

    def __init__(self, match: SessionMatch, slot: int, claims: Sequence[Claim]) -> None:
        self._match = match
        self._slot = slot
        self._claims = claims
        self._after: Chain | None = None
        """What the only chain became, once that is confirmed."""
        self._ids: Sequence[int] = match.ids

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:
        """Keep it, for the endpoint that served, and with the engine's reply if that is known."""
        chains = self._match.chains
        if slot is None or not chains:
            self.undo()
            return
        index, now = self._match.producer.index, self._match.now
        if usage is not None and slot == self._slot:
            self._refine(usage)
        if usage is not None and len(chains) == 1:
            chains = self._replied(chains, usage)
        if slot == self._slot and not all(map(index.holds, self._claims)):
            return
        if slot == self._slot and chains is self._match.chains:
            for claim in self._claims:
                index.keep(claim, now)
        else:
            for chain in chains:
                index.keep(index.hold(slot, chain), now)
            self.undo()
        if len(chains) == 1:
            self._after = chains[0]
            for key in self._ids:
                self._match.producer.names.put(key, chains[0])

    def undo(self) -> None:
        for claim in self._claims:
            self._match.producer.index.release(claim)

    def told(self) -> tuple[str, bytes] | None:
        """What other pickers that know of the pick need to know of its end, by the producer's name; None for nothing."""
        before, after = self._match.chains, self._after
        if after is None or (after is before[0] and not self._ids):
            return None
        return self._match.producer.name, packed_end(before[0], after, self._ids)

    def _replied(self, chains: Sequence[Chain], usage: Usage) -> Sequence[Chain]:
        """What the chain became by the reply, if anything is known of that."""
        (chain,) = chains
        after = chain.replied(usage.reply) if usage.reply else chain
        if usage.response_id:
            key = response_key(usage.response_id)
            self._ids = (*self._ids, key)
            after = chain.named(key) if after is chain else after
        return chains if after is chain else (after,)

    def _refine(self, usage: Usage) -> None:
        """Learn from what the engine took from its cache. Some always say that this is nothing."""
        match, cached = self._match, usage.cached_tokens
        producer = match.producer
        if cached:
            producer.reporting.add(self._slot)
        expected = sum(claim.known for claim in self._claims) / match.bytes_per_token
        telling = match.tells_evictions and self._slot in producer.reporting and expected >= _SURE_TOKENS
        if cached is not None and telling and cached < expected / 2:
            producer.index.lost(self._slot, min(claim.known_used for claim in self._claims))


class AdoptedPick:
    """What another picker assumes of an endpoint."""

    __slots__ = ("_claims", "_now", "_producer", "_slot")

    def __init__(self, producer: SessionPrefixCacheProducer, slot: int, claims: Sequence[Claim], now: float) -> None:
        self._producer = producer
        self._slot = slot
        self._claims = claims
        self._now = now

    def hear(self, told: bytes) -> None:
        """Take in what `SessionLearning.told` says of its end, which is about to be confirmed."""
        producer, claims = self._producer, self._claims
        if not all(map(producer.index.holds, claims)):
            return
        try:
            (claim,) = claims
            chain, ids = end_of(told, claim.tip.chain())
        except ValueError:
            producer.malformed()
            return
        self._claims = (producer.index.hold(self._slot, chain),)
        producer.index.release(claim)
        for key in ids:
            producer.names.put(key, chain)

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:  # noqa: ARG002
        index = self._producer.index
        if slot == self._slot:
            for claim in self._claims:
                index.keep(claim, self._now)
            return
        if slot is not None and all(map(index.holds, self._claims)):
            for claim in self._claims:
                index.keep(index.hold(slot, claim.tip.chain()), self._now)
        self.undo()

    def undo(self) -> None:
        for claim in self._claims:
            self._producer.index.release(claim)
