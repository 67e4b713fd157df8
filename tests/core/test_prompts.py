"""Prompts out of request bodies: the rendering rules by example, an independent renderer, and hostile bodies."""

import gzip
import json
import struct
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.prompts import Prompt, Unused, parse

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


def read(path: str, **fields: object) -> Prompt:
    return parse(path, json.dumps({"model": "m", **fields}).encode())


def text(path: str, **fields: object) -> str:
    prompt = read(path, **fields)
    assert prompt.unused is None
    (only,) = prompt.texts
    return only.decode()


def unused(path: str, **fields: object) -> Unused | None:
    prompt = read(path, **fields)
    assert prompt.texts == ()
    return prompt.unused


def user(content: object) -> list[object]:
    return [{"role": "user", "content": content}]


# --- Completions -------------------------------------------------------------------------------------------------


def test_a_completion_prompt_is_used_as_it_is():
    assert text(COMPLETIONS, prompt="Once upon\n a <|im_end|> time ") == "Once upon\n a <|im_end|> time "


def test_text_is_matched_as_utf8_however_the_json_spells_it():
    plain = parse(COMPLETIONS, '{"prompt":"你好 é 😀"}'.encode())
    escaped = parse(COMPLETIONS, rb'{"prompt":"\u4f60\u597d \u00e9 \ud83d\ude00"}')
    assert plain.texts == escaped.texts == ("你好 é 😀".encode(),)


def test_a_list_of_prompts_gives_one_text_each():
    assert read(COMPLETIONS, prompt=["ab", "", "cd"]).texts == (b"ab", b"cd")


def test_only_the_first_sixteen_prompts_of_a_batch_are_looked_at():
    assert read(COMPLETIONS, prompt=[f"p{i}" for i in range(40)]).texts == tuple(b"p%d" % i for i in range(16))
    assert len(read(COMPLETIONS, prompt=[[i] for i in range(40)]).texts) == 16


def test_token_ids_are_four_bytes_each():
    assert read(COMPLETIONS, prompt=[1, 2, 70000]).texts == (struct.pack("=3I", 1, 2, 70000),)
    assert read(COMPLETIONS, prompt=[[1], [], [2, 4294967295]]).texts == (
        struct.pack("=I", 1),
        struct.pack("=2I", 2, 4294967295),
    )


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        True,
        {},
        {"text": "x"},
        [],
        [None],
        [1, "a"],
        ["a", 1],
        ["a", ["b"]],
        [1.5],
        [-1],
        [2**32],
        [[1], "ab"],
        [[1], {}],
        [[1], None],
        [[1], [[2]]],
        [["a"]],
        [[1], ["a"]],
        [{}],
    ],
)
def test_a_completion_prompt_of_another_type_is_unused(prompt):
    assert unused(COMPLETIONS, prompt=prompt) is Unused.WRONG_TYPE


@pytest.mark.parametrize("prompt", ["", [""], ["", ""], [[]], [[], []]])
def test_an_empty_completion_prompt_is_unused(prompt):
    assert unused(COMPLETIONS, prompt=prompt) is Unused.EMPTY


def test_a_completion_without_a_prompt_is_unused():
    assert unused(COMPLETIONS, messages=user("hi")) is Unused.WRONG_TYPE


# --- Chat --------------------------------------------------------------------------------------------------------


def test_chat_is_rendered_in_chatml_in_request_order():
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is Kthena?"},
    ]
    assert text(CHAT, messages=messages) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is Kthena?<|im_end|>\n"
    )
    assert text(CHAT, messages=messages[::-1]) == (
        "<|im_start|>user\nWhat is Kthena?<|im_end|>\n<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    )


def test_a_top_level_system_field_is_placed_first():
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert text(CHAT, system="Be brief.", messages=user("hi")) == expected
    assert text(MESSAGES, system="Be brief.", messages=user("hi")) == expected


def test_a_system_field_may_be_text_parts():
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}}]
    expected = "<|im_start|>system\nBe\nbrief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert text(MESSAGES, system=parts, messages=user("hi")) == expected


@pytest.mark.parametrize("system", [None, 5, {}, [], [{"type": "image"}], {"type": "text", "text": "x"}])
def test_a_system_field_without_text_leaves_no_trace(system):
    assert text(CHAT, system=system, messages=user("hi")) == "<|im_start|>user\nhi<|im_end|>\n"


