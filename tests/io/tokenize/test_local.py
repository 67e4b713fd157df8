"""The local tokenizer against the tokenizers library, and against what a real vLLM made of recorded requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from picker.core.tokens.conversation import ContentFormat
from picker.core.tokens.prompt import EngineRequest, Served, UnsupportedRequestError, read_engine_request
from picker.core.tokens.segments import SegmentPlan
from picker.io.tokenize.files import LocalSettings, TokenizerFiles, TokenizerFilesError
from picker.io.tokenize.local import Away, Local, LocalTokenizer
from picker.io.tokenize.self_check import adversarial_prompts
from picker.io.tokenize.step import Outcome, StepError, Tokens

DATA = Path(__file__).parents[2] / "data"
FAMILIES = sorted(path.stem for path in (DATA / "tokenizers").glob("*.json"))
TINY = Served("tiny")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OF_THE_CAPTURES = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for t in tools %}{{ t | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def directory(tmp_path: Path, tokenizer: bytes | str, **config: Any) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer if isinstance(tokenizer, bytes) else tokenizer.encode())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def load(directory: Path, **settings: Any) -> LocalTokenizer:
    return LocalTokenizer.load(LocalSettings(str(directory), **settings))


def family(name: str) -> bytes:
    return (DATA / "tokenizers" / f"{name}.json").read_bytes()


def request(path: str = "/v1/chat/completions", **body: Any) -> EngineRequest:
    read = read_engine_request(path, json.dumps(body).encode())
    assert isinstance(read, EngineRequest), read
    return read


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def captured() -> Iterator[dict[str, Any]]:
    with gzip.open(DATA / "captures" / "chat-A.jsonl.gz", "rt") as lines:
        yield from (record for line in lines if (record := json.loads(line))["kind"] == "request")


def test_every_recorded_chat_has_the_tokens_that_vllm_gave_it(tmp_path: Path) -> None:
    model = gzip.decompress((DATA / "tokenizers" / "tiny-vllm.json.gz").read_bytes())
    tokenizer = load(directory(tmp_path, model, chat_template=OF_THE_CAPTURES, eos_token="<|im_end|>"))
    assert tokenizer.segments_off == ""
    records = list(captured())
    wrong = []
    for record in records:
        path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[record["api"]]
        if tokenizer.tokenize(request(path, **record["body"])) != [Tokens(array("I", record["prompt_token_ids"]))]:
            wrong.append(record["body"])
    assert len(records) > 50
    assert wrong == []
    assert tokenizer.hits > tokenizer.misses


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_segments_never_change_tokens(name: str, tmp_path: Path) -> None:
    tokenizer = load(directory(tmp_path, family(name)), cache_bytes=20_000)
    whole = Tokenizer.from_str(family(name).decode())
    assert tokenizer.segments_off == ""
    words = st.sampled_from(["<|im_start|>", "<|im_end|>", "user\n", "\n", " Hi", "Hi", "e\u0301", "\u0301", "<|im_"])

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(prompt=st.lists(words | st.text(max_size=4), max_size=12).map("".join), special=st.booleans())
    def check(prompt: str, special: bool) -> None:
        expected = whole.encode(prompt, add_special_tokens=special).ids
        for _ in range(2):
            assert tokenizer.encode(prompt, add_special_tokens=special).tolist() == expected

    check()
    assert tokenizer.hits > 0
    assert tokenizer.segments.bytes <= 20_000


def test_threads_share_a_small_cache_and_change_no_tokens(tmp_path: Path) -> None:
    tokenizer = load(directory(tmp_path, family("unigram-first")), cache_bytes=3_000)
    whole = Tokenizer.from_str(family("unigram-first").decode())
    prompts = list(adversarial_prompts(["<|im_start|>", "<|im_end|>"], Random(3), 200))
    expected = [whole.encode(prompt, add_special_tokens=False).ids for prompt in prompts]

    def run(_: int) -> list[list[int]]:
        return [tokenizer.encode(prompt, add_special_tokens=False).tolist() for prompt in prompts]

    with ThreadPoolExecutor(4) as threads:
        assert all(found == expected for found in threads.map(run, range(8)))
    assert tokenizer.segments.evictions > 0
    assert tokenizer.segments.bytes <= 3_000


def test_a_prompt_that_no_engine_takes_is_not_tokenized(tmp_path: Path) -> None:
    tokenizer = load(directory(tmp_path, family("byte-level-bpe"), chat_template=CHATML))
    for body in (request("/v1/completions", prompt="x" * 8_000_001), request(messages=[user("x" * 8_000_001)])):
        with pytest.raises(UnsupportedRequestError, match="more than 8000000 characters"):
            tokenizer.tokenize(body)


def test_a_grown_conversation_tokenizes_only_what_is_new(tmp_path: Path) -> None:
    tokenizer = load(directory(tmp_path, family("byte-level-bpe"), chat_template=CHATML))
    messages = [user(f"message {number} of many") for number in range(50)]
    tokenizer.tokenize(request(messages=messages))
    before = tokenizer.misses
    tokenizer.tokenize(request(messages=[*messages, {"role": "assistant", "content": "an answer"}, user("and more")]))
    assert tokenizer.misses - before == 2


def test_a_tokenizer_that_cannot_be_proven_is_used_whole(tmp_path: Path) -> None:
    raw = json.loads(family("byte-level-bpe"))
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 905, "content": "only", "single_word": True})
    tokenizer = load(directory(tmp_path, json.dumps(raw)))
    assert "single word" in tokenizer.segments_off
    whole = Tokenizer.from_str(json.dumps(raw))
    text = "<|im_end|>only<|im_end|> only"
    assert tokenizer.encode(text, add_special_tokens=False).tolist() == whole.encode(text).ids
    assert (tokenizer.hits, tokenizer.misses) == (0, 0)


@pytest.mark.parametrize(
    ("ends", "known"),
    [
        ({}, True),
        ({"add_bos_token": True, "add_eos_token": False}, True),
        ({"add_bos_token": False}, False),
        ({"add_bos_token": True, "add_eos_token": True}, False),
    ],
)
def test_special_tokens_are_not_guessed_where_releases_of_transformers_differ(
    ends: dict[str, bool], known: bool, tmp_path: Path
) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", **ends}
    tokenizer = load(directory(tmp_path, family("sentencepiece-bpe"), chat_template=CHATML, **config))
    bos = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<s>")
    text = tokenizer.encode("Hello", add_special_tokens=False).tolist()
    if known:
        assert tokenizer.encode("Hello", add_special_tokens=True).tolist() == [bos, *text]
    else:
        with pytest.raises(UnsupportedRequestError, match="releases of transformers differ"):
            tokenizer.encode("Hello", add_special_tokens=True)
    assert tokenizer.tokenize(request(messages=[user("x")]))


def test_texts_get_special_tokens_unless_told_otherwise_and_chats_only_if_told(tmp_path: Path) -> None:
    tokenizer = load(directory(tmp_path, family("sentencepiece-bpe"), chat_template=CHATML))
    bos = tokenizer.encode("", add_special_tokens=True)

    def ids(path: str, **body: Any) -> array[int]:
        return tokenizer.tokenize(request(path, **body))[0].token_ids

    assert ids("/v1/completions", prompt="a") == bos + ids("/v1/completions", prompt="a", add_special_tokens=False)
    chat = "/v1/chat/completions"
    assert ids(chat, messages=[user("a")], add_special_tokens=True) == bos + ids(chat, messages=[user("a")])


def test_several_prompts_leave_token_ids_alone(tmp_path: Path) -> None:
    tokenizer = load(directory(tmp_path, family("wordpiece")))
    found = tokenizer.tokenize(request("/v1/completions", prompt=["a", [1, 2], "b"]))
    assert [each.token_ids for each in found] == [tokenizer.encode(text, add_special_tokens=True) for text in "ab"]


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    def chat(**extra: Any) -> str:
        tokenizer = load(tmp_path, **template)
        ids = tokenizer.tokenize(request(messages=[user("x")], **extra))[0].token_ids
        return Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids.tolist(), skip_special_tokens=False)

    template: dict[str, Any] = {}
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    directory(tmp_path, family("byte-level-bpe"), chat_template=named)
    assert chat() == "plain"
    assert chat(tools=[{"type": "function", "function": {"name": "f"}}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert chat() == "file <|im_end|>"
    (tmp_path / "other.jinja").write_text("other")
    template = {"chat_template": str(tmp_path / "other.jinja")}
    assert chat() == "other"


def test_models_that_engines_render_without_a_template_have_no_chats(tmp_path: Path) -> None:
    directory(tmp_path, family("byte-level-bpe"), chat_template=CHATML)
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    with pytest.raises(UnsupportedRequestError, match="no chat template"):
        load(tmp_path).tokenize(request(messages=[user("x")]))


def test_a_mistral_tokenizer_beside_its_converted_one_is_what_engines_use(tmp_path: Path) -> None:
    directory(tmp_path, family("byte-level-bpe"), chat_template=CHATML)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(UnsupportedRequestError, match="no chat template"):
        load(tmp_path).tokenize(request(messages=[user("x")]))
    (tmp_path / "own.jinja").write_text(CHATML)
    assert load(tmp_path, chat_template=str(tmp_path / "own.jinja")).tokenize(request(messages=[user("x")]))


def test_flags_of_the_engine_change_prompts(tmp_path: Path) -> None:
    source = "{{ tools }} {{ mood }} {{ messages[0].content }}"
    directory(tmp_path, family("byte-level-bpe"), chat_template=source)
    tools = [{"type": "function", "function": {"name": "f"}}]

    def chat(settings: dict[str, Any], **body: Any) -> str:
        ids = load(tmp_path, **settings).tokenize(request(messages=[user("x")], **body))[0].token_ids
        return Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids.tolist())

    assert chat({}) == "None  x"
    assert chat({"chat_template_kwargs": {"mood": "calm"}}) == "None calm x"
    assert chat({"chat_template_kwargs": {"mood": "calm"}}, chat_template_kwargs={"mood": "wild"}) == "None wild x"
    assert chat({"content_format": ContentFormat.OPENAI}) == "None  [{'type': 'text', 'text': 'x'}]"
    assert "'name': 'f'" in chat({}, tools=tools, tool_choice="none")
    assert chat({"hide_tools": True}, tools=tools, tool_choice="none") == "None  x"
    assert "'name': 'f'" in chat({"hide_tools": True}, tools=tools, tool_choice="auto")


def test_chats_that_sglang_reads_its_own_way_are_left_to_it(tmp_path: Path) -> None:
    source = "{% for m in messages %}{% for c in m.content %}{{ c }} {% endfor %}{% endfor %}"
    tokenizer = load(directory(tmp_path, family("byte-level-bpe"), chat_template=source), engine="sglang")
    plain = tokenizer.tokenize(request(messages=[user("xyz")]))
    assert plain == [Tokens(tokenizer.encode("x y z ", add_special_tokens=False))]
    for body in (
        request(messages=[user("x")], tools=[{"type": "function", "function": {"name": "f"}}]),
        request(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        request(messages=[user("x")], add_generation_prompt=False, continue_final_message=True),
    ):
        with pytest.raises(UnsupportedRequestError, match="SGLang"):
            tokenizer.tokenize(body)


def test_a_plan_that_is_wrong_is_found_out_before_it_is_used() -> None:
    whole = Tokenizer.from_str(family("unigram-first").decode())
    wrong = SegmentPlan(cuts=frozenset({"<|im_end|>"}))
    tokenizer = LocalTokenizer(TokenizerFiles(whole, wrong), LocalSettings(""))
    assert tokenizer.segments_off.startswith("self-check")
    text = "Hello<|im_end|>Hello"
    assert tokenizer.encode(text, add_special_tokens=False).tolist() == whole.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json does not exist"),
        ({"tokenizer.json": "{"}, "tokenizer.json is no JSON"),
        ({"tokenizer.json": "[]"}, "tokenizer.json holds no object"),
        ({"tokenizer.json": '{"model": {}}'}, "tokenizer.json: "),
        ({"tokenizer_config.json": "nonsense"}, "tokenizer_config.json is no JSON"),
        ({"tokenizer_config.json": '{"eos_token": "<new>"}'}, "names the token '<new>'"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"7": {"content": "<x>"}}}'}, "names the token '<x>'"),
        ({"chat_template.jinja": "{% for %}"}, "chat template cannot be used"),
        ({"tokenizer_config.json": '{"chat_template": [1]}'}, "chat template cannot be used"),
    ],
)
def test_files_that_cannot_be_used_are_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    if files and "tokenizer.json" not in files:
        directory(tmp_path, family("byte-level-bpe"))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerFilesError, match=message):
        load(tmp_path)


def test_a_template_that_is_not_there_is_no_default(tmp_path: Path) -> None:
    directory(tmp_path, family("byte-level-bpe"), chat_template=CHATML)
    with pytest.raises(TokenizerFilesError, match="correct the path"):
        load(tmp_path, chat_template=str(tmp_path / "typo.jinja"))


class Held(LocalTokenizer):
    """A tokenizer whose threads wait until they are let go."""

    let_go: threading.Event

    def tokenize(self, request: EngineRequest, away: Away = nullcontext) -> list[Tokens]:
        self.let_go.wait(5)
        return super().tokenize(request, away)


async def test_requests_that_wait_too_long_or_are_too_many_end_with_a_reason(tmp_path: Path) -> None:
    tokenizer = Held.load(LocalSettings(str(directory(tmp_path, family("byte-level-bpe"), chat_template=CHATML))))
    assert isinstance(tokenizer, Held)
    tokenizer.let_go = threading.Event()
    local = Local(tokenizer, threads=1, max_waiting=1)
    chat = request(messages=[user("x")])

    async def outcome(seconds: float) -> Outcome:
        try:
            await local.tokenize(chat, TINY, seconds)
        except StepError as error:
            return error.outcome
        return Outcome.OK

    first = asyncio.create_task(outcome(5))
    await asyncio.sleep(0)
    assert await outcome(0.01) is Outcome.TIMEOUT
    second = asyncio.create_task(outcome(5))
    await asyncio.sleep(0)
    assert await outcome(5) is Outcome.OVERLOADED
    tokenizer.let_go.set()
    assert await first is await second is Outcome.OK
    assert await outcome(5) is Outcome.OK
    local.close()
    assert await outcome(5) is Outcome.ERROR


async def test_what_the_tokenizer_cannot_do_is_unsupported(tmp_path: Path) -> None:
    local = Local(load(directory(tmp_path, family("byte-level-bpe"))))
    for body in (request(messages=[user("x")]), request("/v1/completions", prompt="a", truncate_prompt_tokens=5)):
        with pytest.raises(StepError) as caught:
            await local.tokenize(body, TINY, 5)
        assert caught.value.outcome is Outcome.UNSUPPORTED
    local.close()


class Told:
    """What was said of a request's precedence."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def enter(self) -> None:
        self.said.append("enter")

    @contextmanager
    def away(self) -> Iterator[None]:
        self.said.append("away")
        yield
        self.said.append("back")

    def end(self) -> None:
        self.said.append("end")


