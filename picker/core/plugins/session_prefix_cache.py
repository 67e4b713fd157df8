"""`session-prefix-cache-producer`: know which endpoint holds how much of which conversation, without a tokenizer.

Source: seed 004. A session is the chain of its content; where it is, is assumed when a request is sent there, taken back
if that fails, and refined by what the engine says at the end: its reply goes on with the chain, and tokens that it had to
compute although they were there once tell what else is gone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct

from picker.core.arrays import Floats, Integers, slots_of
from picker.core.prompts import Prompt, Unused
from picker.core.prompts.fields import ABSENT
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng
from picker.core.sessions.chain import MAX_POSITIONS, Chain, Stored
from picker.core.sessions.declared import SESSION_HEADERS, declared
from picker.core.sessions.index import Claim, Evicted, SessionIndex
from picker.core.sessions.reader import ChainReader
from picker.core.tokens.lru import ByteLru
from picker.core.usage import Usage

NAME: Final = "session-prefix-cache-producer"

_MARGIN = 1.25
"""An index that is too large loses little, one that is too small a lot."""
_BYTES_PER_TOKEN = 4
_SURE_TOKENS = 1024
"""Fewer tokens that an engine was to have, but computed, tell nothing of its cache."""
_UNREADABLE = frozenset({
    Unused.BODY_MODE_STREAMED, Unused.BODY_TRUNCATED, Unused.CONTENT_ENCODING, Unused.TOO_COMPLEX
})  # fmt: skip
_MAX_SHARED_BYTES = 1 << 30
_EXPORTED_POSITIONS = 8192
"""Positions in a piece of what is exported; a chain is not cut."""
_shared = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]])

_ALIAS_BYTES = 300


class Unread(StrEnum):
    """Why a request's content was not used, or not all of it; the label of a counter."""

    TOO_DEEP = "too_deep"
    TOO_LONG = "too_long"
    """More positions than are kept of one prompt."""
    UNREADABLE = "unreadable"
    BY_ID = "by_declared_id"
    """It is unreadable, too, but what its session held before is known."""


_Header = Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$", max_length=256)]


