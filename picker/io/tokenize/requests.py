"""What is sent to those who tokenize elsewhere, and what they answer.

`/tokenize` takes one text or one chat; its fields and defaults are vLLM's, and SGLang's are a part of them. A renderer
(`/v1/.../render` of vLLM, with `--enable-scale-out` or `vllm launch render`) takes a whole request body, and knows
what `/tokenize` does not: documents, media, truncation, and how the engine reads other APIs.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from msgspec import Raw, Struct

from picker.core.tokens.conversation import read_chat, require_text
from picker.core.tokens.prompt import Api, EngineRequest, MultiModalItem, UnsupportedRequestError
from picker.io.tokenize.step import Tokens

_CHAT_FIELDS = ("tools", "add_generation_prompt", "continue_final_message")
_MAX_ITEMS = 10_000


class ReplyError(ValueError):
    """An answer that cannot be what was asked for."""


class _Tokenized(Struct):
    tokens: list[int]
    count: int | None = None


class _Placeholder(Struct):
    offset: int
    length: int


class _Features(Struct):
    mm_hashes: dict[str, list[str | None]] | None = None
    mm_placeholders: dict[str, list[_Placeholder]] | None = None


class _Rendered(Struct):
    token_ids: list[int]
    features: _Features | None = None


_read_tokenized = msgspec.json.Decoder(_Tokenized).decode
_read_rendered = msgspec.json.Decoder(_Rendered | list[_Rendered]).decode


def tokenize_bodies(request: EngineRequest, model: str) -> list[bytes]:
    """Return the bodies for `/tokenize`, one for each text, or one for the chat. Raises UnsupportedRequestError."""
    if request.prompts:
        for name in ("truncate_prompt_tokens", "prompt_embeds"):
            if request.field(name) is not None:
                raise UnsupportedRequestError(f"/tokenize does not know {name}")
        special = request.field("add_special_tokens") is not False
        return [
            msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": special})
            for text in request.prompts
            if isinstance(text, str)
        ]
    chat = read_chat(request)
    if chat.documents is not None:
        raise UnsupportedRequestError("/tokenize does not know documents")
    require_text(chat.messages)
    body: dict[str, Any] = {"model": model, "add_special_tokens": chat.add_special_tokens}
    if request.api is Api.CHAT:
        body["messages"] = request.fields["messages"]
        body |= {name: request.fields[name] for name in _CHAT_FIELDS if name in request.fields}
    else:
        body["messages"] = chat.messages
    if chat.variables:
        body["chat_template_kwargs"] = chat.variables
    return [msgspec.json.encode(body)]


def read_tokenized(reply: bytes) -> Tokens:
    """Read the answer of `/tokenize`. Raises ReplyError."""
    try:
        answer = _read_tokenized(reply)
        if answer.count not in (None, len(answer.tokens)):
            raise ReplyError(f"{len(answer.tokens)} tokens, but count is {answer.count}")
        return Tokens(_ids(answer.tokens))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise ReplyError(str(error)) from error


def render_body(request: EngineRequest, model: str) -> bytes:
    """Return the body for a renderer: the request as it came, but for the model's name."""
    return msgspec.json.encode(dict(request.fields) | {"model": Raw(msgspec.json.encode(model))})


def read_rendered(reply: bytes, request: EngineRequest) -> list[Tokens]:
    """Read the answer of a renderer: one object, or a list with one for each prompt. Raises ReplyError."""
    try:
        answer = _read_rendered(reply)
        found = answer if isinstance(answer, list) else [answer]
        wanted = len(request.prompts) or 1
        if len(found) < wanted:
            raise ReplyError(f"{len(found)} prompts, but {wanted} were sent")
        pairs = zip(request.prompts or ("",), found, strict=False)
        return [Tokens(_ids(each.token_ids), _items(each)) for prompt, each in pairs if isinstance(prompt, str)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise ReplyError(str(error)) from error


def _ids(tokens: list[int]) -> array[int]:
    if not tokens:
        raise ReplyError("no tokens")
    return array("I", tokens)


def _items(rendered: _Rendered) -> tuple[MultiModalItem, ...]:
    """The media of a prompt in its order. Raises ReplyError: tokens of media without identifiers would match others'."""
    features = rendered.features
    if features is None:
        return ()
    items = []
    for modality, places in (features.mm_placeholders or {}).items():
        hashes = (features.mm_hashes or {}).get(modality, [])
        if len(hashes) != len(places) or None in hashes or len(places) > _MAX_ITEMS:
            raise ReplyError(f"{len(places)} places for {modality}, but {len(hashes)} identifiers")
        items += [
            MultiModalItem(name, place.offset, place.length)
            for name, place in zip(hashes, places, strict=True)
            if name is not None
        ]
    return tuple(sorted(items, key=lambda item: item.offset))
