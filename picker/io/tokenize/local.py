"""Tokenizing in this process, from a Hugging Face tokenizer's directory."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from random import Random
from threading import Lock

from msgspec.structs import replace
from tokenizers import Encoding, Tokenizer

from picker.core.tokens.conversation import Chat, read_chat
from picker.core.tokens.lru import ByteLru
from picker.core.tokens.prompt import EngineRequest, Served, UnsupportedRequestError
from picker.core.tokens.segments import Cutter, SegmentPlan
from picker.io.call_soon import call_soon
from picker.io.tokenize.files import LocalSettings, TokenizerFiles, read_files, tokenizer_of
from picker.io.tokenize.self_check import adversarial_prompts, first_difference
from picker.io.tokenize.step import Outcome, Precedence, StepError, Tokens
from picker.io.tokenize.templates import MAX_CHARACTERS

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a batch is one text, and a thread for each is here already

MAX_RENDER_SECONDS = 1.0
"""A template that renders for longer is stopped, though nobody waits for it any more by then."""

Away = Callable[[], AbstractContextManager[None]]
"""Around work that leaves the interpreter to others."""

_CHECKED_PROMPTS = 300
_LONG = 1000
"""Characters that take long enough to tell others of it."""
_ENTRY_BYTES = 200
"""What Python needs for a cached segment beside its text and tokens."""


class LocalTokenizer:
    """One tokenizer with its chat template. May be used by several threads at once.

    `segments_off` says why segments are not cached for it; it is empty when they are. `hits` and `misses` count the
    texts between special tokens that were known, and that were not.
    """

    def __init__(self, files: TokenizerFiles, settings: LocalSettings) -> None:
        self._tokenizer = files.tokenizer
        self._templates = files.templates
        self._ends_disputed = files.ends_disputed
        self._settings = settings
        self.segments: ByteLru[tuple[bool, str], array[int]] = ByteLru(settings.cache_bytes)
        self.hits = 0
        self.misses = 0
        self._lock = Lock()
        self._cutter: Cutter | None = None
        self._ends = _ends(files.tokenizer)
        later = files.plan.later
        self._later = files.tokenizer if later is None else tokenizer_of(json.dumps(later))
        self.segments_off = files.plan.unsafe
        if not self.segments_off:
            self._check(files.plan)

    @classmethod
    def load(cls, settings: LocalSettings) -> LocalTokenizer:
        """Load a directory. Raises TokenizerFilesError. Takes up to some seconds, for a large vocabulary."""
        return cls(read_files(settings), settings)

    def _check(self, plan: SegmentPlan) -> None:
        cutter = Cutter({text: i for text in plan.cuts if (i := self._tokenizer.token_to_id(text)) is not None})
        prompts = adversarial_prompts(plan.cuts, Random(0), _CHECKED_PROMPTS)
        different = first_difference(
            cutter,
            prompts,
            lambda text: _encode(self._tokenizer, text).ids,
            lambda text, first: _encode(self._tokenizer if first else self._later, text).ids,
        )
        if different is None:
            self._cutter = cutter
        else:
            self.segments_off = f"self-check: segments of {different[:100]!r} give other tokens"

    def encode(self, text: str, *, add_special_tokens: bool, away: Away = nullcontext) -> array[int]:
        """Return the token ids of a text, found while `away`. Raises UnsupportedRequestError."""
        if len(text) > MAX_CHARACTERS:
            raise UnsupportedRequestError(f"the prompt has more than {MAX_CHARACTERS} characters")
        if add_special_tokens and self._ends_disputed:
            raise UnsupportedRequestError(self._ends_disputed)
        if self._cutter is None or (add_special_tokens and self._ends is None):
            with _apart(away, text):
                encoding = _encode(self._tokenizer, text, special=add_special_tokens)
            return array("I", encoding.ids)
        pieces = self._cutter.cut(text)
        if add_special_tokens and self._ends is not None:
            begin, end = self._ends
            return begin + self._join(pieces, away) + end
        return self._join(pieces, away)

    def _join(self, pieces: list[str | int], away: Away) -> array[int]:
        """Put a prompt's tokens together; only texts that were never seen are tokenized, and not under the lock."""
        keys = [(index == 0, piece) for index, piece in enumerate(pieces) if isinstance(piece, str)]
        with self._lock:
            found = [self.segments.get(key) for key in keys]
        missing = [index for index, tokens in enumerate(found) if tokens is None]
        texts = [keys[index] for index in missing]
        with _apart(away, *(text for _, text in texts)):
            encoded = [_encode(self._tokenizer if first else self._later, text) for first, text in texts]
        for index, encoding in zip(missing, encoded, strict=True):
            found[index] = array("I", encoding.ids)
        with self._lock:
            self.hits += len(keys) - len(missing)
            self.misses += len(missing)
            for index in missing:
                if (tokens := found[index]) is not None:
                    size = _ENTRY_BYTES + 4 * len(keys[index][1]) + 4 * len(tokens)
                    self.segments.put(keys[index], tokens, size)
        joined, tokenized = array("I"), iter(found)
        for piece in pieces:
            if isinstance(piece, int):
                joined.append(piece)
            elif (tokens := next(tokenized)) is not None:
                joined.extend(tokens)
        return joined

    def tokenize(self, request: EngineRequest, away: Away = nullcontext) -> list[Tokens]:
        """Return the tokens of a request's texts, or of its conversation. Raises UnsupportedRequestError."""
        if request.prompts:
            for name in ("truncate_prompt_tokens", "prompt_embeds"):
                if request.field(name) is not None:
                    raise UnsupportedRequestError(f"{name} is set")
            special = request.field("add_special_tokens") is not False
            texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
            return [Tokens(self.encode(text, add_special_tokens=special, away=away)) for text in texts]
        chat = self._chat(request)
        template = self._templates.get("tool_use" if chat.tools and "tool_use" in self._templates else "default")
        if template is None:
            raise UnsupportedRequestError("the tokenizer has no chat template")
        prompt = template.render(chat, MAX_RENDER_SECONDS)
        return [Tokens(self.encode(prompt, add_special_tokens=chat.add_special_tokens, away=away))]

    def _chat(self, request: EngineRequest) -> Chat:
        chat, settings = read_chat(request), self._settings
        if settings.engine == "sglang":
            parts = any(
                isinstance(message, dict) and isinstance(message.get("content"), list) for message in chat.messages
            )
            if parts or chat.tools or chat.continue_final_message:
                raise UnsupportedRequestError(
                    "SGLang reads tools, parts and open ends its own way: let it tokenize them"
                )
        tools = None if settings.hide_tools and chat.tool_choice == "none" else chat.tools
        return replace(chat, tools=tools, variables={**settings.chat_template_kwargs, **chat.variables})


