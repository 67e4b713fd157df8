"""Predictions: how many tokens of a request are cached where, before anything is sent to an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from picker.core.block_hashes.prompts import PromptHashes
from picker.core.block_hashes.registry import HashName
from picker.core.block_index.index import BlockIndex
from picker.core.block_index.prediction import Prediction
from picker.core.block_index.source import SourceStats
from picker.core.plugins.kvcache_aware import indexed
from picker.core.prompts import Unused
from picker.core.prompts.complexity import MAX_PARTS
from picker.core.strict import suggest
from picker.core.tokens.prompt import EngineRequest, TokenPrompt, read_engine_request
from picker.io.tokenize.chain import TokenizerChain
from picker.io.tokenize.step import Outcome

_ATTEMPTS = 5
"""A prompt that takes longer than a decision may wait is tokenized meanwhile: nobody is in a hurry here."""


class Held(NamedTuple):
    """What one endpoint will report as cached, over all prompts of a request.

    `complete` is False where it may hold more than is known.
    """

    pod: str
    tokens: int
    blocks: int
    complete: bool


NOTHING = Prediction(0, complete=False)


class Holders(Protocol):
    """Who knows which endpoint holds what."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    async def held(self, prompts: Sequence[TokenPrompt]) -> list[Held] | None:
        """Return what every endpoint holds; None when that cannot be known now."""

    async def held_named(self, model: str, hashes: Sequence[int]) -> list[Held] | None:
        """The same for one prompt of which only the hashes of its blocks are known, as the index has them."""

    @property
    def prompt_hashes(self) -> PromptHashes:
        """What the blocks of prompts are called."""


