"""A local tokenizer that is compared with an engine: one that agrees, and one that does not."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from picker.core.tokens.prompt import EngineRequest, Served, read_engine_request
from picker.io.tokenize.files import LocalSettings
from picker.io.tokenize.local import Local, LocalTokenizer
from picker.io.tokenize.remote import Remote, Remotely
from picker.io.tokenize.step import Outcome, StepError, Tokens
from picker.io.tokenize.verified import Verified

from .conftest import Serve, Server

DATA = Path(__file__).parents[2] / "data" / "tokenizers"
TINY = Served("tiny")
TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def request(path: str, **body: Any) -> EngineRequest:
    read = read_engine_request(path, json.dumps(body).encode())
    assert isinstance(read, EngineRequest), read
    return read


TEXT = request("/v1/completions", prompt="a")
CHAT = request("/v1/chat/completions", messages=[USER])
TOOLS = request("/v1/chat/completions", messages=[USER], tools=[TOOL])


@pytest.fixture
def local(tmp_path: Path) -> LocalTokenizer:
    (tmp_path / "tokenizer.json").write_bytes((DATA / "byte-level-bpe.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return LocalTokenizer.load(LocalSettings(str(tmp_path)))


Change = Callable[[dict[str, Any], Any], Any]


async def engine(
    serve: Serve, local: LocalTokenizer, change: Change, status: Callable[[], int] = lambda: 200
) -> Server:
    """An engine that tokenizes with the same files, but for `change`."""

    async def answer(asked: web.Request) -> web.Response:
        body = await asked.json()
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        tokens = local.tokenize(request(path, **body))[0].token_ids
        return web.json_response({"tokens": list(change(body, tokens))}, status=status())

    return await serve(answer)


async def outcomes(step: Verified) -> list[Outcome]:
    found = []
    for body in (TEXT, CHAT, TOOLS):
        try:
            await step.tokenize(body, TINY, 5)
        except StepError as error:
            found.append(error.outcome)
        else:
            found.append(Outcome.OK)
    return found


@pytest.mark.parametrize(
    ("change", "after"),
    [
        (lambda _, tokens: tokens, "ok ok ok"),
        (lambda _, tokens: [7, *tokens], "disabled disabled disabled"),
        (lambda body, tokens: [7, *tokens] if "prompt" in body else tokens, "disabled ok ok"),
        (lambda body, tokens: tokens[:-1] if "tools" in body else tokens, "ok ok disabled"),
        (lambda body, tokens: tokens[:-1] if len(body.get("messages", [])) > 3 else tokens, "ok disabled ok"),
    ],
)
async def test_kinds_of_requests_that_differ_are_left_to_the_next_step(
    change: Change, after: str, serve: Serve, local: LocalTokenizer
) -> None:
    server = await engine(serve, local, change)
    own = Local(local)
    async with Remote(Remotely.ENGINE, lambda: [server.target]) as reference:
        step = Verified(own, reference)
        with capture_logs() as logs:
            assert await outcomes(step) == [Outcome.OK] * 3 or step.differs
            assert step._comparing is not None
            assert await step._comparing
        assert await outcomes(step) == [Outcome(outcome) for outcome in after.split()]
        asked = len(server.asked)
        await outcomes(step)
        assert len(server.asked) == asked == 6
        assert {entry["event"] for entry in logs if entry["log_level"] == "error"} == (
            {"tokenizers_differ"} if "disabled" in after else set()
        )
        await step.close()
    own.close()


async def test_an_engine_that_is_not_ready_is_asked_again_later(serve: Serve, local: LocalTokenizer) -> None:
    ready = False
    server = await engine(serve, local, lambda _, tokens: [*tokens, 7], lambda: 200 if ready else 503)
    own = Local(local)
    async with Remote(Remotely.ENGINE, lambda: [server.target]) as reference:
        step = Verified(own, reference)
        await step.tokenize(TEXT, TINY, 5)
        assert step._comparing is not None
        assert not await step._comparing
        await step.tokenize(TEXT, TINY, 5)
        assert len(server.asked) == 1
        ready = True
        step._next = 0
        await step.tokenize(TEXT, TINY, 5)
        assert await step._comparing
        assert await outcomes(step) == [Outcome.DISABLED] * 3
        assert "from token" in step.differs["text"]
        await step.close()
    own.close()


async def test_closing_ends_the_comparison(serve: Serve, local: LocalTokenizer) -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    server, own = await serve(hang), Local(local)
    async with Remote(Remotely.ENGINE, lambda: [server.target]) as reference:
        step = Verified(own, reference)
        await step.tokenize(TEXT, TINY, 5)
        await step.close()
        assert step._comparing is not None
        assert step._comparing.cancelled()
    own.close()


async def test_an_engine_that_is_compared_with_in_vain_is_compared_with_again(local: LocalTokenizer) -> None:
    told: list[tuple[str, str]] = []

    class Engine:
        name = "engine"

        async def tokenize(self, asked: EngineRequest, served: Served, seconds: float) -> list[Tokens]:  # noqa: ARG002
            if len(told) < 2:
                raise RuntimeError("broken")
            return [Tokens(array("I", [7]))]

    own = Local(local)
    step = Verified(own, Engine(), failed=lambda where, error: told.append((where, str(error))), pause=0)
    for _ in range(2):
        assert await step.tokenize(TEXT, TINY, 5) == local.tokenize(TEXT)
        assert step._comparing is not None
        assert not await step._comparing
    assert told == [("compare_tokenizers", "broken")] * 2
    await step.tokenize(TEXT, TINY, 5)
    assert await step._comparing
    assert await outcomes(step) == [Outcome.DISABLED] * 3
    await step.close()
    own.close()