class SessionPrefixCacheArgs(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Arguments of `session-prefix-cache-producer`. Whole numbers that are zero or less mean the default."""

    cache_tokens: int = 1_000_000
    """Tokens of sessions that are kept for each endpoint whose engine does not say how large its KV cache is."""
    max_positions: int = 2_000_000
    """Pieces of content, of 512 bytes at most, that are kept for all endpoints together; each takes some 30 bytes."""
    session_seconds: int = 3600
    """A session that is not used for so long is forgotten."""
    session_headers: tuple[_Header, ...] = ()
    """Names of headers with a session's id, in addition to those of common clients and agents."""

    def effective(self) -> SessionPrefixCacheArgs:
        """The same with defaults in the place of values that are zero or less."""
        default = SessionPrefixCacheArgs()
        return SessionPrefixCacheArgs(
            self.cache_tokens if self.cache_tokens > 0 else default.cache_tokens,
            self.max_positions if self.max_positions > 0 else default.max_positions,
            self.session_seconds if self.session_seconds > 0 else default.session_seconds,
            tuple(name.lower() for name in self.session_headers),
        )


class SessionPrefixCacheProducer:
    """Matches conversations against what was sent where, and what engines said of it."""

    name = NAME
    wants_replies = True

    def __init__(self, args: SessionPrefixCacheArgs, on_evict: Callable[[str, int], None] | None = None) -> None:  # noqa: ARG002
        args = args.effective()
        self.index = SessionIndex(
            capacity=args.cache_tokens * _BYTES_PER_TOKEN,
            max_positions=args.max_positions,
            seconds=args.session_seconds,
        )
        self.reader = ChainReader()
        self.aliases: ByteLru[int, Chain] = ByteLru(16 << 20)
        """The content that was last seen with a declared id."""
        self.unread: Counter[Unread] = Counter()
        self.reporting: set[int] = set()
        """Slots whose engine has said that tokens came from its cache."""
        self._headers = (*args.session_headers, *SESSION_HEADERS)

    @property
    def evicted(self) -> Counter[Evicted]:
        """Sessions of an endpoint that were forgotten, by reason."""
        return self.index.evicted

    def reconfigure(self, args: SessionPrefixCacheArgs) -> bool:
        """Take new arguments over; nothing that still has room has to go."""
        args = args.effective()
        self._headers = (*args.session_headers, *SESSION_HEADERS)
        self.index.resize(
            capacity=args.cache_tokens * _BYTES_PER_TOKEN,
            max_positions=args.max_positions,
            seconds=args.session_seconds,
        )
        return True

    def match(self, request: Request, candidates: Candidates, rng: Rng) -> SessionMatch | None:  # noqa: ARG002
        """Match every prompt of the request; None when there is no content to match.

        Of a request whose content nobody can read, what was last seen with its session's id is matched.
        """
        prompt = request.prompt
        known = declared(prompt, self._headers)
        stored = None if known.stored is None else Stored(known.stored, self.aliases.get(known.stored))
        try:
            chains = self.reader.read(request.path, prompt, stored)
        except RecursionError:
            self.unread[Unread.TOO_DEEP] += 1
            return None
        if any(len(chain.hashes) == MAX_POSITIONS for chain in chains):
            self.unread[Unread.TOO_LONG] += 1
        readable = prompt.unused not in _UNREADABLE
        if not readable:
            aliases = (self.aliases.get(key) for key in known.ids)
            chains = [chain for chain in aliases if chain is not None][:1]
            self.unread[Unread.BY_ID if chains else Unread.UNREADABLE] += 1
        if not chains:
            return None
        self.index.expire(request.now)
        info = self._info(request, chains, candidates)
        return SessionMatch(
            producer=self,
            chains=chains if readable else (),
            ids=known.ids,
            info=info,
            now=request.now,
            bytes_per_token=request.bytes_per_token,
            cache_tokens=candidates.table.cache_tokens,
            reads_cache=_reads_cache(prompt),
        )

    def adopt(self, slot: int, shared: bytes, now: float) -> AdoptedPick | None:
        """Claim what another picker sent to a slot; None for what is no such thing."""
        try:
            pairs = _shared.decode(shared)
            chains = [_adopted(hashes, sizes) for hashes, sizes in pairs]
        except (msgspec.DecodeError, ValueError):
            return None
        return AdoptedPick(self, slot, [self.index.hold(slot, chain) for chain in chains], now) if chains else None

    def export(self, slot: int) -> Iterator[bytes]:
        """What a slot is known to hold, in pieces for `adopt`, the least recent first."""
        chains: list[Chain] = []
        positions = 0
        for chain in self.index.export(slot):
            chains.append(chain)
            positions += len(chain.hashes)
            if positions >= _EXPORTED_POSITIONS:
                yield _packed(chains)
                chains, positions = [], 0
        if chains:
            yield _packed(chains)

    def forget(self, slot: int) -> None:
        self.index.forget(slot)
        self.reporting.discard(slot)

    def restarted(self, slot: int) -> None:
        self.forget(slot)

    def _info(self, request: Request, chains: Sequence[Chain], candidates: Candidates) -> MatchInfo:
        matched: Integers = np.zeros(len(candidates.table.endpoints), np.int64)
        for number, chain in enumerate(chains):
            for size, mask in self.index.match(chain, candidates.mask):
                slots = slots_of(mask)
                matched[slots] = matched[slots] + size if number else size
        total = sum(chain.size for chain in chains)
        length = max(total, request.body_bytes) if request.prompt.unused in _UNREADABLE else total
        ratio = request.bytes_per_token
        return MatchInfo(matched.take(candidates.slots), total, "bytes", 1 / ratio, length / ratio)


class SessionMatch(Struct, frozen=True, gc=False):
    """A request's content and who has how much of it. Without chains nothing is learnt from it."""

    producer: SessionPrefixCacheProducer
    chains: Sequence[Chain]
    ids: tuple[int, ...]
    info: MatchInfo
    now: float
    bytes_per_token: float
    cache_tokens: Floats
    reads_cache: bool

    def shared(self, slot: int) -> bytes:  # noqa: ARG002
        if not self.chains:
            return b""
        return _packed(self.chains)

    def picked(self, slot: int) -> SessionLearning:
        index = self.producer.index
        claims = [index.hold(slot, chain) for chain in self.chains]
        tokens = self.cache_tokens.item(slot)
        if tokens > 0:
            index.limit(slot, tokens * self.bytes_per_token * _MARGIN)
        return SessionLearning(self, slot, claims)


class SessionLearning(Struct, frozen=True, gc=False):
    """What is assumed of the picked endpoint while the request is on its way."""

    match: SessionMatch
    slot: int
    claims: Sequence[Claim]

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:
        """Keep it, for the endpoint that served, and with the engine's reply if that is known."""
        chains = self.match.chains
        if slot is None or not chains:
            self.undo()
            return
        index, now = self.match.producer.index, self.match.now
        if usage is not None and slot == self.slot:
            self._refine(usage)
        if usage is not None and usage.reply and len(chains) == 1:
            chains = [chains[0].replied(usage.reply)]
        if slot == self.slot and not all(map(index.holds, self.claims)):
            return
        if slot == self.slot and chains is self.match.chains:
            for claim in self.claims:
                index.keep(claim, now)
        else:
            for chain in chains:
                index.keep(index.hold(slot, chain), now)
            self.undo()
        if len(chains) == 1:
            for key in self.match.ids:
                self.match.producer.aliases.put(key, chains[0], _ALIAS_BYTES + 12 * len(chains[0].hashes))

    def undo(self) -> None:
        for claim in self.claims:
            self.match.producer.index.release(claim)

    def _refine(self, usage: Usage) -> None:
        """Learn from what the engine took from its cache. Some always say that this is nothing."""
        producer, cached = self.match.producer, usage.cached_tokens
        if cached:
            producer.reporting.add(self.slot)
        expected = sum(claim.known for claim in self.claims) / self.match.bytes_per_token
        telling = self.match.reads_cache and self.slot in producer.reporting and expected >= _SURE_TOKENS
        if cached is not None and telling and cached < expected / 2:
            producer.index.lost(self.slot, min(claim.known_used for claim in self.claims))


class AdoptedPick(Struct, frozen=True, gc=False):
    """What another picker assumes of an endpoint."""

    producer: SessionPrefixCacheProducer
    slot: int
    claims: Sequence[Claim]
    now: float

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:  # noqa: ARG002
        if slot == self.slot:
            for claim in self.claims:
                self.producer.index.keep(claim, self.now)
        else:
            self.undo()

    def undo(self) -> None:
        for claim in self.claims:
            self.producer.index.release(claim)


def _reads_cache(prompt: Prompt) -> bool:
    """Whether the engine takes tokens from its cache; for log probabilities of the prompt it computes all."""
    fields = prompt.fields
    return fields is None or (fields.prompt_logprobs is ABSENT and fields.echo is ABSENT)


def _packed(chains: Sequence[Chain]) -> bytes:
    """Chains for another picker."""
    return msgspec.msgpack.encode([(chain.hashes.tobytes(), chain.sizes.tobytes()) for chain in chains])


def _adopted(hashes: bytes, sizes: bytes) -> Chain:
    """A chain from another picker. Raises ValueError."""
    chain = Chain(array("Q", hashes), array("I", sizes), 0)
    if not 0 < len(chain.hashes) == len(chain.sizes) <= MAX_POSITIONS:
        raise ValueError("as many sizes as hashes are needed")
    if sum(chain.sizes) > _MAX_SHARED_BYTES:
        raise ValueError("no prompt is that long")
    return chain