def test_text_input_text_and_output_text_parts_are_kept_and_joined_by_a_newline():
    content = [
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_text", "text": "two"},
        {"type": "output_text", "text": "three"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    assert text(CHAT, messages=user(content)) == "<|im_start|>user\none\ntwo\nthree<|im_end|>\n"


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        ({"text": "x"}, True),
        ({"type": None, "text": "x"}, True),
        ({"type": 3, "text": "x"}, True),
        ({"type": "text", "text": ""}, True),
        ({"type": "", "text": "x"}, False),
        ({"type": "thinking", "text": "x"}, False),
        ({"type": "TEXT", "text": "x"}, False),
        ({"type": "text", "text": 5}, False),
        ({"type": "text", "text": None}, False),
        ({"type": "text"}, False),
        ("x", False),
        (None, False),
        ([{"type": "text", "text": "x"}], False),
    ],
)
def test_which_content_parts_count(part, kept):
    first = part["text"] + "\n" if kept else ""
    assert text(CHAT, messages=user([part, {"type": "text", "text": "y"}])) == (
        f"<|im_start|>user\n{first}y<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": []},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": ["plain"]},
        {"role": "user", "content": {"type": "text", "text": "x"}},
        {"role": "user", "content": 5},
        {"content": "no role"},
        {"role": None, "content": "x"},
        {"role": 5, "content": "x"},
        "text",
        None,
        ["role", "user"],
    ],
)
def test_a_message_without_role_or_text_is_skipped(message):
    messages = [*user("a"), message, *user("b")]
    assert text(CHAT, messages=messages) == "<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"


def test_roles_are_used_verbatim_and_other_fields_are_ignored():
    messages = [
        {"role": "developer", "content": "d", "name": "n"},
        {"role": "tool", "content": "t", "tool_call_id": "7"},
        {"role": "", "content": "e"},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "refusal": "no"},
    ]
    assert text(CHAT, messages=messages, tools=[{"type": "function"}], temperature=0.1) == (
        "<|im_start|>developer\nd<|im_end|>\n"
        "<|im_start|>tool\nt<|im_end|>\n"
        "<|im_start|>\ne<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n"
    )


def test_an_empty_content_string_is_a_message():
    assert text(CHAT, messages=user("")) == "<|im_start|>user\n<|im_end|>\n"


def test_nothing_is_escaped():
    assert text(CHAT, messages=user("<|im_end|>\n<|im_start|>system\nx")) == (
        "<|im_start|>user\n<|im_end|>\n<|im_start|>system\nx<|im_end|>\n"
    )


@pytest.mark.parametrize("messages", [None, "hi", 5, {}, {"role": "user", "content": "x"}])
def test_messages_of_another_type_are_unused(messages):
    assert unused(CHAT, messages=messages) is Unused.WRONG_TYPE
    assert unused(MESSAGES, messages=messages) is Unused.WRONG_TYPE


@pytest.mark.parametrize("messages", [[], [None], user(None), user([{"type": "image"}])])
def test_messages_without_any_text_are_an_empty_prompt(messages):
    assert unused(CHAT, messages=messages) is Unused.EMPTY


# --- Responses ---------------------------------------------------------------------------------------------------


def test_instructions_become_a_developer_message_before_the_input():
    assert text(RESPONSES, instructions="Be brief.", input="hi") == (
        "<|im_start|>developer\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


@pytest.mark.parametrize("instructions", [None, "", 5, ["x"], {}])
def test_instructions_that_are_no_text_leave_no_trace(instructions):
    assert text(RESPONSES, instructions=instructions, input="hi") == "<|im_start|>user\nhi<|im_end|>\n"


def test_response_items_that_are_messages_are_rendered():
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "reasoning", "role": "assistant", "content": "hidden", "summary": []},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "out"},
        {"type": "item_reference", "id": "x"},
        {"type": "message", "role": "", "content": "no role"},
        {"type": "message", "content": "no role"},
        {"type": "message", "role": 5, "content": "no role"},
        {"type": "", "role": "user", "content": "c"},
        {"type": None, "role": "user", "content": [{"type": "input_text", "text": "d"}, {"type": "input_image"}]},
        "text",
        None,
    ]
    assert text(RESPONSES, input=items) == (
        "<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n"
    )


def test_a_system_field_means_nothing_to_responses():
    assert text(RESPONSES, system="s", input="hi") == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("value", [5, True, {}, 1.5])
def test_a_response_input_of_another_type_is_unused(value):
    assert unused(RESPONSES, input=value) is Unused.WRONG_TYPE


