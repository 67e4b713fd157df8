"""`session-prefix-cache-producer`: know which endpoint holds how much of which conversation, without a tokenizer.

Source: seed 004. A session is the chain of its content; where it is, is assumed when a request is sent there, taken back
if that fails, and refined by what the engine says at the end: its reply goes on with the chain, and tokens that it had to
compute although they were there once tell what else is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Final

import numpy as np
from msgspec import Meta, Struct

from picker.core.arrays import Floats, Integers, slots_of
from picker.core.plugins.session_learning import AdoptedPick, SessionLearning
from picker.core.prompts import Prompt, Unused
from picker.core.prompts.fields import ABSENT
from picker.core.scheduling.api import Candidates, MatchInfo, Request, Rng
from picker.core.sessions.chain import MAX_POSITIONS, Chain, Stored
from picker.core.sessions.declared import SESSION_HEADERS, declared
from picker.core.sessions.index import Evicted, SessionIndex
from picker.core.sessions.names import Names
from picker.core.sessions.reader import ChainReader
from picker.core.sessions.shared import chains_of, names_of, packed_chains, packed_names

NAME: Final = "session-prefix-cache-producer"

_MARGIN = 1.25
"""An index that is too large loses little, one that is too small a lot."""
_BYTES_PER_TOKEN = 4
_UNREADABLE = frozenset({
    Unused.BODY_MODE_STREAMED, Unused.BODY_TRUNCATED, Unused.CONTENT_ENCODING, Unused.TOO_COMPLEX
})  # fmt: skip
_EXPORTED_POSITIONS = 8192
"""Positions in a piece of what is exported, and names; a chain is not cut."""


class Unread(StrEnum):
    """Why a request's content was not used, or not all of it; the label of a counter."""

    TOO_DEEP = "too_deep"
    TOO_LONG = "too_long"
    """More positions than are kept of one prompt."""
    UNREADABLE = "unreadable"
    BY_ID = "by_declared_id"
    """It is unreadable, too, but what its session held before is known."""
    FROM_PEER = "malformed_from_peer"
    """What another picker told of one, or of what it knows, is no such thing."""


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
        self.names = Names()
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
        stored = None
        if known.stored is not None:
            stored = Stored(known.stored, self.names.get(known.stored), known.by_response)
        try:
            chains = self.reader.read(request.path, prompt, stored)
        except RecursionError:
            self.unread[Unread.TOO_DEEP] += 1
            return None
        if any(len(chain.hashes) == MAX_POSITIONS for chain in chains):
            self.unread[Unread.TOO_LONG] += 1
        readable = prompt.unused not in _UNREADABLE
        if not readable:
            named = (self.names.get(key) for key in known.ids)
            chains = [chain for chain in named if chain is not None][:1]
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
            # What an engine makes of a response, and so what of it is the same as before, is its own affair.
            tells_evictions=_reads_cache(prompt) and not known.by_response,
        )

    def adopt(self, slot: int, shared: bytes, now: float) -> AdoptedPick | None:
        """Claim what another picker sent to a slot; None for what is no such thing."""
        try:
            chains = chains_of(shared)
        except ValueError:
            self.malformed()
            return None
        return AdoptedPick(self, slot, [self.index.hold(slot, chain) for chain in chains], now) if chains else None

    def adopt_names(self, shared: bytes) -> None:
        """Take over what another picker knows of declared ids, by `export_names`; what is known here stays, if it is more."""
        try:
            named = names_of(shared)
        except ValueError:
            self.malformed()
            return
        for key, chain in named:
            self.names.add(key, chain)

    def malformed(self) -> None:
        """Count what another picker cannot have meant."""
        self.unread[Unread.FROM_PEER] += 1

    def export(self, slot: int) -> Iterator[bytes]:
        """What a slot is known to hold, in pieces for `adopt`, the least recent first."""
        chains: list[Chain] = []
        positions = 0
        for chain in self.index.export(slot):
            chains.append(chain)
            positions += len(chain.hashes)
            if positions >= _EXPORTED_POSITIONS:
                yield packed_chains(chains)
                chains, positions = [], 0
        if chains:
            yield packed_chains(chains)

    def export_names(self) -> Iterator[bytes]:
        """What declared ids stand for, in pieces for `adopt_names`, what was used longest ago first."""
        named: list[tuple[int, Chain]] = []
        positions = 0
        for key, chain in self.names.all():
            named.append((key, chain))
            positions += len(chain.hashes) + 1
            if positions >= _EXPORTED_POSITIONS:
                yield packed_names(named)
                named, positions = [], 0
        if named:
            yield packed_names(named)

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
    tells_evictions: bool
    """Whether tokens that the engine has to compute, and was known to hold, are gone."""

    def shared(self, slot: int) -> bytes:  # noqa: ARG002
        if not self.chains:
            return b""
        return packed_chains(self.chains)

    def picked(self, slot: int) -> SessionLearning:
        index = self.producer.index
        claims = [index.hold(slot, chain) for chain in self.chains]
        tokens = self.cache_tokens.item(slot)
        if tokens > 0:
            index.limit(slot, tokens * self.bytes_per_token * _MARGIN)
        return SessionLearning(self, slot, claims)


def _reads_cache(prompt: Prompt) -> bool:
    """Whether the engine takes tokens from its cache; for log probabilities of the prompt it computes all."""
    fields = prompt.fields
    return fields is None or (fields.prompt_logprobs is ABSENT and fields.echo is ABSENT)