@pytest.mark.parametrize(
    ("body", "meanwhile"),
    [
        (request("/v1/completions", prompt="a b " * 1000), ["away", "back"]),
        (request("/v1/completions", prompt="a b"), []),  # not worth while
        (request("/v1/completions", prompt="a", truncate_prompt_tokens=5), []),
    ],
    ids=["long", "short", "unsupported"],
)
async def test_a_request_has_precedence_but_while_it_leaves_the_interpreter_to_others(
    tmp_path: Path, body: EngineRequest, meanwhile: list[str]
) -> None:
    told: list[Told] = []

    def precedence() -> Told:
        told.append(Told())
        return told[-1]

    local = Local(load(directory(tmp_path, family("byte-level-bpe"))), precedence=precedence)
    with suppress(StepError):
        await local.tokenize(body, TINY, 5)
    local.close()
    (one,) = told
    said = [what for what in one.said if what != "enter"]  # the loop and the thread both say so
    assert one.said[0] == "enter"
    assert said == [*meanwhile, "end"]


async def test_the_loop_goes_on_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    step = Local(load(directory(tmp_path, family(FAMILIES[0]))))
    words = " ".join("".join(Random(number).choices("etaoinshr", k=6)) for number in range(60_000))
    tokenizing = asyncio.ensure_future(step.tokenize(request("/v1/completions", prompt=words), TINY, 60))
    turns = 0
    while not tokenizing.done():
        await asyncio.sleep(0.001)
        turns += 1
    step.close()
    assert (await tokenizing)[0].token_ids
    assert turns > 20