@pytest.mark.parametrize("value", [[], [None], [{"type": "reasoning"}], None])
def test_a_response_without_text_is_an_empty_prompt(value):
    assert unused(RESPONSES, input=value) is Unused.EMPTY


def test_instructions_alone_are_a_prompt():
    assert text(RESPONSES, instructions="i") == "<|im_start|>developer\ni<|im_end|>\n"


# --- Paths, model, stream ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, f"{COMPLETIONS}?a=/x", f"{COMPLETIONS}/", f"/openai{COMPLETIONS}/?q=1"])
def test_a_query_and_a_prefix_do_not_change_the_api(path):
    assert read(path, prompt="x").texts == (b"x",)


@pytest.mark.parametrize(
    "path", ["", "/", "/v1/embeddings", "/v1/completions/x", "/v1/chat", "/completionsx", "/x?p=/v1/completions", "?"]
)
def test_other_paths_are_routed_without_a_prompt(path):
    prompt = parse(path, b'{"model":"m","prompt":"x","messages":[],"input":"y"}')
    assert (prompt.unused, prompt.texts, prompt.model) == (Unused.UNKNOWN_PATH, (), "m")


@pytest.mark.parametrize(
    ("model", "expected"), [("a/B-c", "a/B-c"), ("", ""), (5, ""), (None, ""), (["m"], ""), ("x" * 600, "x" * 512)]
)
def test_model(model, expected):
    assert read(COMPLETIONS, model=model, prompt="x").model == expected
    assert read(COMPLETIONS, model=model, prompt=5).model == expected


@pytest.mark.parametrize(
    ("stream", "expected"), [(True, True), (False, False), (None, False), (1, False), ("x", False)]
)
def test_stream(stream, expected):
    assert read(COMPLETIONS, stream=stream, prompt="x").stream is expected


# --- Bodies that are not what they should be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b" ",
        b"{",
        b'{"prompt":"x"',
        b'{"prompt":"x"} y',
        b'{"prompt":"x"}{}',
        b'{"prompt":"x"}\x00',
        b'{"prompt":"a\x00b"}',
        b'{"prompt":"a\nb"}',
        b"{'prompt':'x'}",
        b'{"prompt":x}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\xed\xa0\x80"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\udc00\\ud800"}',
        b'{"model":"\\ud800","prompt":"x"}',
        b'{"prompt":"\\q"}',
        b'{"prompt":[1e999]}',
        b'{"prompt":[' + b"9" * 5000 + b"]}",
        b'{"prompt":"x","n":NaN}',
        b"\xef\xbb\xbf" + b'{"prompt":"x"}',
        '{"prompt":"x"}'.encode("utf-16"),
        b"\x00" * 100,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"ignored":' + b"[" * 100_000 + b"]" * 100_000 + b',"prompt":"x"}',
        b'{"prompt":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt":' + b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_not_json_is_unused(body):
    prompt = parse(COMPLETIONS, body)
    assert (prompt.unused, prompt.texts) == (Unused.INVALID_JSON, ())


@pytest.mark.parametrize("body", [b"null", b"[]", b'"prompt"', b"5", b"true", b'[{"prompt":"x"}]', b"\n []"])
def test_json_that_is_no_object_is_unused(body):
    assert parse(COMPLETIONS, body).unused is Unused.NOT_AN_OBJECT


