"""Predictions: how many tokens of a request are cached where, before anything is sent to an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from picker.core.block_index.index import BlockIndex, Prediction
from picker.core.block_index.source import SourceStats
from picker.core.plugins.kvcache_aware import indexed
from picker.core.prompts import Unused
from picker.core.prompts.complexity import MAX_PARTS
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

    async def predict(self, body: bytes) -> dict[str, Any]:
        """Answer for a body that could be sent to an engine, or one with `token_ids`. Raises PredictionError.

        The answer is that of seed 003. `predicted_cached_tokens` are those of the endpoint that has most; all counts are
        sums over the prompts of the request.
        """
        request = read_engine_request("", body)
        if not isinstance(request, EngineRequest):
            raise PredictionError(400, _REASONS.get(request, f"the body has no usable prompt ({request})"))
        tokenizer, holders = self._tokenizer(), self._holders()
        if tokenizer is None or holders is None:
            raise PredictionError(503, "it is not known what engines hold: enable kvcache-aware under Score")
        for _ in range(_ATTEMPTS):
            tokenized = await tokenizer.tokenize(request)
            if tokenized.reason is not Outcome.TIMEOUT:
                break
        if not tokenized.prompts:
            raise PredictionError(503, f"the prompt could not be tokenized ({tokenized.reason})")
        held = await holders.held(tokenized.prompts)
        if held is None:
            raise PredictionError(503, "the index gave no answer in time")
        return _answer(tokenized.prompts, holders.block_size, held)


_REASONS = {
    Unused.NO_BODY: 'send the body of a request, or {"token_ids": [...]}',
    Unused.UNKNOWN_PATH: "the body has none of messages, prompt, input and token_ids",
    Unused.EMPTY: "the prompt is empty",
    Unused.TOO_COMPLEX: f"the body has more than {MAX_PARTS} strings, lists and objects; ask about a shorter one",
}


def _answer(prompts: Sequence[TokenPrompt], block_size: int, held: Sequence[Held]) -> dict[str, Any]:
    total = sum(len(prompt.token_ids) for prompt in prompts)
    best = max(held, key=lambda one: one.tokens, default=Held("", 0, 0, complete=False))
    return {
        "predicted_cached_tokens": best.tokens,
        "total_prompt_tokens": total,
        "blocks_total": sum(len(prompt.token_ids) // block_size for prompt in prompts),
        "blocks_cached": best.blocks,
        "cache_hit_ratio": best.tokens / total if total else 0.0,
        "pod_affinities": [
            {"pod_id": one.pod, "cached_blocks": one.blocks, "cached_tokens": one.tokens, "complete": one.complete}
            for one in sorted(held, key=lambda one: (-one.tokens, one.pod))
        ],
    }


class EngineHolder:
    """The one engine whose events feed slot 0 of an index."""

    def __init__(self, index: BlockIndex, pod: str, complete: Callable[[], bool], block_size: int = 16) -> None:
        self._index = index
        self._pod = pod
        self._complete = complete
        self._default = block_size

    @property
    def block_size(self) -> int:
        return block_size_of(self._index.stats()) or self._default

    async def held(self, prompts: Sequence[TokenPrompt]) -> list[Held] | None:
        tokens, complete = held_by_events(self._index, prompts).get(0, NOTHING)
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
