"""What an engine said at the end of a request about the tokens that it took."""

from __future__ import annotations

from msgspec import Struct


class Usage(Struct, frozen=True, gc=False):
    """One response's usage; None where the engine did not say.

    `prompt_tokens` counts the whole prompt, the cached part of it included, whatever the API calls it;
    `cached_tokens` is what the engine took from its cache. `reply` is the text of the first choice in UTF-8, b"" when it
    was not kept, was too long, or is not all that the engine produced (tool calls, reasoning, a refusal). `model` is the
    name that the engine gave to what answered, "" when it gave none.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reply: bytes = b""
    model: str = ""
