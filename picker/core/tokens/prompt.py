"""What of a request becomes tokens, kept as it was sent, and the tokens it became.

Which fields matter, and their defaults: vLLM's request bodies and `/tokenize` (`add_special_tokens` is true for
texts and false for chats, whose templates add theirs), SGLang's and Kthena's Tokenizer Service, which follow them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import StrEnum
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Raw, Struct

from picker.core.prompts.complexity import too_complex
from picker.core.prompts.fields import Unused
from picker.core.prompts.parse import MAX_MODEL_LENGTH, MAX_PROMPTS

_WITHOUT_EFFECT = frozenset({
    "best_of", "cache_salt", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs",
    "max_completion_tokens", "max_output_tokens", "max_tokens", "metadata", "min_p", "min_tokens", "n",
    "presence_penalty", "priority", "prompt_logprobs", "repetition_penalty", "request_id", "seed",
    "skip_special_tokens", "stop", "stop_sequences", "stop_token_ids", "store", "stream", "stream_options",
    "temperature", "top_k", "top_logprobs", "top_p", "user",
})  # fmt: skip
"""Fields that never change a prompt's tokens. All others count as if they did."""


class UnsupportedRequestError(ValueError):
    """A request that cannot be tokenized exactly this way; the text says what about it."""


class Api(StrEnum):
    """The API of a request; the value is the end of its path."""

    CHAT = "/chat/completions"
    COMPLETIONS = "/completions"
    RESPONSES = "/responses"
    MESSAGES = "/messages"


class MultiModalItem(Struct, frozen=True):
    """An image, sound or video of a prompt: the engine's identifier, and the tokens that stand for it."""

    identifier: str
    offset: int
    length: int


class TokenPrompt(Struct, frozen=True):
    """One prompt as the engine computes it, with all that separates its cache from others'.

    `token_ids` is an `array("I")` that is shared: never change it. `model` is the base model's name as engines serve
    it, `lora` an adapter's name or None. `reads_cache` is False where the engine computes every token anew, as vLLM
    does when prompt log probabilities are asked for.
    """

    token_ids: array[int]
    model: str
    lora: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultiModalItem, ...] = ()
    reads_cache: bool = True


class Served(Struct, frozen=True):
    """A model as engines know it: the base model's name, and an adapter's or None."""

    model: str
    lora: str | None = None


class ModelNames(Struct, frozen=True):
    """What clients' model names mean to the engines.

    `base` are the names under which engines serve the base model, the first being the one to use. `aliases` map
    clients' names to engines' names. Any other name is an adapter's, as it is for vLLM; "base:adapter", as SGLang
    has it, is understood too. Without `base`, every name is a base model's.
    """

    base: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}

    def resolve(self, model: str) -> Served:
        """Return what engines call `model`; an empty name is the base model."""
        name = self.aliases.get(model, model)
        if not self.base:
            return Served(name)
        if not name or name in self.base:
            return Served(self.base[0])
        prefix, colon, adapter = name.partition(":")
        return Served(self.base[0], adapter if colon and adapter and prefix in self.base else name)


class EngineRequest(Struct, frozen=True):
    """A request body that could be sent to an engine, with its fields as they were sent.

    `prompts` are the texts and token ids of a completion request, at most `MAX_PROMPTS`; a conversation has none.
    """

    api: Api
    model: str
    fields: Mapping[str, Raw]
    prompts: tuple[str | array[int], ...] = ()
    cache_salt: str | None = None
    reads_cache: bool = True

    def field(self, name: str) -> Any:
        """Return the decoded value of a field, None when it is missing. Raises UnsupportedRequestError."""
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise UnsupportedRequestError(f"{name} cannot be decoded: {str(error)[:100]}") from None

    def digest(self) -> bytes:
        """Return 32 bytes that are equal only for requests that become the same tokens for the same model."""
        hasher = sha256(self.api.encode())
        # How much is cut off a prompt may depend on the room that its answer needs.
        without_effect = frozenset() if "truncate_prompt_tokens" in self.fields else _WITHOUT_EFFECT
        for name in sorted(self.fields.keys() - without_effect - {"model"}):
            key, value = name.encode(), self.fields[name]
            hasher.update(b"%d %d " % (len(key), memoryview(value).nbytes))
            hasher.update(key)
            hasher.update(value)
        return hasher.digest()


def read_engine_request(path: str, body: bytes) -> EngineRequest | Unused:
    """Read a complete request body; never raises, and says why a body cannot be used.

    `path` is the request path, by whose end the API is known; with an empty path the API is told from the fields.
    A body with a list `token_ids` is that prompt, whatever its path.
    """
    if not body:
        return Unused.NO_BODY
    if too_complex(body):
        return Unused.TOO_COMPLEX
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except msgspec.ValidationError:
        return Unused.NOT_AN_OBJECT
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Unused.INVALID_JSON
    api = _api(path.partition("?")[0].rstrip("/"), fields)
    if api is None:
        return Unused.UNKNOWN_PATH
    try:
        return _read(api, fields)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError, OverflowError):
        return Unused.WRONG_TYPE


def _api(path: str, fields: Mapping[str, Raw]) -> Api | None:
    if "token_ids" in fields:
        return Api.COMPLETIONS
    if path:
        return next((api for api in Api if path.endswith(api)), None)
    for name, api in (("prompt", Api.COMPLETIONS), ("messages", Api.CHAT), ("input", Api.RESPONSES)):
        if name in fields:
            return Api.MESSAGES if api is Api.CHAT and "system" in fields else api
    return None


class _Settings(Struct, gc=False):
    model: str | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    logprobs: int | bool | None = None
    top_logprobs: int | None = None


def _read(api: Api, fields: dict[str, Raw]) -> EngineRequest | Unused:
    settings = msgspec.convert(
        {name: msgspec.json.decode(fields[name]) for name in _Settings.__struct_fields__ if name in fields}, _Settings
    )
    prompts: tuple[str | array[int], ...] = ()
    if api is Api.COMPLETIONS:
        if "token_ids" in fields:
            prompts = (array("I", msgspec.json.decode(fields["token_ids"])),)
        else:
            prompts = _prompts(msgspec.json.decode(fields["prompt"]) if "prompt" in fields else None)
        if not all(prompts) or not prompts:
            return Unused.EMPTY
    elif _is_empty(fields.get("input" if api is Api.RESPONSES else "messages")):
        return Unused.EMPTY
    return EngineRequest(
        api=api,
        model=(settings.model or "")[:MAX_MODEL_LENGTH],
        fields=fields,
        prompts=prompts,
        cache_salt=settings.cache_salt or None,
        reads_cache=_prompt_logprobs(api, settings) is None,
    )


def _is_empty(raw: Raw | None) -> bool:
    return raw is None or (memoryview(raw).nbytes < 16 and not msgspec.json.decode(raw))


def _prompt_logprobs(api: Api, settings: _Settings) -> int | None:
    """The log probabilities per prompt token; echoing a prompt asks for as many as are asked for the answer."""
    if settings.prompt_logprobs is None and settings.echo:
        return (settings.top_logprobs or 0) if api is Api.CHAT else settings.logprobs
    return settings.prompt_logprobs


def _prompts(prompt: Any) -> tuple[str | array[int], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list):
        raise TypeError("prompt is neither text nor a list")
    if prompt and isinstance(prompt[0], int):
        return (array("I", prompt),)
    return tuple(each if isinstance(each, str) else array("I", each) for each in prompt[:MAX_PROMPTS])