MILLIONS = {
    "token lists": b'"prompt":[' + b",".join([b"[1]"] * 2_000_000) + b"]",
    "messages": b'"messages":[' + b",".join([b"{}"] * 2_000_000) + b"]",
    "system": b'"messages":[],"system":[' + b",".join([b"1"] * 2_000_000) + b"]",
    "input": b'"input":[' + b",".join([b'""'] * 2_000_000) + b"]",
    "keys": b",".join([b'"a":1'] * 2_000_000),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("field", MILLIONS.values(), ids=MILLIONS.keys())
def test_of_millions_of_parts_nothing_is_built(path, field):
    body = b'{"model":"m",' + field + b',"stream":true}'
    tracemalloc.start()
    assert parse(path, body) == Prompt("m", (), Unused.TOO_COMPLEX, stream=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(body)


def test_a_model_of_millions_of_parts_is_none():
    body = b'{"prompt":"x","model":[' + b",".join([b"{}"] * 200_000) + b"]}"
    assert parse(COMPLETIONS, body) == Prompt("", (), Unused.TOO_COMPLEX)


def test_what_has_millions_of_parts_and_is_no_json_is_unused():
    assert parse(COMPLETIONS, b'{"prompt":[' + b"[1]," * 1_000_000).unused is Unused.INVALID_JSON


@pytest.mark.parametrize("unit", ['a, b, c; {"k": [1, 2, [3]]} ', '"', "\\", '\\"[{,', "[{,"])
def test_long_texts_may_contain_anything(unit):
    content = unit * (3_000_000 // len(unit))
    assert text(COMPLETIONS, prompt=content) == content
    assert text(CHAT, messages=user(content)) == f"<|im_start|>user\n{content}<|im_end|>\n"


def test_no_body_is_unused():
    assert parse(COMPLETIONS, b"").unused is Unused.NO_BODY


def test_white_space_around_the_object_is_allowed():
    assert parse(COMPLETIONS, b' \r\n\t{ "prompt" : "x" }\n ').texts == (b"x",)


def test_an_escaped_nul_is_text():
    assert parse(COMPLETIONS, rb'{"prompt":"a\u0000b"}').texts == (b"a\0b",)


def test_of_duplicate_keys_the_last_counts():
    prompt = parse(COMPLETIONS, b'{"prompt":"a","model":"x","prompt":"b","model":"y"}')
    assert (prompt.model, prompt.texts, prompt.unused) == ("y", (b"b",), None)
    assert parse(COMPLETIONS, b'{"prompt":"a","prompt":5}').unused is Unused.WRONG_TYPE
    body = b'{"messages":[{"role":"user","role":"tool","content":"a","content":"b"}]}'
    assert parse(CHAT, body).texts == (b"<|im_start|>tool\nb<|im_end|>\n",)


def test_huge_numbers_elsewhere_do_not_matter():
    body = b'{"seed":' + b"9" * 5000 + b',"temperature":1e999999,"prompt":"x"}'
    assert parse(COMPLETIONS, body).texts == (b"x",)


@pytest.mark.parametrize("encoding", [b"gzip", b"GZIP", b"br", b"zstd", b"identity, gzip", b"x"])
def test_an_encoded_body_is_unused(encoding):
    body = gzip.compress(b'{"prompt":"x"}')
    assert parse(COMPLETIONS, body, content_encoding=encoding).unused is Unused.CONTENT_ENCODING


@pytest.mark.parametrize("encoding", [b"", b"identity", b"Identity"])
def test_identity_is_no_encoding(encoding):
    assert parse(COMPLETIONS, b'{"prompt":"x"}', content_encoding=encoding).texts == (b"x",)


def test_a_gzip_body_that_does_not_say_so_is_unused():
    assert parse(COMPLETIONS, gzip.compress(b'{"prompt":"x"}')).unused is Unused.INVALID_JSON


def test_large_bodies():
    ten_megabytes = "x" * 10_000_000
    assert text(COMPLETIONS, prompt=ten_megabytes) == ten_megabytes
    assert text(CHAT, messages=user(ten_megabytes)) == f"<|im_start|>user\n{ten_megabytes}<|im_end|>\n"
    many = user("y") * 15_000
    assert text(CHAT, messages=many) == "<|im_start|>user\ny<|im_end|>\n" * 15_000
    assert len(read(COMPLETIONS, prompt=list(range(1_000_000))).texts[0]) == 4_000_000


def test_a_body_parsed_deep_in_the_stack_does_not_raise():
    def deeper(levels: int) -> Prompt:
        return deeper(levels - 1) if levels else parse(COMPLETIONS, b'{"prompt":' + b"[" * 200 + b"]" * 200 + b"}")

    frame, depth = sys._getframe(), 0
    while frame := frame.f_back:
        depth += 1
    assert deeper(sys.getrecursionlimit() - depth - 60).unused is not None


# --- Against an independent renderer -----------------------------------------------------------------------------


def reference(path: str, body: bytes) -> list[str] | Unused:
    """The rules once more, over `json.loads`: the texts, or why there are none. For objects and known paths."""
    request = json.loads(body)
    if path == COMPLETIONS:
        prompt = request.get("prompt")
        if isinstance(prompt, str):
            texts = [prompt]
        elif isinstance(prompt, list) and prompt and all(isinstance(one, str) for one in prompt[:16]):
            texts = prompt[:16]
        elif is_tokens(prompt):
            texts = [pack(prompt)]
        elif isinstance(prompt, list) and prompt and all(one == [] or is_tokens(one) for one in prompt[:16]):
            texts = [pack(one) for one in prompt[:16]]
        else:
            return Unused.WRONG_TYPE
    else:
        turns: list[tuple[object, object]] = []
        if path == RESPONSES:
            given_input = request.get("input")
            if isinstance(given_input, str):
                turns = [("user", given_input)]
            elif isinstance(given_input, list):
                for item in given_input:
                    if isinstance(item, dict) and item.get("role") != "":
                        kind = item.get("type")
                        if not isinstance(kind, str) or kind in ("", "message"):
                            turns.append((item.get("role"), item.get("content")))
            elif given_input is not None:
                return Unused.WRONG_TYPE
            if request.get("instructions") != "" and isinstance(request.get("instructions"), str):
                turns.insert(0, ("developer", request["instructions"]))
        else:
            if not isinstance(request.get("messages"), list):
                return Unused.WRONG_TYPE
            turns = [("system", request.get("system"))]
            turns += [(one.get("role"), one.get("content")) for one in request["messages"] if isinstance(one, dict)]
        rendered = ""
        for role, content in turns:
            words = content
            if isinstance(content, list):
                kept = [
                    part["text"]
                    for part in content
                    if isinstance(part, dict)
                    and isinstance(part.get("text"), str)
                    and (
                        part.get("type") in ("text", "input_text", "output_text")
                        or not isinstance(part.get("type"), str)
                    )
                ]
                words = "\n".join(kept) if kept else None
            if isinstance(role, str) and isinstance(words, str):
                rendered += "<|im_start|>" + role + "\n" + words + "<|im_end|>\n"
        texts = [rendered]
    return [one for one in texts if one] or Unused.EMPTY


def is_tokens(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(one, int) and 0 <= one < 2**32 for one in value)


def pack(tokens: list[int]) -> str:
    """As text of one byte a character, so that it can stand beside rendered text."""
    return struct.pack(f"={len(tokens)}I", *tokens).decode("latin-1")


words = st.text(st.characters(codec="utf-8"), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=8
)
part = (
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["text", "input_text", "output_text", "image_url", "", None, 3]),
            "text": words | anything,
        },
    )
    | anything
)
content = words | st.lists(part, max_size=4) | anything
message = (
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["system", "user", "assistant", "tool", "", None, 5]),
            "type": st.sampled_from(["message", "reasoning", "function_call", "", None, 5]),
            "content": content,
            "name": anything,
        },
    )
    | anything
)
tokens = st.lists(st.integers(-1, 5) | st.integers(2**32 - 2, 2**32), max_size=4) | st.lists(
    st.integers(0, 9), max_size=4
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "model": words | anything,
        "prompt": words | st.lists(words, max_size=18) | tokens | st.lists(tokens, max_size=18) | anything,
        "messages": st.lists(message, max_size=5) | anything,
        "system": content,
        "input": words | st.lists(message, max_size=5) | anything,
        "instructions": words | anything,
        "stream": st.booleans() | anything,
        "other": anything,
    },
)
paths = st.sampled_from([COMPLETIONS, CHAT, RESPONSES, MESSAGES])


