from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.prompts.fields import Unused
from picker.core.tokens.prompt import Api, EngineRequest, ModelNames, Served, read_engine_request


def read(path: str = "/v1/completions", **body: Any) -> EngineRequest:
    request = read_engine_request(path, json.dumps(body).encode())
    assert isinstance(request, EngineRequest), request
    return request


@pytest.mark.parametrize(
    ("path", "body", "api"),
    [
        ("/v1/completions", {"prompt": "a"}, Api.COMPLETIONS),
        ("/openai/v1/chat/completions?x=1", {"messages": [{}]}, Api.CHAT),
        ("/v1/responses/", {"input": "a"}, Api.RESPONSES),
        ("/v1/messages", {"messages": [{}]}, Api.MESSAGES),
        ("", {"messages": [{}]}, Api.CHAT),
        ("", {"messages": [{}], "system": "s"}, Api.MESSAGES),
        ("", {"input": [{}]}, Api.RESPONSES),
        ("/v1/cache/predict", {"token_ids": [1]}, Api.COMPLETIONS),
    ],
)
def test_the_api_is_known_by_the_path_or_without_one_by_the_fields(path: str, body: Any, api: Api) -> None:
    assert read(path, **body).api is api


def test_fields_are_kept_as_they_were_sent() -> None:
    body = b'{"messages" : [ {"role":"user", "content":"\\u00e9"} ],"tools":[1.50], "model":"m", "temperature":1}'
    request = read_engine_request("/v1/chat/completions", body)
    assert isinstance(request, EngineRequest)
    assert bytes(request.fields["messages"]) == b'[ {"role":"user", "content":"\\u00e9"} ]'
    assert bytes(request.fields["tools"]) == b"[1.50]"
    assert request.model == "m"
    assert request.field("absent") is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ("text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2**32 - 1], (array("I", [1, 2**32 - 1]),)),
        ([[1, 2], [3]], (array("I", [1, 2]), array("I", [3]))),
        (["a", [3]], ("a", array("I", [3]))),
        ([[1]] * 20, (array("I", [1]),) * 16),
    ],
)
def test_prompts_are_texts_and_token_ids(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert read(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/completions", b"", Unused.NO_BODY),
        ("/v1/completions", b"{", Unused.INVALID_JSON),
        ("/v1/completions", b"[1]", Unused.NOT_AN_OBJECT),
        ("/v1/embeddings", b'{"input":"a"}', Unused.UNKNOWN_PATH),
        ("", b'{"other":1}', Unused.UNKNOWN_PATH),
        ("/v1/completions", b'{"prompt":""}', Unused.EMPTY),
        ("/v1/completions", b'{"prompt":[]}', Unused.EMPTY),
        ("/v1/completions", b'{"prompt":["a",""]}', Unused.EMPTY),
        ("/v1/completions", b'{"model":"m"}', Unused.WRONG_TYPE),
        ("/v1/completions", b'{"prompt":7}', Unused.WRONG_TYPE),
        ("/v1/completions", b'{"prompt":[-1]}', Unused.WRONG_TYPE),
        ("/v1/completions", b'{"prompt":[4294967296]}', Unused.WRONG_TYPE),
        ("/v1/completions", b'{"prompt":[1,"a"]}', Unused.WRONG_TYPE),
        ("/v1/completions", b'{"prompt":"a","model":7}', Unused.WRONG_TYPE),
        ("/v1/completions", b'{"prompt":"a","cache_salt":7}', Unused.WRONG_TYPE),
        ("/v1/chat/completions", b'{"messages": [ ]}', Unused.EMPTY),
        ("/v1/chat/completions", b'{"prompt":"a"}', Unused.EMPTY),
        ("/v1/responses", b'{"input":""}', Unused.EMPTY),
        ("/v1/completions", b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", Unused.INVALID_JSON),
        ("/v1/completions", b'{"prompt":[' + b",".join([b"[1]"] * 200_000) + b"]}", Unused.TOO_COMPLEX),
        ("/v1/chat/completions", b"{" + b",".join([b'"a":1'] * 200_000) + b"}", Unused.TOO_COMPLEX),
    ],
)
def test_a_body_that_cannot_be_used_says_why(path: str, body: bytes, reason: Unused) -> None:
    assert read_engine_request(path, body) is reason


@given(st.binary(max_size=60), st.sampled_from(["", *(f"/v1{api}" for api in Api)]))
def test_no_bytes_raise(body: bytes, path: str) -> None:
    assert isinstance(read_engine_request(path, body), EngineRequest | Unused)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["model", "prompt", "messages", "input", "token_ids", "echo", "logprobs", "cache_salt", "x"])


