"""The chain of steps: order, deadlines, its cache, and one tokenizing for many equal requests."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from picker.core.tokens.prompt import EngineRequest, ModelNames, Served, TokenPrompt, read_engine_request
from picker.io.tokenize.chain import ChainSettings, Tokenized, TokenizerChain
from picker.io.tokenize.files import LocalSettings
from picker.io.tokenize.local import Local, LocalTokenizer
from picker.io.tokenize.remote import Remote, Remotely, Target
from picker.io.tokenize.step import Outcome, StepError, Tokens
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.tokenizer import encode, render_chat

from .conftest import Serve

DATA = Path(__file__).parents[2] / "data" / "tokenizers"
NAMES = ModelNames(base=("sim",), aliases={"public": "sim"})
USER = {"role": "user", "content": "How are you?"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}


def request(path: str = "/v1/completions", **body: Any) -> EngineRequest:
    read = read_engine_request(path, json.dumps(body).encode())
    assert isinstance(read, EngineRequest), read
    return read


class Characters:
    """A step that makes a token of each character, after a while."""

    def __init__(self, name: str = "characters", seconds: float = 0, error: Exception | None = None) -> None:
        self.name = name
        self.calls = 0
        self._seconds = seconds
        self._error = error

    async def tokenize(self, request: EngineRequest, served: Served, seconds: float) -> list[Tokens]:  # noqa: ARG002
        self.calls += 1
        try:
            async with asyncio.timeout(seconds):
                await asyncio.sleep(self._seconds)
        except TimeoutError:
            raise StepError(Outcome.TIMEOUT, "too slow") from None
        if self._error is not None:
            raise self._error
        return [Tokens(array("I", map(ord, text))) for text in request.prompts if isinstance(text, str)]


def chain(*steps: Any, **settings: Any) -> TokenizerChain:
    return TokenizerChain(steps, ChainSettings(names=NAMES, **settings))


def ids(tokenized: Tokenized) -> list[list[int]]:
    return [prompt.token_ids.tolist() for prompt in tokenized.prompts]


async def test_token_ids_need_no_step() -> None:
    step = Characters()
    tokenizers = chain(step)
    found = await tokenizers.tokenize(request(prompt=[[1, 2], [3]], model="ad-a", cache_salt="s", prompt_logprobs=1))
    assert found.prompts == tuple(
        TokenPrompt(array("I", tokens), "sim", "ad-a", "s", reads_cache=False) for tokens in ([1, 2], [3])
    )
    assert (found.source, step.calls) == ("request", 0)
    assert tokenizers.counts == {("request", "ok"): 1}


async def test_texts_and_token_ids_keep_their_order() -> None:
    found = await chain(Characters()).tokenize(request(prompt=["ab", [7], "c"]))
    assert ids(found) == [[97, 98], [7], [99]]


async def test_steps_are_tried_in_order_until_one_can() -> None:
    steps = [
        Characters("one", error=StepError(Outcome.UNSUPPORTED, "cannot")),
        Characters("two", error=RuntimeError("a fault of ours")),
        Characters("three"),
        Characters("four"),
    ]
    tokenizers = chain(*steps)
    found = await tokenizers.tokenize(request(prompt="a"))
    assert (ids(found), found.source, found.reason) == ([[97]], "three", None)
    assert tokenizers.counts == {("one", "unsupported"): 1, ("two", "error"): 1, ("three", "ok"): 1}
    assert steps[3].calls == 0


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([], Outcome.DISABLED),
        ([Characters("a", error=StepError(Outcome.DISABLED, "x"))], Outcome.DISABLED),
        ([Characters("a", error=StepError(Outcome.DISABLED, "x")), Characters("b", error=KeyError())], Outcome.ERROR),
        ([Characters("a", seconds=5)], Outcome.TIMEOUT),
    ],
)
async def test_without_tokens_the_last_outcome_is_the_reason(steps: list[Characters], reason: Outcome) -> None:
    tokenizers = chain(*steps, step_deadline=0.02)
    assert await tokenizers.tokenize(request(prompt="a")) == Tokenized(reason=reason)
    assert tokenizers.counts["chain", reason] == 1
    assert len(tokenizers.cache) == 0


async def test_a_slow_step_leaves_time_for_the_next_and_all_end_by_the_deadline() -> None:
    tokenizers = chain(Characters("slow", seconds=5), Characters("fast"), deadline=2, step_deadline=0.02)
    assert ids(await tokenizers.tokenize(request(prompt="a"))) == [[97]]
    slow = [Characters(f"slow-{number}", seconds=5) for number in range(9)]
    tokenizers = chain(*slow, deadline=0.1, step_deadline=0.04)
    started = time.monotonic()
    assert (await tokenizers.tokenize(request(prompt="a"))).reason is Outcome.TIMEOUT
    assert time.monotonic() - started < 1
    assert sum(step.calls for step in slow) <= 3


async def test_a_burst_of_equal_requests_is_tokenized_once() -> None:
    step = Characters(seconds=0.02)
    tokenizers = chain(step, deadline=5, step_deadline=5)
    bodies = [request(prompt="abc", model="public", cache_salt=f"tenant-{number}") for number in range(64)]
    found = await asyncio.gather(*map(tokenizers.tokenize, bodies))
    assert step.calls == 1
    assert [each.prompts[0].cache_salt for each in found] == [f"tenant-{number}" for number in range(64)]
    assert {tuple(each.prompts[0].token_ids) for each in found} == {(97, 98, 99)}
    assert tokenizers.counts == {("characters", "ok"): 1, ("joined", "ok"): 63}
    again = await tokenizers.tokenize(request(prompt="abc", temperature=0.5))
    assert (ids(again), again.source, step.calls) == ([[97, 98, 99]], "cache", 1)


async def test_adapters_share_tokens_but_not_caches() -> None:
    step = Characters()
    tokenizers = chain(step)
    base, adapter = [await tokenizers.tokenize(request(prompt="a", model=model)) for model in ("sim", "ad-a")]
    assert step.calls == 1
    assert [base.prompts[0].lora, adapter.prompts[0].lora] == [None, "ad-a"]


async def test_other_models_and_other_fields_are_other_prompts() -> None:
    step = Characters()
    tokenizers = TokenizerChain([step], ChainSettings())
    for body in ({"model": "a"}, {"model": "b"}, {"model": "a", "add_special_tokens": False}, {"model": "a"}):
        await tokenizers.tokenize(request(prompt="x", **body))
    assert step.calls == 3


async def test_the_cache_is_bounded() -> None:
    tokenizers = chain(Characters(), cache_bytes=5_000)
    for number in range(100):
        await tokenizers.tokenize(request(prompt=f"{number:04}"))
    assert 0 < tokenizers.cache.bytes <= 5_000
    assert tokenizers.cache.evictions == 100 - len(tokenizers.cache)
    await tokenizers.tokenize(request(prompt="x" * 5_000))
    assert len(tokenizers.cache) > 1


async def test_a_caller_that_goes_away_takes_nothing_from_the_others() -> None:
    step = Characters(seconds=0.05)
    tokenizers = chain(step, deadline=5, step_deadline=5)
    callers = [asyncio.create_task(tokenizers.tokenize(request(prompt="a"))) for _ in range(3)]
    await asyncio.sleep(0.01)
    callers[0].cancel()
    assert ids(await callers[1]) == ids(await callers[2]) == [[97]]
    assert callers[0].cancelled()
    assert step.calls == 1


async def test_errors_are_not_kept() -> None:
    step = Characters(error=StepError(Outcome.ERROR, "once"))
    tokenizers = chain(step)
    assert (await tokenizers.tokenize(request(prompt="a"))).reason is Outcome.ERROR
    step._error = None
    assert ids(await tokenizers.tokenize(request(prompt="a"))) == [[97]]


async def test_local_then_render_then_engine(tmp_path: Path, serve: Serve) -> None:
    """Real steps: the local tokenizer has no template and no eyes, the renderer is disabled, the engine remains."""
    (tmp_path / "tokenizer.json").write_bytes((DATA / "wordpiece.json").read_bytes())
    local = Local(LocalTokenizer.load(LocalSettings(str(tmp_path))))

    async def disabled(_: web.Request) -> web.Response:
        return web.json_response({"error": {"code": 403}}, status=403)

    renderer = await serve(disabled)
    engine = await start_engine(EngineSimConfig(grace=0.05))
    try:
        async with (
            Remote(Remotely.RENDER, lambda: [renderer.target]) as render,
            Remote(Remotely.ENGINE, lambda: [Target(engine.url)]) as ask,
        ):
            tokenizers = chain(local, render, ask, deadline=10, step_deadline=5)
            text = await tokenizers.tokenize(request(prompt="Hello"))
            assert text.source == "local"
            assert text.prompts[0].token_ids == local.tokenizer.encode("Hello", add_special_tokens=True)
            chat = await tokenizers.tokenize(request("/v1/chat/completions", messages=[USER], model="public"))
            assert (chat.source, chat.reason) == ("engine", None)
            assert chat.prompts == (TokenPrompt(render_chat([("user", "How are you?")]), "sim"),)
            image = await tokenizers.tokenize(request("/v1/chat/completions", messages=[IMAGE]))
            assert (image.prompts, image.reason) == ((), Outcome.UNSUPPORTED)
            assert tokenizers.counts == {
                ("local", "ok"): 1,
                ("local", "unsupported"): 2,
                ("render", "disabled"): 2,
                ("engine", "ok"): 1,
                ("engine", "unsupported"): 1,
                ("chain", "unsupported"): 1,
            }
            assert len(renderer.asked) == 1
            tokenizers = chain(ask, deadline=10, step_deadline=5)
            assert ids(await tokenizers.tokenize(request(prompt="x y z"))) == [encode("x y z").tolist()]
    finally:
        local.close()
        await engine.close()
