"""Remote steps against a simulated engine, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from picker.core.endpoints import Endpoint
from picker.core.tokens.prompt import EngineRequest, Served, read_engine_request
from picker.io.tokenize import remote
from picker.io.tokenize.remote import Remote, Remotely, Target, engine_targets
from picker.io.tokenize.step import Outcome, StepError
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.tokenizer import encode, render_chat

from .conftest import Serve, hang

TINY = Served("sim")
USER = {"role": "user", "content": "How are you?"}
RENDER_DISABLED = {
    "error": {
        "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        "type": "PermissionDeniedError",
        "code": 403,
    }
}


def request(path: str = "/v1/chat/completions", **body: Any) -> EngineRequest:
    read = read_engine_request(path, json.dumps(body).encode())
    assert isinstance(read, EngineRequest), read
    return read


async def fine(_: web.Request) -> web.Response:
    return web.json_response({"count": 2, "max_model_len": 10, "tokens": [1, 2], "token_strs": None})


def status(code: int, body: Any) -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body, status=code)

    return answer


async def outcome(targets: Sequence[Target], *, whom: Remotely = Remotely.ENGINE, seconds: float = 2) -> Outcome:
    async with Remote(whom, lambda: targets) as step:
        return await asked(step, seconds)


async def asked(step: Remote, seconds: float = 2) -> Outcome:
    try:
        await step.tokenize(request(messages=[USER]), TINY, seconds)
    except StepError as error:
        return error.outcome
    return Outcome.OK


async def test_a_simulated_engine_tokenizes_texts_and_chats() -> None:
    engine = await start_engine(EngineSimConfig(grace=0.05, loras=("ad-a",)))
    try:
        async with Remote(Remotely.ENGINE, lambda: [Target(engine.url)]) as step:
            texts = await step.tokenize(request("/v1/completions", prompt=["one", "two"]), TINY, 2)
            assert [each.token_ids for each in texts] == [encode("one"), encode("two")]
            chat = await step.tokenize(request(model="ad-a", messages=[USER]), Served("sim", "ad-a"), 2)
            assert chat[0].token_ids == render_chat([("user", "How are you?")])
            open_end = request(messages=[USER], add_generation_prompt=False)
            tokens = await step.tokenize(open_end, TINY, 2)
            assert tokens[0].token_ids == render_chat([("user", "How are you?")], add_generation_prompt=False)
            with pytest.raises(StepError) as caught:
                await step.tokenize(request(messages=[USER]), Served("nobody"), 2)
            assert caught.value.outcome is Outcome.UNSUPPORTED
            assert step.attempts == {"ok": 3, "unsupported": 1}
    finally:
        await engine.close()


async def test_connections_are_kept_and_models_named_as_the_target_names_them(serve: Serve) -> None:
    server = await serve(fine)
    async with Remote(Remotely.SERVICE, lambda: [Target(server.url, "served-name")]) as step:
        for _ in range(20):
            await step.tokenize(request(model="alias", messages=[USER]), TINY, 2)
    assert server.connections == 1
    assert {path for path, _ in server.asked} == {"/tokenize"}
    assert server.asked[0][1] == {"model": "served-name", "messages": [USER], "add_special_tokens": False}


async def test_requests_take_turns_with_targets(serve: Serve) -> None:
    servers = [await serve(fine) for _ in range(3)]
    async with Remote(Remotely.ENGINE, lambda: [server.target for server in servers]) as step:
        for _ in range(6):
            assert await asked(step) is Outcome.OK
    assert [len(server.asked) for server in servers] == [2, 2, 2]


async def garbage(_: web.Request) -> web.Response:
    return web.Response(body=b"\x80garbage", content_type="application/json")


async def cut(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def trickle(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


async def huge(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(1000):
        await response.write(b" " * 100_000)
    return response


FAILURES = {
    "500": (status(500, {"error": {}}), Outcome.ERROR),
    "503": (status(503, {}), Outcome.ERROR),
    "garbage": (garbage, Outcome.ERROR),
    "cut": (cut, Outcome.ERROR),
    "huge": (huge, Outcome.ERROR),
    "redirect": (status(302, {}), Outcome.ERROR),
    "hang": (hang, Outcome.TIMEOUT),
    "trickle": (trickle, Outcome.TIMEOUT),
    "403": (status(403, RENDER_DISABLED), Outcome.DISABLED),
    "404 path": (status(404, {"detail": "Not Found"}), Outcome.DISABLED),
    "404 model": (status(404, {"error": {"message": "The model `x` does not exist."}}), Outcome.UNSUPPORTED),
    "400": (status(400, {"error": {}}), Outcome.UNSUPPORTED),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_every_failure_has_its_outcome_and_the_next_target_is_asked(
    name: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_REPLY_BYTES", 1_000_000)
    handler, expected = FAILURES[name]
    bad, good = await serve(handler), await serve(fine)
    assert await outcome([bad.target], seconds=0.3) is expected
    assert len(bad.asked) == 1
    both = await outcome([bad.target, good.target], seconds=2)
    if expected is Outcome.UNSUPPORTED:
        assert (both, len(good.asked)) == (Outcome.UNSUPPORTED, 0)
    else:
        assert (both, len(good.asked)) == (Outcome.OK, 1)


async def test_a_target_that_is_gone_is_passed_over(serve: Serve) -> None:
    good = await serve(fine)
    assert await outcome([Target("http://127.0.0.1:1"), good.target]) is Outcome.OK
    assert await outcome([Target("http://127.0.0.1:1")]) is Outcome.ERROR
    assert await outcome([Target("nonsense")]) is Outcome.ERROR
    assert await outcome([]) is Outcome.DISABLED


async def test_a_target_that_fails_repeatedly_is_left_alone(serve: Serve) -> None:
    bad, good = await serve(status(500, {})), await serve(fine)
    async with Remote(Remotely.ENGINE, lambda: [bad.target, good.target]) as step:
        with capture_logs() as logs:
            for _ in range(20):
                assert await asked(step) is Outcome.OK
    assert len(bad.asked) == 3
    assert [entry["event"] for entry in logs] == ["tokenizing_target_fails"]
    assert logs[0]["target"] == bad.url


async def test_a_target_that_hangs_is_left_alone_too(serve: Serve) -> None:
    bad = await serve(hang)
    async with Remote(Remotely.ENGINE, lambda: [bad.target]) as step:
        outcomes = [await asked(step, 0.03) for _ in range(6)]
    assert outcomes == [Outcome.TIMEOUT] * 3 + [Outcome.DISABLED] * 3
    assert len(bad.asked) == 3


async def test_a_renderer_that_is_disabled_is_said_once_and_not_asked_again(serve: Serve) -> None:
    server = await serve(status(403, RENDER_DISABLED))
    async with Remote(Remotely.RENDER, lambda: [server.target]) as step:
        with capture_logs() as logs:
            for _ in range(5):
                assert await asked(step) is Outcome.DISABLED
        assert step.attempts == {"disabled": 1}
    assert [path for path, _ in server.asked] == ["/v1/chat/completions/render"]
    assert [entry["event"] for entry in logs] == ["tokenizing_not_offered"]
    assert "--enable-scale-out" in logs[0]["answer"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "documents": [{"title": "t"}]}),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 3}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "x"}]}),
        ("/v1/messages", {"messages": [USER], "tools": [{"name": "f"}], "max_tokens": 1}),
    ],
)
async def test_a_renderer_gets_every_api_at_its_own_path(path: str, body: dict[str, Any], serve: Serve) -> None:
    rendered = {"token_ids": [1, 2, 3], "features": None}
    server = await serve(status(200, [rendered] if path == "/v1/completions" else rendered))
    async with Remote(Remotely.RENDER, lambda: [server.target], headers={"authorization": "Bearer x"}) as step:
        tokens = await step.tokenize(request(path, model="alias", **body), TINY, 2)
    assert [each.token_ids for each in tokens] == [array("I", [1, 2, 3])]
    assert server.asked == [(f"{path}/render", {**body, "model": "sim"})]


async def test_an_attempt_gets_its_share_of_the_time(serve: Serve) -> None:
    slow, good = await serve(hang), await serve(fine)
    async with Remote(Remotely.ENGINE, lambda: [slow.target, good.target]) as step:
        async with asyncio.timeout(5):
            assert await asked(step, 1) is Outcome.OK
        assert step.attempts == {"timeout": 1, "ok": 1}


def test_engines_of_the_pool_are_targets() -> None:
    endpoints = [
        Endpoint("a", "10.0.0.1:8000", model="m"),
        Endpoint("b", "[fd00::1]:9000", engine="SGLang"),
        Endpoint("c", "10.0.0.3:8000", engine="triton"),
    ]
    assert engine_targets(endpoints, {}) == [Target("http://10.0.0.1:8000", "m"), Target("http://[fd00::1]:9000")]
    assert engine_targets(endpoints, {"vllm": 8001, "sglang": 30000}) == [
        Target("http://10.0.0.1:8001", "m"),
        Target("http://[fd00::1]:30000"),
    ]