class PredictionError(Exception):
    """No prediction can be made: `status` and text say why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Oracle:
    """Predicts. Nothing is ever sent to where engines generate; they may be asked to tokenize.

    `tokenizer` and `holders` give what is in force, or None while there is none.
    """

    def __init__(self, tokenizer: Callable[[], TokenizerChain | None], holders: Callable[[], Holders | None]) -> None:
        self._tokenizer = tokenizer
        self._holders = holders

    async def predict(self, body: bytes, hashes: str = "") -> dict[str, Any]:
        """Answer for a body that could be sent to an engine, one with `token_ids`, or one with `block_hashes`.

        The answer is that of seed 003. `predicted_cached_tokens` are those of the endpoint that has most; all counts are
        sums over the prompts of the request. `hashes` asks for the hashes of the prompts' blocks, too, by this protocol.
        Raises PredictionError.
        """
        protocol = _protocol(hashes)
        named = _read_named(body)
        if named is not None:
            return await self._predict_named(*named)
        request = read_engine_request("", body)
        if not isinstance(request, EngineRequest):
            raise PredictionError(400, _REASONS.get(request, f"the body has no usable prompt ({request})"))
        tokenizer, holders = self._tokenizer(), self._holders_now()
        if tokenizer is None:
            raise PredictionError(503, _NOBODY_KNOWS)
        for _ in range(_ATTEMPTS):
            tokenized = await tokenizer.tokenize(request)
            if tokenized.reason is not Outcome.TIMEOUT:
                break
        if not tokenized.prompts:
            raise PredictionError(503, f"the prompt could not be tokenized ({tokenized.reason})")
        held = await holders.held(tokenized.prompts)
        if held is None:
            raise PredictionError(503, "the index gave no answer in time")
        size = holders.block_size
        lengths = [len(prompt.token_ids) for prompt in tokenized.prompts]
        answer = _answer(sum(lengths), sum(length // size for length in lengths), held)
        if protocol is not None:
            names = PromptHashes(protocol, holders.prompt_hashes.seed)
            answer["block_hashes"] = [
                list(map(str, names.all_hashes(prompt, size, len(prompt.token_ids) // size)))
                for prompt in tokenized.prompts
            ]
        return answer

    async def _predict_named(self, model: str, hashes: Sequence[int]) -> dict[str, Any]:
        holders = self._holders_now()
        held = await holders.held_named(model, hashes)
        if held is None:
            raise PredictionError(503, "the index gave no answer in time")
        return _answer(len(hashes) * holders.block_size, len(hashes), held)

    def _holders_now(self) -> Holders:
        holders = self._holders()
        if holders is None:
            raise PredictionError(503, _NOBODY_KNOWS)
        return holders


_NOBODY_KNOWS = "it is not known what engines hold: enable kvcache-aware under Score"
_MOST_HASHES = 1 << 16


class _Named(Struct):
    block_hashes: list[int | str]
    model: str = ""


def _protocol(name: str) -> HashName | None:
    """Read the name of a protocol. Raises PredictionError."""
    try:
        return HashName(name) if name else None
    except ValueError:
        raise PredictionError(400, f"hashes={name[:80]!r}: {suggest(name, HashName)}") from None


def _read_named(body: bytes) -> tuple[str, list[int]] | None:
    """Read a body with `block_hashes`; None for any other. Raises PredictionError."""
    if b'"block_hashes"' not in body:
        return None
    try:
        read = msgspec.json.decode(body, type=_Named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    hashes = [_hash(one) for one in read.block_hashes[:_MOST_HASHES]]
    if not hashes:
        raise PredictionError(400, "block_hashes: is empty; give those of a prompt's blocks, from the first on")
    return read.model, hashes


def _hash(value: int | str) -> int:
    number = int(value) if isinstance(value, int) or (value.isascii() and value.isdecimal() and len(value) < 21) else -1
    if not 0 <= number < 1 << 64:
        raise PredictionError(400, f"block_hashes: {str(value)[:80]!r} is none; they are whole numbers of 64 bits")
    return number


_REASONS = {
    Unused.NO_BODY: 'send the body of a request, or {"token_ids": [...]}',
    Unused.UNKNOWN_PATH: "the body has none of messages, prompt, input, token_ids, and block_hashes with whole numbers",
    Unused.EMPTY: "the prompt is empty",
    Unused.TOO_COMPLEX: f"the body has more than {MAX_PARTS} strings, lists and objects; ask about a shorter one",
}


def _answer(total: int, blocks: int, held: Sequence[Held]) -> dict[str, Any]:
    best = max(held, key=lambda one: one.tokens, default=Held("", 0, 0, complete=False))
    return {
        "predicted_cached_tokens": best.tokens,
        "total_prompt_tokens": total,
        "blocks_total": blocks,
        "blocks_cached": best.blocks,
        "cache_hit_ratio": best.tokens / total if total else 0.0,
        "pod_affinities": [
            {"pod_id": one.pod, "cached_blocks": one.blocks, "cached_tokens": one.tokens, "complete": one.complete}
            for one in sorted(held, key=lambda one: (-one.tokens, one.pod))
        ],
    }


class EngineHolder:
    """The one engine whose events feed slot 0 of an index."""

    def __init__(
        self,
        index: BlockIndex,
        pod: str,
        complete: Callable[[], bool],
        block_size: int = 16,
        prompt_hashes: PromptHashes = PromptHashes(),  # noqa: B008 (frozen)
    ) -> None:
        self.prompt_hashes = prompt_hashes
        self._index = index
        self._pod = pod
        self._complete = complete
        self._default = block_size

    @property
    def block_size(self) -> int:
        return block_size_of(self._index.stats()) or self._default

    async def held(self, prompts: Sequence[TokenPrompt]) -> list[Held] | None:
        tokens, complete = held_by_events(self._index, prompts).get(0, NOTHING)
        return self._held(tokens, complete=complete)

    async def held_named(self, model: str, hashes: Sequence[int]) -> list[Held] | None:  # noqa: ARG002  the engine's say it
        tokens, complete = self._index.predict_named(hashes).get(0, NOTHING)
        return self._held(tokens, complete=complete)

    def _held(self, tokens: int, *, complete: bool) -> list[Held]:
        return [Held(self._pod, tokens, tokens // self.block_size, complete and self._complete())]


def held_by_events(index: BlockIndex, prompts: Sequence[TokenPrompt]) -> dict[int, Prediction]:
    """Return what endpoints hold of all prompts together by their own events, by slot."""
    found: dict[int, Prediction] = {}
    for prompt in prompts:
        for slot, (tokens, complete) in index.predict_all(indexed(index, prompt)).items():
            before = found.get(slot, Prediction(0, complete=True))
            found[slot] = Prediction(before.cached_tokens + tokens, before.complete and complete)
    return found


def block_size_of(held: Sequence[SourceStats]) -> int | None:
    """Return the block size that engines use, as their events say; the smallest of several engines'."""
    return min((max(source.block_sizes) for source in held if source.block_sizes), default=None)
