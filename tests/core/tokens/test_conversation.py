"""What a template sees of a request, after the facts of vLLM's own reading of chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picker.core.tokens.conversation import Chat, ContentFormat, conversation, read_chat
from picker.core.tokens.prompt import EngineRequest, UnsupportedRequestError, read_engine_request


def chat(path: str = "/v1/chat/completions", **body: Any) -> Chat:
    request = read_engine_request(path, json.dumps(body).encode())
    assert isinstance(request, EngineRequest), request
    return read_chat(request)


def seen(message: dict[str, Any], form: ContentFormat = ContentFormat.STRING) -> dict[str, Any]:
    return conversation([message], form)[0]


TEXTS = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": ""}, {"type": "refusal", "refusal": "no"}]


@pytest.mark.parametrize(
    ("content", "string", "openai"),
    [
        ("hi", "hi", [{"type": "text", "text": "hi"}]),
        ("", "", [{"type": "text", "text": ""}]),
        (None, "", []),
        ([], "", []),
        (TEXTS, "a\nb\nno", [{"type": "text", "text": text} for text in ("a", "b", "", "no")]),
        ([{"type": "text", "text": None}], "", []),
    ],
)
def test_content_is_one_text_or_a_list_of_parts(content: Any, string: str, openai: Any) -> None:
    message = {"role": "user", "content": content}
    assert seen(message) == {"role": "user", "content": string}
    assert seen(message, ContentFormat.OPENAI) == {"role": "user", "content": openai}


def test_a_message_keeps_what_templates_may_use_and_loses_the_rest() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assistant = {"role": "assistant", "tool_calls": [call], "reasoning": "r", "audio": None, "refusal": None}
    parsed = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert seen(assistant) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [parsed],
        "reasoning": "r",
        "reasoning_content": "r",
    }
    assert seen({"role": "assistant", "content": "x", "tool_calls": []}) == {"role": "assistant", "content": "x"}
    assert seen({"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"}) == {
        "role": "tool",
        "content": "x",
        "tool_call_id": "1",
        "name": "f",
    }
    assert seen({"role": "user", "content": "x", "tool_call_id": "1", "tool_calls": [call]}).keys() == {
        "role",
        "content",
    }


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_calls_without_arguments_have_an_empty_object(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert seen(message)["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "message",
    [
        7,
        {"content": "no role"},
        {"role": "user", "content": 7},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": [{"text": "no type"}]},
        {"role": "user", "content": [{"type": "text", "text": 7}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [7]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
    ],
)
def test_messages_that_cannot_be_read_exactly_are_left_to_others(message: Any) -> None:
    with pytest.raises(UnsupportedRequestError):
        seen(message)


def test_tools_are_written_as_the_engine_writes_them() -> None:
    tool = {"function": {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    tools = chat(messages=[{"role": "user", "content": "x"}], tools=[tool]).tools
    assert json.dumps(tools) == (
        '[{"type": "function", "function": {"name": "f", "description": null, '
        '"parameters": {"b": 1, "a": 2}, "strict": true}}]'
    )


def test_defaults_and_what_requests_may_set() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert chat(messages=messages) == Chat(messages)
    assert chat(
        messages=messages,
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        documents=[{"title": "t"}],
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    ) == Chat(
        messages,
        documents=[{"title": "t"}],
        variables={"enable_thinking": False, "reasoning_effort": "low"},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
    )


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template": "{{ messages }}"},
        {"truncate_prompt_tokens": 5},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": False}},
        {"chat_template_kwargs": 7},
        {"tools": {}},
        {"tools": [{"type": "function"}]},
        {"documents": "x"},
    ],
)
def test_requests_that_cannot_be_read_exactly_are_left_to_others(extra: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedRequestError):
        chat(messages=[{"role": "user", "content": "x"}], **extra)


def test_responses_are_chats_with_instructions_before_them() -> None:
    assert chat("/v1/responses", input="hi", instructions="be brief").messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    assert conversation(chat("/v1/responses", input=[item]).messages, ContentFormat.STRING) == [
        {"role": "user", "content": "hi"}
    ]
    for body in ({"previous_response_id": "r"}, {"tools": [{"type": "x"}]}, {"reasoning": {"effort": "low"}}):
        with pytest.raises(UnsupportedRequestError):
            chat("/v1/responses", input="hi", **body)
    with pytest.raises(UnsupportedRequestError):
        chat("/v1/responses", input=[{"type": "function_call_output", "output": "x"}])


def test_anthropic_texts_are_joined_as_the_engine_joins_them() -> None:
    text = {"type": "text", "text": "a"}
    read = chat(
        "/v1/messages",
        system=[text, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [text]},
            {"role": "user", "content": [text, text]},
            {"role": "user", "content": [{"type": "text", "text": ""}]},
        ],
    )
    assert read.messages == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [text, text]},
    ]
    for body in (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "f"}]},
        {"messages": [{"role": "system", "content": "q"}]},
        {
            "messages": [{"role": "user", "content": "q"}],
            "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}],
        },
    ):
        with pytest.raises(UnsupportedRequestError):
            chat("/v1/messages", **body)
