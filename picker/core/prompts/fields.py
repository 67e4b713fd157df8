"""What is read out of a request body: its fields, and the prompt that they make."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from msgspec import Raw, Struct


class Unused(StrEnum):
    """Why a request is routed without looking at its prompt; the label of a counter."""

    NO_BODY = "no_body"
    BODY_MODE_STREAMED = "body_mode_streamed"
    BODY_TRUNCATED = "body_truncated"
    CONTENT_ENCODING = "content_encoding"
    INVALID_JSON = "invalid_json"
    NOT_AN_OBJECT = "not_an_object"
    TOO_COMPLEX = "too_complex"
    """So many small parts that building them would hold up other requests."""
    UNKNOWN_PATH = "unknown_path"
    WRONG_TYPE = "wrong_type"
    EMPTY = "empty_prompt"
    FAILED = "failed"
    """Reading it, or scoring with it, raised an unexpected error."""


ABSENT: Final = Raw(b"")
"""The value of a field that is not decoded when it is missing."""


class Fields(Struct, gc=False):
    """What of a body an engine could make a prompt of, and what ties the prompt to others.

    Every value is the client's: any JSON there is. Fields that few readers want are not decoded, and empty when missing.
    """

    model: Any = None
    prompt: Any = None
    messages: Any = None
    system: Any = None
    input: Any = None
    instructions: Any = None
    stream: Any = None
    tools: Raw = ABSENT
    functions: Raw = ABSENT
    response_format: Raw = ABSENT
    text: Raw = ABSENT
    output_format: Raw = ABSENT
    output_config: Raw = ABSENT
    documents: Raw = ABSENT
    chat_template: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    reasoning: Raw = ABSENT
    reasoning_effort: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    cache_salt: Raw = ABSENT
    prompt_logprobs: Raw = ABSENT
    echo: Raw = ABSENT
    session_id: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    conversation: Raw = ABSENT
    previous_response_id: Raw = ABSENT


class Prompt(Struct, frozen=True):
    """What a decision may know about a request's prompt.

    `texts` holds one rendered prompt for each prompt of the request (several only for batch completions), as the
    bytes that prefixes are matched on. It is empty exactly when `unused` says why. `fields` is what the texts were made
    of, for whoever needs more than text; None when the body could not be read. `headers` are the request's.
    """

    model: str = ""
    texts: tuple[bytes, ...] = ()
    unused: Unused | None = None
    stream: bool = False
    fields: Fields | None = None
    headers: Mapping[str, bytes] = {}


class Head(Struct, gc=False):
    """What is decoded of a body that is too complex: nothing that could have parts."""

    model: str | None = None
    stream: bool | None = None
