"""Read the prompt out of a request body, whatever API it belongs to.

Nothing here raises: a body that cannot be used gives a `Prompt` without texts that says why, and the request is
routed by load. Only the fields that matter are decoded; the rest of the body is skipped, never built. What is built
is bounded in bytes by the exchange and in number here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from picker.core.prompts.complexity import too_complex
from picker.core.prompts.fields import Fields, Head, Prompt, Unused
from picker.core.prompts.render import chat_text, responses_text

MAX_PROMPTS = 16
"""Prompts of one batch request that are looked at; engines run a batch's prompts one by one."""

MAX_MODEL_LENGTH = 512
"""Longer model names are cut: they are labels and hash seeds here, the engine sees the original."""


_decode = msgspec.json.Decoder(Fields).decode
_decode_head = msgspec.json.Decoder(Head).decode


def _completions(body: Fields) -> tuple[bytes, ...] | None:
    prompt = body.prompt
    if isinstance(prompt, str):
        return (prompt.encode(),)
    if not isinstance(prompt, list) or not prompt:
        return None
    if isinstance(prompt[0], int):
        return _tokens([prompt])
    if isinstance(prompt[0], list):
        return _tokens(prompt[:MAX_PROMPTS])
    texts = prompt[:MAX_PROMPTS]
    return tuple(text.encode() for text in texts) if all(isinstance(text, str) for text in texts) else None


def _tokens(prompts: list[Any]) -> tuple[bytes, ...] | None:
    """Token ids as four bytes each, so that sixteen tokens fill a default block. None: not token ids."""
    if not all(isinstance(tokens, list) for tokens in prompts):
        return None
    try:
        return tuple(array("I", tokens).tobytes() for tokens in prompts)
    except (TypeError, OverflowError):
        return None


def _chat(body: Fields) -> tuple[bytes, ...] | None:
    if not isinstance(body.messages, list):
        return None
    return (chat_text(body.messages, body.system).encode(),)


def _responses(body: Fields) -> tuple[bytes, ...] | None:
    if not isinstance(body.input, str | list) and body.input is not None:
        return None
    return (responses_text(body.input, body.instructions).encode(),)


_READERS: tuple[tuple[str, Callable[[Fields], tuple[bytes, ...] | None]], ...] = (
    ("/chat/completions", _chat),
    ("/completions", _completions),
    ("/responses", _responses),
    ("/messages", _chat),
)


def parse(path: str, body: bytes, *, content_encoding: bytes = b"", headers: Mapping[str, bytes] = {}) -> Prompt:
    """Read the prompt of a complete request body.

    `path` is the request path; a query string is ignored and a prefix before the API's own path is allowed.
    Rules: seed "Building the prompt string". Duplicate keys: the last counts, as in the engines' own parsers.
    """
    if not body:
        return Prompt(unused=Unused.NO_BODY, headers=headers)
    if content_encoding and content_encoding.lower() != b"identity":
        return Prompt(unused=Unused.CONTENT_ENCODING, headers=headers)
    if too_complex(body):
        return _without_parts(body, headers)
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        # A number out of range is refused like a value of another type, wherever it stands.
        other = isinstance(error, msgspec.ValidationError) and not body.lstrip().startswith(b"{")
        return Prompt(unused=Unused.NOT_AN_OBJECT if other else Unused.INVALID_JSON, headers=headers)
    model = fields.model[:MAX_MODEL_LENGTH] if isinstance(fields.model, str) else ""
    stream = fields.stream is True
    read = _reader(path)
    texts = read(fields) if read is not None else None
    if texts is None:
        unused = Unused.UNKNOWN_PATH if read is None else Unused.WRONG_TYPE
        return Prompt(model, unused=unused, stream=stream, headers=headers)
    texts = tuple(filter(None, texts))
    return Prompt(model, texts, None if texts else Unused.EMPTY, stream, fields, headers)


def _without_parts(body: bytes, headers: Mapping[str, bytes]) -> Prompt:
    try:
        head = _decode_head(body)
    except msgspec.ValidationError:
        return Prompt(unused=Unused.TOO_COMPLEX, headers=headers)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Prompt(unused=Unused.INVALID_JSON, headers=headers)
    model, stream = (head.model or "")[:MAX_MODEL_LENGTH], head.stream is True
    return Prompt(model, unused=Unused.TOO_COMPLEX, stream=stream, headers=headers)


@lru_cache(maxsize=256)
def _reader(path: str) -> Callable[[Fields], tuple[bytes, ...] | None] | None:
    path = path.partition("?")[0].rstrip("/")
    return next((read for suffix, read in _READERS if path.endswith(suffix)), None)
