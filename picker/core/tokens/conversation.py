"""A chat as its template sees it: the engine's own reading of a request, not the client's.

vLLM turns every body into messages with a role, a content and little else before its template sees them; what it does
is followed here to the letter, for text. What cannot be followed exactly raises `UnsupportedRequestError`, and another
way of tokenizing is asked. Not followed: media (its tokens depend on a processor), request templates, and truncation;
of the Responses API everything but plain messages; of Anthropic's API, tools and images, which releases convert
differently. `response_format` is no variable of any template that vLLM renders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from picker.core.prompts.complexity import too_complex
from picker.core.tokens.prompt import Api, EngineRequest, UnsupportedRequestError

Message = dict[str, Any]

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_RESERVED = frozenset({"chat_template", "tokenize", "messages", "conversation", "tools", "documents"})
_ATTRIBUTION = "x-anthropic-billing-header"


class ContentFormat(StrEnum):
    """What a template expects as a message's content: one text, or a list of parts."""

    STRING = "string"
    OPENAI = "openai"


class Chat(Struct, frozen=True):
    """A conversation with all that its template may see. `variables` are the request's own, by name."""

    messages: list[Message]
    tools: list[Any] | None = None
    tool_choice: Any = None
    documents: list[Any] | None = None
    variables: Mapping[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


def read_chat(request: EngineRequest) -> Chat:
    """Return the chat that an engine makes of a request. Raises UnsupportedRequestError."""
    for name in ("chat_template", "truncate_prompt_tokens", "prompt_embeds"):
        if request.field(name) is not None:
            raise UnsupportedRequestError(f"{name} is set")
    if request.api is Api.RESPONSES:
        return Chat(_responses(request), variables=_variables(request))
    if request.api is Api.MESSAGES:
        return Chat(_anthropic(request), variables=_variables(request))
    messages, tools = request.field("messages"), _list(request, "tools")
    if not isinstance(messages, list):
        raise UnsupportedRequestError("messages is no list")
    generation, final = _flag(request, "add_generation_prompt", True), _flag(request, "continue_final_message", False)
    if generation and final:
        raise UnsupportedRequestError("continue_final_message needs add_generation_prompt false")
    variables = _variables(request)
    if (effort := request.field("reasoning_effort")) is not None:
        variables["reasoning_effort"] = effort
    return Chat(
        messages=messages,
        tools=None if tools is None else [_tool(tool) for tool in tools],
        tool_choice=request.field("tool_choice"),
        documents=_list(request, "documents"),
        variables=variables,
        add_generation_prompt=generation,
        continue_final_message=final,
        add_special_tokens=_flag(request, "add_special_tokens", False),
    )


def conversation(messages: Iterable[Any], content_format: ContentFormat) -> list[Message]:
    """Return the messages as the engine hands them to a template. Raises UnsupportedRequestError."""
    return [_message(message, content_format) for message in messages]


def require_text(messages: Iterable[Any]) -> None:
    """Raise UnsupportedRequestError if a message has anything but text."""
    for message in messages:
        if not isinstance(message, dict):
            raise UnsupportedRequestError("a message is no object")
        if isinstance(content := message.get("content"), list):
            for part in content:
                _part(part)


def _message(message: Any, content_format: ContentFormat) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnsupportedRequestError("a message is no object with a role")
    role, content = message["role"], message.get("content")
    out: Message = {"role": role, "content": _content(content, content_format)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [_tool_call(call) for call in calls]
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning is not None:
            out["reasoning"] = out["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    if isinstance(name := message.get("name"), str):
        out["name"] = name
    return out


def _content(content: Any, content_format: ContentFormat) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content if content_format is ContentFormat.STRING else [{"type": "text", "text": content}]
    if content is None:
        content = []
    if not isinstance(content, list):
        raise UnsupportedRequestError("a content is neither text nor a list")
    texts = [text for part in content if (text := _part(part)) is not None]
    if content_format is ContentFormat.STRING:
        return "\n".join(filter(None, texts))
    return [{"type": "text", "text": text} for text in texts]


def _part(part: Any) -> str | None:
    """The text of a part, None when it says that there is none."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXTS:
        raise UnsupportedRequestError(f"a content part is of type {kind!r}")
    text = part.get(_TEXTS[kind])
    if text is not None and not isinstance(text, str):
        raise UnsupportedRequestError(f"a content part of type {kind!r} has no text")
    return text


def _tool_call(call: Any) -> Any:
    """A call with its arguments as an object: clients send them as JSON in a string, templates want them parsed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise UnsupportedRequestError("a tool call has no function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        if too_complex(arguments.encode()):
            raise UnsupportedRequestError("the arguments of a tool call have too many parts")
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise UnsupportedRequestError("the arguments of a tool call are no JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as vLLM writes it out again: known keys first and in its order, null where they were missing."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnsupportedRequestError("a tool has no function with a name")
    known = {"name": None, "description": None, "parameters": None}
    ordered: dict[str, Any] = {"type": "function", "function": function}
    ordered.update(tool, function=known | function)
    return ordered


def _variables(request: EngineRequest) -> dict[str, Any]:
    variables = request.field("chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, dict) or not _RESERVED.isdisjoint(variables):
        raise UnsupportedRequestError("chat_template_kwargs is no object, or has a name that is not for requests")
    return variables


def _list(request: EngineRequest, name: str) -> list[Any] | None:
    value = request.field(name)
    if value is not None and not isinstance(value, list):
        raise UnsupportedRequestError(f"{name} is no list")
    return value


def _flag(request: EngineRequest, name: str, default: bool) -> bool:
    value = request.field(name)
    return default if value is None else bool(value)


def _responses(request: EngineRequest) -> list[Message]:
    for name in ("tools", "previous_response_id", "previous_input_messages", "reasoning", "prompt"):
        if request.field(name):
            raise UnsupportedRequestError(f"a Responses request has {name}")
    items, instructions = request.field("input"), request.field("instructions")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items if isinstance(items, list) else [items]:
        if not isinstance(item, dict) or item.get("type", "message") != "message" or "role" not in item:
            raise UnsupportedRequestError("an input item is no message")
        messages.append({"role": item["role"], "content": item.get("content")})
    return messages


def _anthropic(request: EngineRequest) -> list[Message]:
    for name in ("tools", "output_config", "thinking"):
        if request.field(name):
            raise UnsupportedRequestError(f"an Anthropic request has {name}")
    system, messages = request.field("system"), request.field("messages")
    out: list[Message] = []
    if text := system if isinstance(system, str) else "".join(_anthropic_texts(system)):
        out.append({"role": "system", "content": text})
    for message in messages if isinstance(messages, list) else [messages]:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("user", "assistant"):
            raise UnsupportedRequestError(f"an Anthropic message has role {role!r}")
        if not isinstance(content, str):
            texts = _anthropic_texts(content)
            content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
        if content or isinstance(content, str):
            out.append({"role": role, "content": content})
        elif role == "assistant":
            out.append({"role": role})
    return out


def _anthropic_texts(blocks: Any) -> list[str]:
    """The texts of text blocks that are not empty."""
    texts = []
    for block in blocks or ():
        if not isinstance(block, dict) or block.get("type") != "text":
            raise UnsupportedRequestError("an Anthropic block is no text")
        text = block.get("text")
        if not isinstance(text, str) or text.startswith(_ATTRIBUTION):
            raise UnsupportedRequestError("an Anthropic text is missing, or is a header that only some releases drop")
        if text:
            texts.append(text)
    return texts
