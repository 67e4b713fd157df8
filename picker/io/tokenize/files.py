"""A Hugging Face tokenizer's directory, read and checked.

Read from it: `tokenizer.json`; `tokenizer_config.json` for the special tokens and `chat_template`;
`special_tokens_map.json`; `chat_template.jinja`, which goes before the former; `config.json` and `tekken.json` for
models that engines render without a template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import structlog
from msgspec import Struct
from tokenizers import Tokenizer

from picker.core.tokens.conversation import ContentFormat
from picker.core.tokens.segments import SegmentPlan, plan_segments
from picker.io.tokenize.templates import ChatTemplate

logger = structlog.get_logger(__name__)

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WITHOUT_TEMPLATE = frozenset({"gpt_oss"})


class LocalSettings(Struct, frozen=True):
    """Where the tokenizer is, and the engine's own flags as far as they change prompts.

    `chat_template` is a file (vLLM's `--chat-template`), `content_format` None finds it in the template
    (`--chat-template-content-format auto`), `chat_template_kwargs` are those for every request
    (`--default-chat-template-kwargs`), `hide_tools` leaves tools out of a prompt when `tool_choice` is "none"
    (`--exclude-tools-when-tool-choice-none`). With `engine` sglang, chats with tools, lists of parts or an open
    end are left to other steps: SGLang reads them its own way.
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


class TokenizerFiles(Struct, frozen=True):
    """What a directory holds. `templates` are by name, the one for everything is called "default".

    `ends_disputed` says why it is not known which special tokens engines put around a text; empty when it is known.
    """

    tokenizer: Tokenizer
    plan: SegmentPlan
    templates: Mapping[str, ChatTemplate] = {}
    ends_disputed: str = ""


def read_files(settings: LocalSettings) -> TokenizerFiles:
    """Read a tokenizer's directory. Raises TokenizerFilesError."""
    directory = Path(settings.directory)
    path = directory / "tokenizer.json"
    source = _read(path)
    if source is None:
        raise TokenizerFilesError(f"{path} does not exist: correct the directory, or convert the tokenizer to it")
    config = _special_tokens(directory)
    plan = plan_segments(_object(path, source))
    try:
        tokenizer = tokenizer_of(source)
    except Exception as error:  # the library raises nothing more special
        raise TokenizerFilesError(f"{path}: {error}") from error
    _require_tokens(directory, config, tokenizer)
    if config.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True
        plan = SegmentPlan(unsafe="special tokens are split like text")
    return TokenizerFiles(tokenizer, plan, _templates(directory, config, settings), _disputed_ends(tokenizer, config))


def tokenizer_of(source: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; like engines, it neither pads nor truncates."""
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
    # SGLang hands a text on as it is, also to templates that take lists.
    form = settings.content_format or (ContentFormat.STRING if settings.engine == "sglang" else None)
    variables = {name: text for name in _SPECIAL_TOKENS if (text := _text(config.get(name))) is not None}
    named = sources if isinstance(sources, list) else [{"name": "default", "template": sources}] if sources else []
    try:
        return {str(each["name"]): ChatTemplate(each["template"], variables, form) for each in named}
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
