"""The ordered ways of tokenizing, with a cache of whole prompts before them.

A request is tokenized once, however many ask for it: equal requests that come while one is under way wait for it.
Nothing here raises, and every end is counted, by step and outcome.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Iterable

import structlog
from msgspec import Struct

from picker.core.tokens.lru import ByteLru
from picker.core.tokens.prompt import EngineRequest, ModelNames, Served, TokenPrompt
from picker.io.tokenize.step import Outcome, Step, StepError, Tokens

logger = structlog.get_logger(__name__)

_ENTRY_BYTES = 400
"""What Python needs for a cached prompt beside its tokens."""


class ChainSettings(Struct, frozen=True):
    """Times in seconds: for all steps together, and for one of them."""

    deadline: float = 0.08
    step_deadline: float = 0.05
    cache_bytes: int = 64 * 2**20
    names: ModelNames = ModelNames()


class Tokenized(Struct, frozen=True):
    """The prompts of a request as tokens, and where they came from: a step, "cache", or "request" for token ids.

    `prompts` is empty exactly when `reason` says why, which is the outcome of the last step that was tried.
    """

    prompts: tuple[TokenPrompt, ...] = ()
    source: str = ""
    reason: Outcome | None = None


class _Result(Struct, frozen=True):
    """How the steps ended for one request; one that failed is not cached."""

    tokens: tuple[Tokens, ...] = ()
    source: str = ""
    reason: Outcome | None = None


class TokenizerChain:
    """Tries `steps` in order. `counts` has (step, outcome) for each step tried, and for what needed none.

    Beside the steps' own outcomes: ("request", "ok") for prompts that were token ids, ("cache", "ok") for prompts seen
    before, ("joined", "ok") for those that waited for an equal one, ("chain", outcome) for requests without tokens.
    """

    def __init__(self, steps: Iterable[Step], settings: ChainSettings) -> None:
        self.settings = settings
        self.counts: Counter[tuple[str, str]] = Counter()
        self.cache: ByteLru[tuple[str, bytes], _Result] = ByteLru(settings.cache_bytes)
        self._steps = tuple(steps)
        self._running: dict[tuple[str, bytes], asyncio.Task[_Result]] = {}

    async def tokenize(self, request: EngineRequest) -> Tokenized:
        """Return the request's prompts as tokens, or why there are none, within the deadline. Never raises."""
        served = self.settings.names.resolve(request.model)
        if request.prompts and not any(isinstance(prompt, str) for prompt in request.prompts):
            self.counts["request", Outcome.OK] += 1
            return _answer(request, served, _Result(source="request"))
        key = (served.model, request.digest())
        result = self.cache.get(key)
        if result is not None:
            self.counts["cache", Outcome.OK] += 1
            return _answer(request, served, _Result(result.tokens, "cache"))
        result = await self._join_or_start(key, request, served)
        if result.reason is not None:
            self.counts["chain", result.reason] += 1
        return _answer(request, served, result)

    async def _join_or_start(self, key: tuple[str, bytes], request: EngineRequest, served: Served) -> _Result:
        task = self._running.get(key)
        joined = task is not None
        if task is None:
            task = asyncio.create_task(self._run(key, request, served))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        # The task outlives a caller that is cancelled: others may wait for it, and the cache will have it.
        await asyncio.wait((task,), timeout=self.settings.deadline)
        if not task.done() or task.cancelled():
            return _Result(reason=Outcome.TIMEOUT)
        result = task.result()
        if joined and result.reason is None:
            self.counts["joined", Outcome.OK] += 1
        return result

    async def _run(self, key: tuple[str, bytes], request: EngineRequest, served: Served) -> _Result:
        deadline = time.monotonic() + self.settings.deadline
        reason = Outcome.DISABLED
        for step in self._steps:
            seconds = min(self.settings.step_deadline, deadline - time.monotonic())
            if seconds <= 0:
                return _Result(reason=Outcome.TIMEOUT)
            try:
                result = _Result(tuple(await step.tokenize(request, served, seconds)), step.name)
            except StepError as error:
                reason = error.outcome
                logger.debug("not_tokenized", step=step.name, outcome=reason, detail=str(error))
            except Exception as error:  # noqa: BLE001  a request is never failed because tokenizing failed
                reason = Outcome.ERROR
                logger.warning("tokenizing_failed", step=step.name, error=repr(error))
            else:
                self.counts[step.name, Outcome.OK] += 1
                self.cache.put(key, result, _ENTRY_BYTES + sum(4 * len(each.token_ids) for each in result.tokens))
                return result
            self.counts[step.name, reason] += 1
        return _Result(reason=reason)


def _answer(request: EngineRequest, served: Served, result: _Result) -> Tokenized:
    """Put the tokens together with what this very request says about its cache."""
    if result.reason is not None:
        return Tokenized(reason=result.reason)
    texts = iter(result.tokens)
    each = [Tokens(prompt) if isinstance(prompt, array) else next(texts) for prompt in request.prompts] or texts
    return Tokenized(
        tuple(
            TokenPrompt(
                token_ids=tokens.token_ids,
                model=served.model,
                lora=served.lora,
                cache_salt=request.cache_salt,
                multimodal=tokens.multimodal,
                reads_cache=request.reads_cache,
            )
            for tokens in each
        ),
        result.source,
    )
