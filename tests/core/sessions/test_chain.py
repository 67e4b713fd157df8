"""Session identity: chains are equal as far as contents are, which plain comparison of the contents decides here."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.prompts import parse
from picker.core.sessions.chain import MAX_POSITIONS, Chain, Stored
from picker.core.sessions.reader import ChainReader

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CHUNK = 512
FIELDS = ["name", "tool_call_id", "reasoning_content", "tool_calls"]
"""Of messages, those that are rendered."""


def read(path, reader=None, stored=None, **body):
    prompt = parse(path, json.dumps({"model": "m", **body}).encode())
    assert prompt.fields is not None, prompt
    return (reader or ChainReader()).read(path, prompt, stored)


def chat(*messages, **more) -> Chain:
    (chain,) = read(CHAT, messages=list(messages), **more)
    return chain


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def user(content, **more):
    return said("user", content, **more)


def common(one: Chain, other: Chain) -> int:
    """Leading positions that two chains share; none after the first difference may be the same."""
    shared = 0
    for mine, others in zip(one.hashes, other.hashes, strict=False):
        if mine != others:
            break
        shared += 1
    assert not set(one.hashes[shared:]) & set(other.hashes)
    return shared


def prefixes(messages) -> list[object]:
    """What comes before each position, as plain values."""
    found: list[object] = []
    done: list[object] = []
    for message in messages:
        content, parts = (
            message.get("content"),
            [(name, json.dumps(message[name])) for name in FIELDS if name in message],
        )
        for part in [content] if isinstance(content, str) else content or []:
            if isinstance(part, str) or part["type"] == "text":
                text = (part if isinstance(part, str) else part["text"]).encode()
                ends = range(CHUNK, len(text) + 1, CHUNK)
                found += [(tuple(done), message.get("role"), tuple(parts), text[:end]) for end in ends]
                parts.append(("text", text))
            else:
                parts.append(("part", json.dumps(part)))
        done.append((message.get("role"), tuple(parts)))
        found.append(tuple(done))
    return found


# --- Against plain comparison -------------------------------------------------------------------------------------

texts = st.one_of(
    st.text(max_size=20),
    st.builds(
        lambda unit, times, more: unit * times + more,
        st.text(min_size=1, max_size=3) | st.sampled_from(["E", "t0:EM4:user", "T", "t9:"]),
        st.integers(1, 700),
        st.text(max_size=4),
    ),
)
parts = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    st.integers(0, 2).map(lambda n: {"type": "image_url", "image_url": {"url": f"data:{n}"}}),
)
calls = st.lists(
    st.builds(lambda name: {"id": "1", "function": {"name": name, "arguments": "{}"}}, st.sampled_from("fg")),
    min_size=1,
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "", "ü"]),
        "content": st.one_of(texts, st.lists(parts, max_size=4), st.none()),
        "tool_calls": calls,
        "name": st.sampled_from(["Ann", "Bob"]),
        "tool_call_id": st.sampled_from(["1", "2"]),
        "reasoning_content": texts.filter(bool),
        "id": st.text(max_size=2),
    },
)
conversations = st.lists(messages, min_size=1, max_size=12)


@st.composite
def relatives(draw):
    """A conversation and one that goes on from it, forks off somewhere, or splits one of its parts."""
    one = draw(conversations)
    other = json.loads(json.dumps(one))
    at = draw(st.integers(0, len(other) - 1))
    message = other[at]
    match draw(st.sampled_from(["go on", "cut", "change", "split", "role", "as parts", "empty part", "field"])):
        case "go on":
            other += draw(conversations)
        case "cut":
            other = other[: at + 1]
        case "change" if isinstance(message.get("content"), str):
            place = draw(st.integers(0, len(message["content"])))
            message["content"] = (
                message["content"][:place] + draw(st.text(max_size=3)) + message["content"][place + 1 :]
            )
        case "split" if isinstance(message.get("content"), str):
            place = draw(st.integers(0, len(message["content"])))
            halves = message["content"][:place], message["content"][place:]
            message["content"] = [{"type": "text", "text": half} for half in halves]
        case "role":
            message["role"] = draw(st.sampled_from(["user", "assistant", "tool"]))
        case "as parts" if isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        case "field":
            message[draw(st.sampled_from([*FIELDS, "id", "status"]))] = draw(st.sampled_from(["1", "2"]))
        case "empty part" if isinstance(message.get("content"), list):
            message["content"].insert(0, {"type": "text", "text": ""})
    return one, other


@given(relatives())
def test_positions_are_equal_exactly_when_what_comes_before_them_is(pair):
    one, other = (chat(*conversation) for conversation in pair)
    before, before_other = map(prefixes, pair)
    assert (len(one.hashes), len(other.hashes)) == (len(before), len(before_other))
    same = sum(mine == others for mine, others in zip(before, before_other, strict=False))
    assert common(one, other) == same


@given(st.lists(relatives(), min_size=1, max_size=3))
def test_what_was_read_before_changes_nothing(pairs):
    reader = ChainReader()
    for conversation in [conversation for pair in pairs for conversation in (*pair, pair[0])]:
        (remembered,) = read(CHAT, reader, messages=conversation)
        assert remembered == chat(*conversation)


def test_the_same_turns_of_two_apis_are_not_taken_for_each_other():
    turns, reader = [{"type": "function_call", "name": "f", "content": "x"}, user("y")] * 4, ChainReader()
    for path in (CHAT, RESPONSES, CHAT):
        assert read(path, reader, messages=turns, input=turns) == read(path, messages=turns, input=turns)
    assert common(read(CHAT, messages=turns)[0], read(RESPONSES, input=turns)[0]) == 0


def test_a_fork_at_every_byte_of_a_text():
    text = random.Random(1).randbytes(1700).hex()[:1700]
    whole = chat(said("system", "s"), user(text))
    for at in range(0, 1700, 3):
        fork = chat(said("system", "s"), user(text[:at] + "-" + text[at + 1 :]))
        assert common(whole, fork) == 1 + at // CHUNK


def test_a_text_that_grows_inside_one_message_extends_its_chain():
    text = random.Random(2).randbytes(50_000).hex()
    reader = ChainReader()
    (before,) = read(CHAT, reader, messages=[user(text[:100])])
    for end in range(1_000, 100_000, 7_777):
        (grown,) = read(CHAT, reader, messages=[user(text[:end])])
        assert common(before, grown) == len(before.hashes) - 1
        assert grown == chat(user(text[:end]))
        before = grown


def test_a_conversation_that_grows_extends_its_chain():
    rng, reader, history, before = random.Random(3), ChainReader(), [said("system", "Be brief.")], None
    for turn in range(40):
        history.append(said(("user", "assistant")[turn % 2], rng.randbytes(rng.choice((3, 200, 900))).hex()))
        (chain,) = read(CHAT, reader, messages=history)
        assert chain == chat(*history)
        if before is not None:
            assert common(before, chain) == len(before.hashes)
        before = chain


def test_multi_byte_characters_may_stand_across_the_end_of_a_chunk():
    one, other = "a" * 511 + "é" + "b" * 600, "a" * 511 + "è" + "b" * 600
    assert common(chat(user(one)), chat(user(other))) == 1  # é and è begin with the same byte
    assert common(chat(user(one)), chat(user("a" * 511 + "e" + "b" * 600))) == 0


def test_sizes_are_the_contents_and_a_little_for_the_frame():
    chain = chat(said("system", "s" * 700), user("u" * 5000))
    assert 5700 <= chain.size <= 5800
    assert chain.size == sum(chain.sizes)


# --- What an engine renders, and what not -------------------------------------------------------------------------

BASE = [said("system", "Be brief."), user("Hello?"), said("assistant", "Hi."), user("And now?")]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.3},
        {"user": "u-1"},
        {"metadata": {"trace": "1"}},
        {"max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
        {"seed": 1, "stop": ["x"], "n": 2, "logprobs": True, "top_p": 0.1},
        {"prompt_cache_key": "k", "session_id": "s", "store": True, "safety_identifier": "x"},
        {"tools": []},
        {"tools": None},
        {"response_format": {"type": "text"}},
        {"response_format": None},
    ],
)
def test_what_is_not_rendered_does_not_split_sessions(more):
    assert chat(*BASE, **more) == chat(*BASE)


@pytest.mark.parametrize(
    "message",
    [
        user("Hello?", id="msg_1", status="completed"),
        user([{"type": "text", "text": "Hello?", "cache_control": {"type": "ephemeral"}}]),
        user([{"text": "Hello?", "type": "text"}]),
        user(["Hello?"]),
        user([{"type": "input_text", "text": "Hello?", "annotations": [], "logprobs": []}]),
        user("Hello?", tool_calls=None, refusal=None, audio=None, function_call=None, name=""),
        user("Hello?", tool_calls=[]),
    ],
)
def test_what_is_not_rendered_of_a_message_does_not_split_sessions(message):
    assert chat(BASE[0], message, *BASE[2:]) == chat(*BASE)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [TOOL]},
        {"tools": [{**TOOL, "function": {"name": "g"}}]},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"documents": [{"text": "d"}]},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"cache_salt": "s"},
        {"model": "other"},
    ],
)
def test_what_is_rendered_ahead_splits_sessions_from_their_start(more):
    assert common(chat(*BASE, **more), chat(*BASE)) == 0
    assert chat(*BASE, **more) == chat(*BASE, **more)


@pytest.mark.parametrize(
    "message",
    [
        said("developer", "Hello?"),
        user("Hello!"),
        user("Hello?", name="Ann"),
        user("Hello?", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        user("Hello?", tool_call_id="1"),
        user("Hello?", reasoning_content="Hm."),
        user([{"type": "text", "text": "Hello?"}, {"type": "text", "text": ""}]),
        user([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo?"}]),
        user([{"type": "image_url", "image_url": {"url": "http://x/Hello?"}}]),
        user(None),
        user(""),
    ],
)
def test_what_is_rendered_of_a_message_splits_sessions_there(message):
    assert common(chat(BASE[0], message, *BASE[2:]), chat(*BASE)) == 1


def test_arguments_of_tools_count_as_they_are_written():
    def called(arguments):
        use = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
        return read(MESSAGES, messages=[user("go"), said("assistant", [use]), user("?")])[0]

    assert called({"a": 1, "b": 2}) == called({"a": 1, "b": 2})
    for other in ({"b": 2, "a": 1}, {"a": True, "b": 2}, {"a": 1.0, "b": 2}, {"a": 1, "b": 2, "cache_control": {}}):
        assert common(called(other), called({"a": 1, "b": 2})) == 1


def test_an_equal_looking_page_is_not_taken_for_one_read_before():
    reader = ChainReader()
    for value in (1, True, 1.0, "1", None, 10**30, -(10**30)):
        use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": value, "b": 2}}
        turns = [said("assistant", [use]), *[user("x")] * 8]
        assert read(MESSAGES, reader, messages=turns) == read(MESSAGES, messages=turns)


def test_a_tool_result_is_content_with_parts():
    def result(content, **more):
        part = {"type": "tool_result", "tool_use_id": "1", "content": content, **more}
        return read(MESSAGES, messages=[user([part])])[0]

    long = "line\n" * 400
    marked = [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]
    assert result(long) == result(marked) == result(long, cache_control={"type": "ephemeral"})
    assert common(result(long), result(long + "more")) == len(long) // CHUNK
    assert common(result(long), result(long, is_error=True)) == 0


def test_cache_markers_of_tools_do_not_split_sessions():
    tool = {"name": "f", "input_schema": {}}
    marked = {**tool, "cache_control": {"type": "ephemeral"}}
    assert read(MESSAGES, messages=BASE, tools=[tool]) == read(MESSAGES, messages=BASE, tools=[marked])


def test_the_same_conversation_is_the_same_chain_in_all_apis():
    turns = BASE[1:]
    chain = chat(*BASE).hashes
    assert read(MESSAGES, system="Be brief.", messages=turns)[0].hashes == chain
    assert read(MESSAGES, system=[{"type": "text", "text": "Be brief."}], messages=turns)[0].hashes == chain
    items = [
        {**turn, "type": "message", "content": [{"type": "output_text", "text": turn["content"]}]} for turn in turns
    ]
    assert read(RESPONSES, instructions="Be brief.", input=items)[0].hashes == chain
    assert read(RESPONSES, input="Hello?") == [chat(user("Hello?"))]


def test_calls_and_results_of_the_responses_api_count_without_ids_of_items():
    def turn(call_id="c", output="42", **more):
        call = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **more}
        result = {"type": "function_call_output", "call_id": call_id, "output": output, **more}
        return read(RESPONSES, input=[user("?"), call, result])[0]

    assert turn() == turn(id="fc_1", status="completed")
    assert common(turn(), turn(output="43")) == 2
    assert common(turn(), turn(call_id="d")) == 1
    references = [read(RESPONSES, input=[{"type": "item_reference", "id": name}])[0] for name in ("a", "b")]
    assert common(*references) == 0


def test_media_are_told_apart_by_their_data_and_weigh_little():
    def image(data):
        url = {"url": "data:image/png;base64," + data}
        return chat(user([{"type": "image_url", "image_url": url}, {"type": "text", "text": "?"}]))

    long = "A" * 500_000
    assert image(long) == image(long)
    assert common(image(long + "A"), image(long + "B")) == 0
    assert image(long).size < 5_000


def test_completions_of_texts_batches_and_tokens():
    (text,) = read(COMPLETIONS, prompt="a" * 1200)
    assert len(text.hashes) == 3
    assert read(COMPLETIONS, prompt=["a" * 1200, "b"])[0] == text
    tokens = [ord("a") * 0x1010101] * 300
    (ids,) = read(COMPLETIONS, prompt=tokens)
    assert (common(ids, text), ids.size) == (0, 1200 + 5)  # four bytes a token, and the frame
    assert common(read(COMPLETIONS, prompt="x")[0], chat(user("x"))) == 0
    (longer,) = read(COMPLETIONS, prompt=[*tokens, 1, 2, 3])
    assert common(ids, longer) == 2


def test_no_content_is_no_chain():
    assert read(CHAT, messages=[]) == []
    assert read(RESPONSES) == []
    assert len(chat(user([])).hashes) == 1


# --- Replies ------------------------------------------------------------------------------------------------------

REPLIES = ["Hi.", "x" * 512, "y" * 5000, "zwölf Boxkämpfer " * 200, "\0\n"]


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_extends_the_chain_to_where_the_next_turn_goes_on(reply):
    prompt, following = [*BASE], user("Thanks.")
    for before, after in (
        (chat(*prompt), chat(*prompt, said("assistant", reply), following)),
        (
            read(MESSAGES, messages=prompt)[0],
            read(MESSAGES, messages=[*prompt, said("assistant", [{"type": "text", "text": reply}]), following])[0],
        ),
        (
            read(RESPONSES, input="Hello?")[0],
            read(
                RESPONSES,
                input=[
                    user("Hello?"),
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": reply, "annotations": []}],
                    },
                    following,
                ],
            )[0],
        ),
    ):
        replied = before.replied(reply.encode())
        assert common(replied, after) == len(replied.hashes) == len(after.hashes) - 1
        assert replied.size == sum(replied.sizes) > before.size


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("length", [1, 511, 512, 513, 3000])
def test_a_completion_goes_on_inside_its_text(reply, length):
    (before,) = read(COMPLETIONS, prompt="p" * length)
    replied = before.replied(reply.encode())
    assert [replied] == read(COMPLETIONS, prompt="p" * length + reply)
    assert replied.replied(b"more").hashes == read(COMPLETIONS, prompt="p" * length + reply + "more")[0].hashes


def test_another_reply_than_the_clients_matches_no_further_than_it_is_the_same():
    sent = "a" * 600
    replied = chat(*BASE).replied(sent.encode())
    for other, same in (("b" * 600, 0), (sent + "more", 1), (sent[:-1], 1), ("", 0)):
        following = chat(*BASE, said("assistant", other), user("?"))
        assert common(replied, following) == len(BASE) + same
    called = said("assistant", sent, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}])
    assert common(replied, chat(*BASE, called, user("?"))) == len(BASE)


def test_nothing_extends_what_no_client_sends_back_so():
    for chain in (
        chat(*BASE[:3]),  # the engine goes on with the assistant's message
        read(COMPLETIONS, prompt=[1, 2, 3])[0],
    ):
        assert chain.replied(b"reply") is chain
    chain = chat(*BASE)
    assert chain.replied(b"") is chain
    assert chain.replied(b"\xff\xfe") is chain


# --- Turns that the engine stores ---------------------------------------------------------------------------------


def test_what_continues_the_same_stored_turns_is_told_apart_from_all_else():
    def following(key, text="And now?", **more):
        return read(RESPONSES, stored=None if key is None else Stored(key, None), input=text, **more)[0]

    assert following(1) == following(1)
    assert common(following(1), following(2)) == 0
    assert common(following(1), following(None)) == 0
    assert common(following(1, instructions="x"), following(2, instructions="x")) == 1
    assert common(following(1, "a" * 600), following(1, "a" * 600 + "b")) == 1


def test_stored_turns_that_are_known_come_first():
    (begun,) = read(RESPONSES, instructions="Be brief.", input="Hello?")
    known = Stored(1, begun.replied(b"Hi."))
    whole = chat(*BASE)
    (continued,) = read(RESPONSES, stored=known, instructions="Be brief.", input="And now?")
    assert continued.hashes == whole.hashes
    for more in ({"instructions": "Be long."}, {}, {"instructions": "Be brief.", "model": "other"}):
        (other,) = read(RESPONSES, stored=known, input="And now?", **more)
        assert common(other, whole) == 0


def test_a_response_that_is_named_stands_for_all_of_it_whatever_the_request_says():
    (begun,) = read(RESPONSES, instructions="Be brief.", input="Hello?")
    known = Stored(1, begun.replied(b"Hi."), fixed=True)
    (same,) = read(RESPONSES, stored=known, instructions="Be brief.", input="And now?")
    assert same.hashes == chat(*BASE).hashes
    found = [same]
    for more in ({"instructions": "Be long."}, {}, {"instructions": "Be brief.", "model": "other"}):
        (other,) = read(RESPONSES, stored=known, input="And now?", **more)
        # What is named, and not what follows it for others.
        assert [common(other, one) for one in found] == [len(known.chain.hashes)] * len(found)
        found.append(other)
    unfinished = chat(*BASE[:3])
    assert unfinished.state is None
    (after,) = read(RESPONSES, stored=Stored(1, unfinished, fixed=True), input="And now?")
    assert common(after, unfinished) == len(unfinished.hashes) < len(after.hashes)


def test_a_reply_of_which_only_the_name_is_known_is_a_position_without_bytes():
    (before,) = read(RESPONSES, instructions="Be brief.", input="Hello?")
    one, other = before.named(1), before.named(2)
    assert common(one, other) == len(before.hashes) == len(one.hashes) - 1
    assert one.size == before.size == sum(one.sizes)
    (after,) = read(RESPONSES, stored=Stored(1, one), instructions="Be brief.", input="And now?")
    assert common(after, one) == len(one.hashes) < len(after.hashes)
    unfinished = chat(*BASE[:3])
    assert unfinished.named(1) is unfinished


# --- Hostile bodies -----------------------------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "id", "tool_calls", "input", "name", "cache_control"])
            | st.text(max_size=3),
            inner | st.sampled_from(["text", "tool_result", "image", "message", "item_reference"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
BODY_FIELDS = ["messages", "system", "input", "instructions", "prompt", "tools", "functions", "response_format", "text"]
BODY_FIELDS += ["reasoning", "documents", "cache_salt", "chat_template", "output_config"]


@given(
    st.sampled_from([CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/completions?x=1", "/x/v1/messages/"]),
    st.dictionaries(st.sampled_from(BODY_FIELDS), anything, max_size=5),
    st.lists(anything, max_size=10),
)
def test_any_json_is_read_the_same_twice(path, body, turns):
    prompt = parse(path, json.dumps({"messages": turns, "input": turns, "prompt": "x", **body}).encode())
    reader = ChainReader()
    first = reader.read(path, prompt)
    assert reader.read(path, prompt) == first == ChainReader(0).read(path, prompt)
    for chain in first:
        assert len(chain.hashes) == len(chain.sizes)
        chain.replied(b"reply")


def test_a_number_out_of_range_ahead_of_a_conversation_is_taken_as_it_is():
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"a":1e%d}]}'
    one, other = (ChainReader().read(CHAT, parse(CHAT, body % digits))[0] for digits in (999, 998))
    assert common(one, other) == 0


def test_nesting_is_either_read_or_refused():
    for depth in (1, 100, 400, 900, 5_000):
        nested = b"[" * depth + b"]" * depth
        for body in (
            b'{"model":"m","messages":[{"role":"user","content":%b}]}' % nested,
            b'{"model":"m","messages":[%b]}' % nested,
            b'{"model":"m","messages":[],"tools":%b}' % nested,
        ):
            prompt = parse(CHAT, body)
            try:
                ChainReader().read(CHAT, prompt)
            except RecursionError:
                assert depth > 300


def test_a_chain_has_an_end():
    chain = chat(*[user("x")] * (MAX_POSITIONS + 100))
    assert len(chain.hashes) == MAX_POSITIONS
    assert chain.size > sum(chain.sizes)
    assert chain.replied(b"reply") is chain
    exact = chat(*[user("x")] * MAX_POSITIONS)
    assert len(exact.replied(b"reply").hashes) == MAX_POSITIONS


def test_what_is_remembered_is_bounded():
    reader = ChainReader(100_000)
    rng = random.Random(4)
    for _ in range(60):
        read(CHAT, reader, messages=[user(rng.randbytes(10_000).hex()), *[user("x")] * 20])
    assert reader.memory.bytes <= 100_000
    assert reader.memory.evictions


def test_turns_that_were_read_before_are_remembered_once():
    reader = ChainReader()
    history = [user(f"{number}") for number in range(64)]
    read(CHAT, reader, messages=history)
    remembered = len(reader.memory)
    for number in range(3):
        read(CHAT, reader, messages=[*history, user(f"more {number}")])
    assert len(reader.memory) == remembered