class Local:
    """The step that tokenizes in threads of this process. At most `max_waiting` requests wait for a thread.

    What shares the interpreter with them may give each of them `precedence`.
    """

    name = "local"

    def __init__(
        self,
        tokenizer: LocalTokenizer,
        *,
        threads: int = 2,
        max_waiting: int = 64,
        precedence: Callable[[], Precedence] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._precedence = precedence
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._most = threads + max_waiting
        self._at_once = threads
        self._busy = 0

    async def tokenize(self, request: EngineRequest, served: Served, seconds: float) -> list[Tokens]:  # noqa: ARG002
        """See `Step`. A thread that is too late finishes: what it tokenized is cached for the next request."""
        if self._busy >= self._most:
            raise StepError(Outcome.OVERLOADED, f"{self._busy} requests are being tokenized: give it more threads")
        loop = asyncio.get_running_loop()
        try:
            future = self._submit(request)
            self._busy += 1
            future.add_done_callback(lambda _: call_soon(loop, self._done))
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise StepError(Outcome.TIMEOUT, f"not tokenized within {seconds:.3f} s") from None
        except UnsupportedRequestError as error:
            raise StepError(Outcome.UNSUPPORTED, str(error)) from error
        except Exception as error:
            raise StepError(Outcome.ERROR, repr(error)) from error

    def _submit(self, request: EngineRequest) -> Future[list[Tokens]]:
        if self._precedence is None:
            return self._threads.submit(self.tokenizer.tokenize, request)
        precedence = self._precedence()

        def tokenize() -> list[Tokens]:
            precedence.enter()
            return self.tokenizer.tokenize(request, precedence.away)

        future = self._threads.submit(tokenize)
        if self._busy < self._at_once:  # else it needs nothing yet
            precedence.enter()
        future.add_done_callback(lambda _: precedence.end())
        return future

    def _done(self) -> None:
        self._busy -= 1

    def close(self) -> None:
        """End the threads; what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _apart(away: Away, *texts: str) -> AbstractContextManager[None]:
    """Be away while these are tokenized, if that is worth telling."""
    return away() if sum(map(len, texts)) >= _LONG else nullcontext()


def _encode(tokenizer: Tokenizer, text: str, *, special: bool = False) -> Encoding:
    """Tokenize. `encode` would not let other threads run meanwhile, which are the requests to be routed."""
    encoding: Encoding = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
    return encoding


def _ends(tokenizer: Tokenizer) -> tuple[array[int], array[int]] | None:
    """What the tokenizer puts before and after every text when special tokens are wanted; None if it is not constant."""
    found = []
    for text in ("probe", "another probe, longer"):
        bare, full = (
            tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids for special in (False, True)
        )
        starts = range(len(full) - len(bare) + 1)
        start = next((start for start in starts if full[start : start + len(bare)] == bare), None)
        if start is None:
            return None
        found.append((full[:start], full[start + len(bare) :]))
    begin, end = found[0]
    return (array("I", begin), array("I", end)) if found[0] == found[1] else None
