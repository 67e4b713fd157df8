"""Token counts in responses of all APIs, merged over the events of one response.

Shapes: OpenAI completions and chat (`prompt_tokens`, `prompt_tokens_details.cached_tokens`; `usage` may be null, stand in
every chunk, or only in the last), Responses (`response.usage.input_tokens` with `input_tokens_details`), Anthropic
Messages (`message_start` and `message_delta`; `input_tokens` is what neither came from the cache nor went there), and
SGLang's own `meta_info`. Engines leave `cached_tokens` out, or the details null, where they do not tell or tell 0.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from picker.core.usage.documents import Document

MAX_MODEL_LENGTH: Final = 512
"""Longer model names are cut."""

Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class _Details(Struct, gc=False):
    cached_tokens: Count | None = None


class _Counts(Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Inner(Struct, gc=False):
    model: str | None = None
    usage: _Counts | None = None


class _Outer(Struct, gc=False):
    model: str | None = None
    usage: _Counts | None = None
    meta_info: _Counts | None = None
    response: _Inner | None = None
    message: _Inner | None = None


_decode = msgspec.json.Decoder(_Outer).decode
_read_any = json.JSONDecoder().raw_decode
# A quote within a JSON string has a backslash before it, so that this is a key wherever it stands.
_KEY: Final = re.compile(rb'(?<!\\)"(?:usage|meta_info)"\s*:\s*(?=\{)')


class Tally:
    """The newest counts of one response."""

    __slots__ = ("_newest", "model")

    def __init__(self) -> None:
        self.model = ""
        self._newest = _Counts()

    def add(self, document: Document) -> None:
        """Take over what a document says. Raises ValueError, which msgspec's errors are, or RecursionError."""
        if document.cut:
            self._merge(_at_the_end(document.data))
            return
        outer = _decode(document.data)
        inner = outer.response or outer.message
        self._merge(outer.usage or outer.meta_info or (inner.usage if inner else None))
        model = outer.model or (inner.model if inner else None)
        if model:
            self.model = model[:MAX_MODEL_LENGTH]

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the whole prompt."""
        newest = self._newest
        if newest.prompt_tokens is not None:
            return newest.prompt_tokens
        if newest.input_tokens is None or newest.input_tokens_details is not None:
            return newest.input_tokens
        return newest.input_tokens + (newest.cache_read_input_tokens or 0) + (newest.cache_creation_input_tokens or 0)

    @property
    def cached_tokens(self) -> int | None:
        """Those of them that came from the cache."""
        newest = self._newest
        details = newest.prompt_tokens_details or newest.input_tokens_details
        if details is not None and details.cached_tokens is not None:
            return details.cached_tokens
        return newest.cached_tokens if newest.cached_tokens is not None else newest.cache_read_input_tokens

    @property
    def completion_tokens(self) -> int | None:
        newest = self._newest
        return newest.output_tokens if newest.completion_tokens is None else newest.completion_tokens

    def _merge(self, counts: _Counts | None) -> None:
        if counts is None:
            return
        for name in _Counts.__struct_fields__:
            value = getattr(counts, name)
            if value is not None:
                setattr(self._newest, name, value)


def _at_the_end(data: bytes) -> _Counts | None:
    """The last counts in the end of a document, or None."""
    at = -1
    for found in _KEY.finditer(data):
        at = found.end()
    if at < 0:
        return None
    value, _ = _read_any(data[at:].decode(errors="replace"))
    return msgspec.convert(value, _Counts)