@settings(max_examples=400, deadline=None)
@given(paths, requests, st.booleans())
def test_agrees_with_the_reference(path, request, ascii_only):
    body = json.dumps(request, ensure_ascii=ascii_only).encode()
    prompt = parse(path, body)
    expected = reference(path, body)
    if isinstance(expected, Unused):
        assert (prompt.unused, prompt.texts) == (expected, ())
    else:
        assert prompt.unused is None
        numbers = (
            path == COMPLETIONS and not isinstance(request["prompt"], str) and not isinstance(request["prompt"][0], str)
        )
        assert [one.decode("latin-1" if numbers else "utf-8") for one in prompt.texts] == expected
    model = request.get("model")
    assert prompt.model == (model if isinstance(model, str) else "")
    assert prompt.stream is (request.get("stream") is True)


def consistent(prompt: Prompt) -> None:
    assert (prompt.unused is None) == bool(prompt.texts)
    assert all(prompt.texts)


@settings(max_examples=300, deadline=None)
@given(paths | words, st.binary(max_size=60), st.binary(max_size=8))
def test_arbitrary_bytes_never_raise(path, body, encoding):
    consistent(parse(path, body, content_encoding=encoding))


@settings(max_examples=300, deadline=None)
@given(paths, requests, st.data())
def test_damaged_bodies_never_raise(path, request, data):
    body = bytearray(json.dumps(request).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    consistent(parse(path, bytes(body[: data.draw(st.integers(0, len(body)))])))
    consistent(parse(path, bytes(body)))
