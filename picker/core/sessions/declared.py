"""Ids by which clients say that requests belong together: headers of sessions and agents, and fields of bodies.

An id is only a name for content that was seen with it; it never stands for other content. A response that is named is
more: its engine itself puts what it remembers of it before the request, so it stands for that. Sources: the headers that
llm-d's router and coding agents use, vLLM's `session_id`, OpenAI's `prompt_cache_key`, `conversation` and
`previous_response_id`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_64_intdigest

from picker.core.prompts.fields import ABSENT, Prompt

SESSION_HEADERS: Final = (
    "x-session-id",
    "session-id",
    "session_id",
    "x-claude-code-session-id",
    "x-session-affinity",
)
MAX_ID_BYTES: Final = 1024
"""A longer id is none."""


class Declared(Struct, frozen=True):
    """What a request says of itself. `ids` name its session, `stored` the turns that its engine is to put before it.

    `by_response`: they are what the engine remembers of a response.
    """

    ids: tuple[int, ...] = ()
    stored: int | None = None
    by_response: bool = False


_NOTHING = Declared()
_NONE: Final = (ABSENT, Raw(b"null"))


def declared(prompt: Prompt, headers: Iterable[str] = SESSION_HEADERS) -> Declared:
    """Read the ids of a request; `headers` are names in lower case."""
    ids: list[int] = []
    stored: int | None = None
    response: int | None = None
    sent: Mapping[str, bytes] = prompt.headers
    if sent:
        for name in headers:
            value = sent.get(name)
            if value and len(value) <= MAX_ID_BYTES:
                ids.append(_key("session", value))
    if (fields := prompt.fields) is not None:
        for kind, raw in (("session", fields.session_id), ("cache_key", fields.prompt_cache_key)):
            if raw is not ABSENT and (key := _of_body(kind, raw)) is not None:
                ids.append(key)
        if fields.conversation is not ABSENT and (stored := _of_body("conversation", fields.conversation)) is not None:
            ids.append(stored)
        if fields.previous_response_id is not ABSENT:
            response = _of_body("response", fields.previous_response_id)
    if response is not None:
        return Declared(tuple(ids), response, by_response=True)
    return Declared(tuple(ids), stored) if ids or stored is not None else _NOTHING


def goes_on_from_memory(prompt: Prompt) -> bool:
    """Whether the engine puts turns before it that its text does not have."""
    fields = prompt.fields
    if fields is None or (fields.conversation is ABSENT and fields.previous_response_id is ABSENT):
        return False
    return fields.conversation not in _NONE or fields.previous_response_id not in _NONE


def response_key(response_id: str) -> int:
    """The key that a later request names a response by."""
    return _key("response", response_id.encode())


def _of_body(kind: str, raw: Raw) -> int | None:
    """The key of a text, or of the `id` of an object; other values are no ids."""
    if memoryview(raw).nbytes > 2 * MAX_ID_BYTES:
        return None
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if isinstance(value, dict):
        value = value.get("id")
    if not isinstance(value, str) or not value:
        return None
    return _key(kind, value.encode())


def _key(kind: str, value: bytes) -> int:
    return xxh3_64_intdigest(b"%b %b" % (kind.encode(), value))
