"""Tokenizing in this process, from a Hugging Face tokenizer's directory.

Read from it: `tokenizer.json`; `tokenizer_config.json` for the special tokens and `chat_template`; `special_tokens_map.json`; `chat_template.jinja`, which goes before the former; `config.json` and
`tekken.json` for models that engines render without a template.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import jinja2
import structlog
from msgspec import Struct
from msgspec.structs import replace
from tokenizers import Tokenizer

from picker.core.tokens.conversation import Chat, ContentFormat, read_chat
from picker.core.tokens.lru import ByteLru
from picker.core.tokens.prompt import EngineRequest, Served, UnsupportedRequestError
from picker.core.tokens.segments import Cutter, SegmentPlan, plan_segments
from picker.io.tokenize.self_check import adversarial_prompts, first_difference
from picker.io.tokenize.step import Outcome, StepError, Tokens
from picker.io.tokenize.templates import MAX_CHARACTERS, ChatTemplate

logger = structlog.get_logger(__name__)

MAX_RENDER_SECONDS = 1.0
"""A template that renders for longer is stopped, though nobody waits for it any more by then."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WITHOUT_TEMPLATE = frozenset({"gpt_oss"})
_CHECKED_PROMPTS = 300
_ENTRY_BYTES = 200
"""What Python needs for a cached segment beside its text and tokens."""


class LocalSettings(Struct, frozen=True):
    """Where the tokenizer is, and the engine's own flags as far as they change prompts.

    `chat_template` is a file (vLLM's `--chat-template`), `content_format` None finds it in the template
    (`--chat-template-content-format auto`), `chat_template_kwargs` are those for every request
    (`--default-chat-template-kwargs`), `hide_tools` leaves tools out of a prompt when `tool_choice` is "none"
    (`--exclude-tools-when-tool-choice-none`). With `engine` sglang, chats with tools or lists of parts are left to
    other steps: SGLang reads them its own way.
    """

    directory: str
    engine: str = "vllm"
    chat_template: str | None = None
    content_format: ContentFormat | None = None
    chat_template_kwargs: Mapping[str, Any] = {}
    hide_tools: bool = False
    cache_bytes: int = 64 * 2**20


class TokenizerFilesError(ValueError):
    """A directory that is no usable tokenizer; the text names the file and what to do."""


