"""Bodies and answers of /tokenize and of renderers, after the shapes measured on vLLM."""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.tokens.prompt import EngineRequest, MultiModalItem, UnsupportedRequestError, read_engine_request
from picker.io.tokenize.requests import ReplyError, read_rendered, read_tokenized, render_body, tokenize_bodies
from picker.io.tokenize.step import Tokens

USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"


def request(path: str = CHAT, **body: Any) -> EngineRequest:
    read = read_engine_request(path, json.dumps(body).encode())
    assert isinstance(read, EngineRequest), read
    return read


@pytest.mark.parametrize(
    ("asked", "bodies"),
    [
        (
            request("/v1/completions", prompt=["a", [7], "b"], model="x", max_tokens=3),
            [{"prompt": "a", "add_special_tokens": True}, {"prompt": "b", "add_special_tokens": True}],
        ),
        (
            request("/v1/completions", prompt="a", add_special_tokens=False),
            [{"prompt": "a", "add_special_tokens": False}],
        ),
        (request(messages=[USER], temperature=1), [{"messages": [USER], "add_special_tokens": False}]),
        (
            request(
                messages=[USER],
                tools=[{"type": "function", "function": {"name": "f"}}],
                add_generation_prompt=False,
                continue_final_message=True,
                chat_template_kwargs={"thinking": True},
                reasoning_effort="low",
            ),
            [
                {
                    "messages": [USER],
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                    "add_generation_prompt": False,
                    "continue_final_message": True,
                    "chat_template_kwargs": {"thinking": True, "reasoning_effort": "low"},
                    "add_special_tokens": False,
                }
            ],
        ),
        (
            request("/v1/responses", input="hi", instructions="be brief"),
            [{"messages": [{"role": "system", "content": "be brief"}, USER], "add_special_tokens": False}],
        ),
        (
            request("/v1/messages", messages=[USER], system="be brief", max_tokens=1),
            [{"messages": [{"role": "system", "content": "be brief"}, USER], "add_special_tokens": False}],
        ),
    ],
)
def test_tokenize_is_asked_for_what_the_engine_would_tokenize(asked: EngineRequest, bodies: list[Any]) -> None:
    assert [json.loads(body) for body in tokenize_bodies(asked, "tiny")] == [
        {"model": "tiny", **body} for body in bodies
    ]


@pytest.mark.parametrize(
    "asked",
    [
        request(messages=[USER], documents=[{"title": "t"}]),
        request(messages=[USER], truncate_prompt_tokens=9),
        request(messages=[USER], chat_template="x"),
        request(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        request(messages=[7]),
        request("/v1/completions", prompt="a", truncate_prompt_tokens=9),
        request("/v1/responses", input="a", tools=[{"type": "web_search"}]),
    ],
)
def test_tokenize_is_not_asked_for_what_it_does_not_know(asked: EngineRequest) -> None:
    with pytest.raises(UnsupportedRequestError):
        tokenize_bodies(asked, "tiny")


def test_a_renderer_gets_the_request_as_it_came_but_for_the_model() -> None:
    body = b'{"messages":[ {"role":"user","content":"\\u00e9"} ],"temperature":0.50,"model":"alias"}'
    asked = read_engine_request(CHAT, body)
    assert isinstance(asked, EngineRequest)
    assert render_body(asked, 'ti"ny') == body.replace(b"alias", b'ti\\"ny')


def test_answers_of_tokenize() -> None:
    vllm = b'{"count":2,"max_model_len":8192,"tokens":[5,4294967295],"token_strs":null}'
    assert read_tokenized(vllm) == Tokens(array("I", [5, 4294967295]))
    assert read_tokenized(b'{"tokens":[1]}') == Tokens(array("I", [1]))


GARBAGE = [
    b"",
    b"no json",
    b"\xff\xfe",
    b"[]",
    b'{"tokens":null}',
    b'{"tokens":[]}',
    b'{"tokens":[-1]}',
    b'{"tokens":[4294967296]}',
    b'{"tokens":[1.5]}',
    b'{"tokens":["a"]}',
    b'{"tokens":[1],"count":2}',
    b'{"tokens":' + b"[" * 100_000,
]


@pytest.mark.parametrize("reply", GARBAGE)
def test_answers_that_are_no_tokens_are_refused(reply: bytes) -> None:
    with pytest.raises(ReplyError):
        read_tokenized(reply)
    with pytest.raises(ReplyError):
        read_rendered(
            reply.replace(b"tokens", b"token_ids").replace(b'"count":2', b'"token_ids":[]'), request(messages=[USER])
        )


@given(st.binary(max_size=50))
def test_any_answer_is_tokens_or_refused(reply: bytes) -> None:
    for read in (read_tokenized, lambda reply: read_rendered(reply, request(messages=[USER]))):
        with suppress(ReplyError):
            read(reply)


def test_a_rendered_chat_is_one_object_with_its_media_in_order() -> None:
    reply = {
        "request_id": "r",
        "token_ids": [1, 9, 9, 2, 8],
        "features": {
            "mm_hashes": {"audio": ["h3"], "image": ["h1"]},
            "mm_placeholders": {"audio": [{"offset": 4, "length": 1}], "image": [{"offset": 1, "length": 2}]},
            "kwargs_data": None,
        },
        "sampling_params": {},
    }
    media = (MultiModalItem("h1", 1, 2), MultiModalItem("h3", 4, 1))
    assert read_rendered(json.dumps(reply).encode(), request(messages=[USER])) == [
        Tokens(array("I", [1, 9, 9, 2, 8]), media)
    ]
    for hashes in ({}, {"audio": [None], "image": ["h1"]}, {"audio": [], "image": ["h1"]}):
        reply["features"] = {**reply["features"], "mm_hashes": hashes}  # type: ignore[dict-item]
        with pytest.raises(ReplyError):
            read_rendered(json.dumps(reply).encode(), request(messages=[USER]))


def test_rendered_completions_are_a_list_with_one_object_for_each_prompt() -> None:
    reply = json.dumps([{"token_ids": [number], "features": None} for number in (1, 2, 3)]).encode()
    asked = request("/v1/completions", prompt=["a", [2], "b"])
    assert [list(each.token_ids) for each in read_rendered(reply, asked)] == [[1], [3]]
    with pytest.raises(ReplyError, match="3 prompts, but 4 were sent"):
        read_rendered(reply, request("/v1/completions", prompt=["a", "b", "c", "d"]))