@given(st.dictionaries(NAMES, JSON, max_size=5), st.sampled_from(["", *(f"/v1{api}" for api in Api)]))
def test_no_fields_raise_and_a_request_has_a_digest(body: dict[str, Any], path: str) -> None:
    request = read_engine_request(path, json.dumps(body).encode())
    if isinstance(request, EngineRequest):
        assert len(request.digest()) == 32


@pytest.mark.parametrize(
    ("path", "extra", "reads"),
    [
        ("/v1/completions", {}, True),
        ("/v1/completions", {"prompt_logprobs": None, "logprobs": 5}, True),
        ("/v1/completions", {"prompt_logprobs": 0}, False),
        ("/v1/completions", {"prompt_logprobs": 1}, False),
        ("/v1/completions", {"echo": True}, True),
        ("/v1/completions", {"echo": True, "logprobs": 0}, False),
        ("/v1/completions", {"echo": True, "logprobs": 2}, False),
        ("/v1/chat/completions", {"prompt_logprobs": 1}, False),
        ("/v1/chat/completions", {"echo": True}, False),
    ],
)
def test_whoever_wants_log_probabilities_of_the_prompt_reads_no_cache(path: str, extra: Any, reads: bool) -> None:
    assert read(path, prompt="a", messages=[{"role": "user", "content": "a"}], **extra).reads_cache is reads


def test_digests_tell_apart_all_that_may_change_tokens_and_nothing_else() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    plain = read("/v1/chat/completions", **chat).digest()
    same = read("/v1/chat/completions", model="other", max_tokens=5, temperature=0.1, cache_salt="s", **chat)
    assert same.digest() == plain
    for extra in (
        {"tools": []},
        {"add_generation_prompt": True},
        {"chat_template_kwargs": {}},
        {"never_heard_of": 1},
        {"documents": None},
    ):
        assert read("/v1/chat/completions", **chat, **extra).digest() != plain
    assert read("/v1/messages", **chat).digest() != plain
    short, long = (read(prompt="x", truncate_prompt_tokens=-1, max_tokens=room) for room in (1, 9))
    assert short.digest() != long.digest()
    a, b = read(prompt="x", suffix="yz"), read(prompt="xy", suffix="z")
    assert a.digest() != b.digest()


def test_salt_is_what_engines_take_for_one() -> None:
    assert read(prompt="a", cache_salt="t1").cache_salt == "t1"
    assert read(prompt="a", cache_salt="").cache_salt is None


def test_names_are_those_of_the_engines() -> None:
    names = ModelNames(base=("tiny", "tiny-fp8"), aliases={"public": "tiny", "helper": "ad-a"})
    for alias in ("", "tiny", "tiny-fp8", "public"):
        assert names.resolve(alias) == Served("tiny")
    assert names.resolve("helper") == names.resolve("ad-a") == Served("tiny", "ad-a")
    assert names.resolve("tiny:ad-b") == Served("tiny", "ad-b")
    assert names.resolve("other:ad-b") == Served("tiny", "other:ad-b")
    assert ModelNames(aliases={"a": "b"}).resolve("a") == Served("b")