class LocalTokenizer:
    """One tokenizer with its chat template. May be used by several threads at once.

    `segments_off` says why segments are not cached for it, `ends_disputed` why it is not known which special tokens
    engines put around a text; they are empty when they are, and when it is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        plan: SegmentPlan,
        settings: LocalSettings,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._settings = settings
        self.segments: ByteLru[tuple[bool, str], array[int]] = ByteLru(settings.cache_bytes)
        self.hits = 0
        self.misses = 0
        self._lock = Lock()
        self._cutter: Cutter | None = None
        self._ends = _ends(tokenizer)
        self._later = tokenizer if plan.later is None else _prepared(json.dumps(plan.later))
        self.ends_disputed = ""
        self.segments_off = plan.unsafe
        if not self.segments_off:
            self._check(plan)

    @classmethod
    def load(cls, settings: LocalSettings) -> LocalTokenizer:
        """Load a directory. Raises TokenizerFilesError. Takes up to some seconds, for a large vocabulary."""
        directory = Path(settings.directory)
        path = directory / "tokenizer.json"
        source = _read(path)
        if source is None:
            raise TokenizerFilesError(f"{path} does not exist: correct the directory, or convert the tokenizer to it")
        config = _special_tokens(directory)
        plan = plan_segments(_object(path, source))
        try:
            tokenizer = _prepared(source)
        except Exception as error:  # the library raises nothing more special
            raise TokenizerFilesError(f"{path}: {error}") from error
        _require_tokens(directory, config, tokenizer)
        if config.get("split_special_tokens"):
            tokenizer.encode_special_tokens = True
            plan = SegmentPlan(unsafe="special tokens are split like text")
        local = cls(tokenizer, _templates(directory, config, settings), plan, settings)
        local.ends_disputed = _disputed_ends(tokenizer, config)
        return local

    def _check(self, plan: SegmentPlan) -> None:
        cutter = Cutter({text: i for text in plan.cuts if (i := self._tokenizer.token_to_id(text)) is not None})
        prompts = adversarial_prompts(plan.cuts, Random(0), _CHECKED_PROMPTS)
        different = first_difference(
            cutter,
            prompts,
            lambda text: self._ids(self._tokenizer, text),
            lambda text, first: self._ids(self._tokenizer if first else self._later, text),
        )
        if different is None:
            self._cutter = cutter
        else:
            self.segments_off = f"self-check: segments of {different[:100]!r} give other tokens"

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Return the token ids of a text. Raises UnsupportedRequestError when it is too long."""
        if len(text) > MAX_CHARACTERS:
            raise UnsupportedRequestError(f"the prompt has more than {MAX_CHARACTERS} characters")
        if add_special_tokens and self.ends_disputed:
            raise UnsupportedRequestError(self.ends_disputed)
        if self._cutter is None or (add_special_tokens and self._ends is None):
            return array("I", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        pieces = self._cutter.cut(text)
        if add_special_tokens and self._ends is not None:
            begin, end = self._ends
            return begin + self._join(pieces) + end
        return self._join(pieces)

    def _join(self, pieces: list[str | int]) -> array[int]:
        """Put a prompt's tokens together; only texts that were never seen are tokenized, and not under the lock."""
        keys = [(index == 0, piece) for index, piece in enumerate(pieces) if isinstance(piece, str)]
        with self._lock:
            found = [self.segments.get(key) for key in keys]
        missing = [index for index, tokens in enumerate(found) if tokens is None]
        for index in missing:
            first, text = keys[index]
            found[index] = array("I", self._ids(self._tokenizer if first else self._later, text))
        with self._lock:
            self.hits += len(keys) - len(missing)
            self.misses += len(missing)
            for index in missing:
                if (tokens := found[index]) is not None:
                    size = _ENTRY_BYTES + 4 * len(keys[index][1]) + 4 * len(tokens)
                    self.segments.put(keys[index], tokens, size)
        joined, texts = array("I"), iter(found)
        for piece in pieces:
            if isinstance(piece, int):
                joined.append(piece)
            elif (tokens := next(texts)) is not None:
                joined.extend(tokens)
        return joined

    def tokenize(self, request: EngineRequest) -> list[Tokens]:
        """Return the tokens of a request's texts, or of its conversation. Raises UnsupportedRequestError."""
        if request.prompts:
            for name in ("truncate_prompt_tokens", "prompt_embeds"):
                if request.field(name) is not None:
                    raise UnsupportedRequestError(f"{name} is set")
            special = request.field("add_special_tokens") is not False
            texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
            return [Tokens(self.encode(text, add_special_tokens=special)) for text in texts]
        chat = self._chat(request)
        template = self._templates.get("tool_use" if chat.tools and "tool_use" in self._templates else "default")
        if template is None:
            raise UnsupportedRequestError("the tokenizer has no chat template")
        prompt = template.render(chat, MAX_RENDER_SECONDS)
        return [Tokens(self.encode(prompt, add_special_tokens=chat.add_special_tokens))]

    def _chat(self, request: EngineRequest) -> Chat:
        chat, settings = read_chat(request), self._settings
        if settings.engine == "sglang":
            parts = any(
                isinstance(message, dict) and isinstance(message.get("content"), list) for message in chat.messages
            )
            if parts or chat.tools:
                raise UnsupportedRequestError("SGLang reads tools and lists of parts its own way: let it tokenize them")
        tools = None if settings.hide_tools and chat.tool_choice == "none" else chat.tools
        return replace(chat, tools=tools, variables={**settings.chat_template_kwargs, **chat.variables})


class Local:
    """The step that tokenizes in threads of this process. At most `max_waiting` requests wait for a thread."""

    name = "local"

    def __init__(self, tokenizer: LocalTokenizer, *, threads: int = 2, max_waiting: int = 64) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._most = threads + max_waiting
        self._busy = 0

    async def tokenize(self, request: EngineRequest, served: Served, seconds: float) -> list[Tokens]:  # noqa: ARG002
        """See `Step`. A thread that is too late finishes: what it tokenized is cached for the next request."""
        if self._busy >= self._most:
            raise StepError(Outcome.OVERLOADED, f"{self._busy} requests are being tokenized: give it more threads")
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(self.tokenizer.tokenize, request)
            self._busy += 1
            future.add_done_callback(lambda _: _call_soon(loop, self._done))
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise StepError(Outcome.TIMEOUT, f"not tokenized within {seconds:.3f} s") from None
        except UnsupportedRequestError as error:
            raise StepError(Outcome.UNSUPPORTED, str(error)) from error
        except Exception as error:
            raise StepError(Outcome.ERROR, repr(error)) from error

    def _done(self) -> None:
        self._busy -= 1

    def close(self) -> None:
        """End the threads; what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def _prepared(source: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenizerFilesError(f"{path} cannot be read: {error}") from error


def _object(path: Path, source: str | None) -> dict[str, Any]:
    if source is None:
        return {}
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise TokenizerFilesError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerFilesError(f"{path} holds no object")
    return value


def _special_tokens(directory: Path) -> dict[str, Any]:
    """The tokenizer's settings, completed from the file where older releases kept the special tokens."""
    settings, older = (
        _object(path, _read(path))
        for path in (directory / "tokenizer_config.json", directory / "special_tokens_map.json")
    )
    if "added_tokens_decoder" in settings:
        return settings
    return older | {name: value for name, value in settings.items() if value is not None}


def _text(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _require_tokens(directory: Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Refuse special tokens that engines would add to the vocabulary, as their ids cannot be known."""
    decoder = settings.get("added_tokens_decoder")
    added = [_text(token) for token in decoder.values()] if isinstance(decoder, dict) else []
    for text in [*(_text(settings.get(name)) for name in _SPECIAL_TOKENS), *added]:
        if text and tokenizer.token_to_id(text) is None:
            raise TokenizerFilesError(
                f"{directory / 'tokenizer_config.json'} names the token {text!r}, which tokenizer.json does not have: "
                "save the tokenizer again"
            )


def _disputed_ends(tokenizer: Tokenizer, config: Mapping[str, Any]) -> str:
    """Say where tokenizer.json and the settings disagree on begin and end tokens.

    `transformers` 4 obeys the settings for some classes of tokenizers, 5 obeys tokenizer.json.
    """
    added = tokenizer.encode("", add_special_tokens=True).ids
    for end in ("bos", "eos"):
        wanted, text = config.get(f"add_{end}_token"), _text(config.get(f"{end}_token"))
        if isinstance(wanted, bool) and text and (tokenizer.token_to_id(text) in added) != wanted:
            return f"add_{end}_token is {wanted}, but tokenizer.json does otherwise: releases of transformers differ"
    return ""


def _ends(tokenizer: Tokenizer) -> tuple[array[int], array[int]] | None:
    """What the tokenizer puts before and after every text when special tokens are wanted; None if it is not constant."""
    found = []
    for text in ("probe", "another probe, longer"):
        bare, full = (tokenizer.encode(text, add_special_tokens=special).ids for special in (False, True))
        starts = range(len(full) - len(bare) + 1)
        start = next((start for start in starts if full[start : start + len(bare)] == bare), None)
        if start is None:
            return None
        found.append((full[:start], full[start + len(bare) :]))
    begin, end = found[0]
    return (array("I", begin), array("I", end)) if found[0] == found[1] else None


def _templates(directory: Path, config: Mapping[str, Any], settings: LocalSettings) -> dict[str, ChatTemplate]:
    """The chat templates by name; the one for everything is called "default"."""
    if settings.chat_template is not None:
        sources: Any = _read(Path(settings.chat_template))
        if sources is None:
            raise TokenizerFilesError(f"{settings.chat_template} does not exist: correct the path of the chat template")
    elif reason := _without_template(directory):
        logger.warning("tokenizer_without_chats", directory=str(directory), reason=reason)
        return {}
    else:
        sources = _read(directory / "chat_template.jinja") or config.get("chat_template")
    variables = {name: text for name in _SPECIAL_TOKENS if (text := _text(config.get(name))) is not None}
    named = sources if isinstance(sources, list) else [{"name": "default", "template": sources}] if sources else []
    try:
        return {str(each["name"]): ChatTemplate(each["template"], variables, settings.content_format) for each in named}
    except (jinja2.TemplateError, KeyError, TypeError) as error:
        raise TokenizerFilesError(f"{directory}: its chat template cannot be used: {error!r}") from error


def _without_template(directory: Path) -> str:
    """Why engines render this model's chats in code instead of by its template; empty when they do not."""
    model_type = _object(directory / "config.json", _read(directory / "config.json")).get("model_type")
    if model_type in _WITHOUT_TEMPLATE:
        return f"engines have code for {model_type}"
    if (directory / "tekken.json").exists():
        return "engines prefer tekken.json and mistral-common; set a chat template if yours does not"
    return ""
