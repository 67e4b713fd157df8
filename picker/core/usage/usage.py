"""What an engine said at the end of a request about the tokens that it took, and why less of it is known than said."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Usage(Struct, frozen=True, gc=False):
    """One response's usage; None where the engine did not say.

    `prompt_tokens` counts the whole prompt, the cached part of it included, whatever the API calls it;
    `cached_tokens` is what the engine took from its cache. `reply` is the text of the first choice in UTF-8, b"" when it
    was not kept, was too long, or is not all that the engine produced (tool calls, reasoning, a refusal, an answer that
    broke off). `model` is the name that the engine gave to what answered, "" when it gave none. `response_id` is what a
    later request of the Responses API may name as `previous_response_id`, "" where there is no such name or the answer did
    not come to its end.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reply: bytes = b""
    model: str = ""
    response_id: str = ""


class Drop(StrEnum):
    """Why something of a response was not used; the label of a counter."""

    CONTENT_TYPE = "content_type"
    """Neither JSON nor server-sent events."""
    CONTENT_ENCODING = "content_encoding"
    """A content coding other than gzip, deflate, br and zstd, or several."""
    CORRUPT_ENCODING = "corrupt_encoding"
    EXPANDS_TOO_MUCH = "expands_too_much"
    """Decompressed, it is out of all proportion."""
    TOO_MANY_LINES = "too_many_lines"
    """Of so many lines, events have hardly anything in them."""
    INVALID_JSON = "invalid_json"
    WRONG_TYPE = "wrong_type"
    """A count or a text is not of the type that the API defines, or more tokens were cached than there were."""
    DOCUMENT_TOO_LONG = "document_too_long"
    """Of a JSON body, or one event, only the end was looked at."""
    REPLY_TOO_LONG = "reply_too_long"
    REPLY_NOT_TEXT = "reply_not_text"
    """Tool calls, reasoning, a refusal or several parts: what the next turn will hold cannot be told."""
    REPLY_BROKE_OFF = "reply_broke_off"
    RESPONSE_ID = "response_id"
    """A response's own id is no text, or longer than ids are."""
