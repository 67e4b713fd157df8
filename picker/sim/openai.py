"""What clients send: the bodies of the four APIs and of /tokenize, checked and turned into a `Call`.

Only the fields that change what the engine computes are read; the rest is accepted and has no effect, as sampling has
none on a latency model. Every answer has exactly `max_tokens` tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec

from picker.sim.block_cache import UINT32
from picker.sim.tokenizer import decode, encode, render_chat

DEFAULT_MAX_TOKENS = 16

Turn = tuple[str, str]
"""Who says what."""


class ApiError(Exception):
    """A request that gets an error answer."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return the error of a body that the engine does not understand."""
    return ApiError(400, "BadRequestError", message, param)


class Call(msgspec.Struct, frozen=True):
    """One request of a client, whichever API it came by."""

    model: str | None
    prompts: tuple[array[int], ...]
    max_tokens: int
    stream: bool
    include_usage: bool = False
    """Streaming: end with a chunk that has the usage."""
    continuous_usage: bool = False
    """Streaming: put the usage in every chunk."""
    cache_salt: str | None = None
    read_cache: bool = True
    turns: tuple[Turn, ...] | None = None
    """What the answer goes on with, where it can be named later."""


Count = Annotated[int, msgspec.Meta(ge=1)]
NOTHING = msgspec.Raw(b"null")


class Part(msgspec.Struct, frozen=True):
    """A piece of a message. Only text and what tools said can be read by an engine without eyes."""

    type: str = "text"
    text: str | None = None
    content: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING


Content = str | list[str | Part] | None


class Message(msgspec.Struct, frozen=True):
    """One chat message."""

    role: str
    content: Content = None
    tool_calls: msgspec.Raw = NOTHING


class Item(msgspec.Struct, frozen=True):
    """One input item of the Responses API: a message, or a tool call or its result."""

    type: str = "message"
    role: str = "user"
    content: Content = None
    arguments: str = ""
    output: str = ""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Generating(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both OpenAI bodies have."""

    model: str | None = None
    max_tokens: Count | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Count | None = 1
    cache_salt: str | None = None
    prompt_logprobs: int | None = None

    def call(self, prompts: Iterable[array[int]], max_tokens: int | None) -> Call:
        if (self.n or 1) > 1:
            raise bad_request(f"n is {self.n}: this engine gives one answer per prompt, leave it out", "n")
        options = self.stream_options or StreamOptions()
        return Call(
            model=self.model,
            prompts=tuple(prompts),
            max_tokens=max_tokens or DEFAULT_MAX_TOKENS,
            stream=bool(self.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            cache_salt=self.cache_salt or None,
            read_cache=self.prompt_logprobs is None,
        )


class CompletionBody(Generating, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]


class ChatBody(Generating, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Count | None = None
    tools: msgspec.Raw = NOTHING


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = False
    tools: msgspec.Raw = NOTHING
    cache_salt: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    max_tokens: Count
    messages: list[Message]
    system: Content = None
    stream: bool | None = False
    tools: msgspec.Raw = NOTHING


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: msgspec.Raw = NOTHING
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False


Body = TypeVar("Body", bound=msgspec.Struct)


def completion(data: bytes) -> Call:
    """Read the body of POST /v1/completions. Raises ApiError."""
    body = _decode(CompletionBody, data)
    return body.call(_prompts(body.prompt), body.max_tokens)


def chat(data: bytes) -> Call:
    """Read the body of POST /v1/chat/completions. Raises ApiError."""
    body = _decode(ChatBody, data)
    prompt = render_chat([*_tools(body.tools), *_chat(body.messages)])
    return body.call([prompt], body.max_completion_tokens or body.max_tokens)


def responses(data: bytes, earlier: Callable[[str | None], Sequence[Turn]]) -> Call:
    """Read the body of POST /v1/responses; `earlier` are the turns up to an answer that it names. Raises ApiError.

    Instructions are of one request only.
    """
    body = _decode(ResponsesBody, data)
    ahead = _tools(body.tools)
    if body.instructions:
        ahead.append(("system", body.instructions))
    turns = list(earlier(body.previous_response_id))
    if isinstance(body.input, str):
        turns.append(("user", body.input))
    else:
        turns += map(_item, body.input)
    return Call(
        body.model,
        (render_chat([*ahead, *turns]),),
        body.max_output_tokens or DEFAULT_MAX_TOKENS,
        bool(body.stream),
        cache_salt=body.cache_salt or None,
        turns=None if body.store is False else tuple(turns),
    )


def messages(data: bytes) -> Call:
    """Read the body of POST /v1/messages, Anthropic's API. Raises ApiError."""
    body = _decode(MessagesBody, data)
    system = [("system", _text(body.system))] if body.system else []
    prompt = render_chat([*_tools(body.tools), *system, *_chat(body.messages)])
    return Call(body.model, (prompt,), body.max_tokens, bool(body.stream))


def tokenize(data: bytes) -> tuple[str | None, array[int], list[str] | None]:
    """Read the body of POST /tokenize. Returns the model, the tokens, and their texts if they are wanted.

    Raises ApiError.
    """
    body = _decode(TokenizeBody, data)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request("continue_final_message needs add_generation_prompt false", "continue_final_message")
    if body.prompt is not None:
        tokens = encode(body.prompt)
    else:
        tokens = render_chat(
            [*_tools(body.tools), *_chat(body.messages or [])],
            add_generation_prompt=body.add_generation_prompt,
            open_end=body.continue_final_message,
        )
    return body.model, tokens, [decode([token]) for token in tokens] if body.return_token_strs else None


def _decode(body: type[Body], data: bytes) -> Body:
    try:
        return msgspec.json.decode(data, type=body)
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not what this API takes: {error}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is no JSON: {error}") from None


def _prompts(prompt: str | list[str | int | list[int]]) -> list[array[int]]:
    if isinstance(prompt, str):
        found = [encode(prompt)]
    elif prompt and isinstance(prompt[0], int):
        found = [_ids(prompt)]
    else:
        found = [encode(each) if isinstance(each, str) else _ids(each) for each in prompt]
    if not found or not all(found):
        raise bad_request("prompt is empty: give at least one token", "prompt")
    return found


def _ids(tokens: object) -> array[int]:
    try:
        return array(UINT32, tokens)  # type: ignore[call-overload, no-any-return]
    except (TypeError, OverflowError) as error:
        raise bad_request(f"prompt mixes types, or has a token id outside 0 .. 4294967295: {error}", "prompt") from None


def _tools(tools: msgspec.Raw) -> list[Turn]:
    text = _json(tools)
    return [] if text in ("null", "[]") else [("tools", text)]


def _chat(messages: list[Message]) -> list[Turn]:
    if not messages:
        raise bad_request("messages is empty: give at least one", "messages")
    calls = [_json(message.tool_calls) for message in messages]
    return [
        (message.role, _text(message.content) + ("" if call == "null" else call))
        for message, call in zip(messages, calls, strict=True)
    ]


def _item(item: Item) -> Turn:
    role = {"function_call": "assistant", "function_call_output": "tool"}.get(item.type, item.role)
    return role, _text(item.content) + item.arguments + item.output


def _text(content: Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part if isinstance(part, str) else _part(part) for part in content)


def _part(part: Part) -> str:
    if part.text is not None:
        return part.text
    match part.type:
        case "tool_result":
            return _json(part.content)
        case "tool_use":
            return _json(part.input)
    raise bad_request(f"a content part has type {part.type!r}: this engine reads text only", "messages")


def _json(raw: msgspec.Raw) -> str:
    return bytes(raw).decode("utf-8", "replace")
