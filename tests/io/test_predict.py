"""`POST /v1/cache/predict` over HTTP: the answer of seed 003, who may ask, and what is refused."""

from __future__ import annotations

import json
from array import array

import aiohttp
import pytest
from aiohttp import web

from picker.core.block_index.index import BlockIndex
from picker.core.kv_events.events import BlockRemoved, BlockStored, EventBatch
from picker.core.tokens.prompt import ModelNames
from picker.io.kvcache.oracle import EngineHolder, Held, Oracle
from picker.io.predict import Gate, PredictSettings, create_predict_app
from picker.io.tokenize.chain import ChainSettings, TokenizerChain
from picker.io.tokenize.step import Outcome, StepError, Tokens


class Step:
    """One token for each byte of a text or a message."""

    name = "bytes"

    def __init__(self) -> None:
        self.fails = 0

    async def tokenize(self, request, served, seconds):  # noqa: ARG002
        if self.fails:
            self.fails -= 1
            raise StepError(Outcome.TIMEOUT, "too slow")
        texts = request.prompts or [message["content"] for message in request.field("messages") or ()]
        return [Tokens(array("I", list(text.encode()))) for text in texts if isinstance(text, str)]


class Fleet:
    """Two pods of which one holds something; `away` is what an index does that does not answer."""

    block_size = 16

    def __init__(self) -> None:
        self.away = False

    async def held(self, prompts):
        if self.away:
            return None
        tokens = min(len(prompts[0].token_ids) // 16 * 16, 2048)
        return [Held("vllm-1", 0, 0, complete=False), Held("vllm-0", tokens, tokens // 16, complete=True)]


@pytest.fixture
async def serve():
    runners = []

    async def start(holder, step=None, **settings):
        chain = TokenizerChain([step or Step()], ChainSettings(names=ModelNames(("m",))))
        gate = Gate(PredictSettings(**settings))
        app = create_predict_app(Oracle(lambda: chain, lambda: holder), gate, lambda: {"engines": []})
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}", gate

    yield start
    for runner in runners:
        await runner.cleanup()


async def ask(url: str, body, headers=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.request("POST", f"{url}/v1/cache/predict", data=data, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_the_answer_of_the_seed(serve):
    url, gate = await serve(Fleet())
    status, answer = await ask(url, {"model": "m", "messages": [{"role": "user", "content": "x" * 4096}]})
    assert status == 200
    assert answer == {
        "predicted_cached_tokens": 2048,
        "total_prompt_tokens": 4096,
        "blocks_total": 256,
        "blocks_cached": 128,
        "cache_hit_ratio": 0.5,
        "pod_affinities": [
            {"pod_id": "vllm-0", "cached_blocks": 128, "cached_tokens": 2048, "complete": True},
            {"pod_id": "vllm-1", "cached_blocks": 0, "cached_tokens": 0, "complete": False},
        ],
    }
    assert gate.counts["ok"] == 1


async def test_an_engine_by_its_events(serve):
    index = BlockIndex()
    index.open(0, "", 1.0)
    holder = EngineHolder(index, "pod.ns", lambda: True)
    url, _ = await serve(holder)
    ids = list(range(64))
    event = BlockStored((1, 2, 3, 4), None, tuple(ids), 16)
    salted = BlockStored((5, 6), None, tuple(ids[:32]), 16, cache_salt="s", extra_keys=(("s",), None))
    adapter = BlockStored((7,), None, tuple(ids[:16]), 16, lora_name="a", extra_keys=(("a",),))
    index.apply(0, "", EventBatch(0.0, (event, salted, adapter)), 2.0)

    async def cached(**body):
        return (await ask(url, body))[1]["predicted_cached_tokens"]

    assert await cached(token_ids=[*ids, 1]) == 64
    assert await cached(token_ids=ids) == 48  # the last token is always computed
    assert await cached(model="m", prompt=[*ids, 1]) == 64
    assert await cached(model="m", prompt=[*ids, 1], cache_salt="s") == 32
    assert await cached(model="a", prompt=[*ids, 1]) == 16
    assert await cached(model="b", prompt=[*ids, 1]) == 0
    assert await cached(model="m", prompt=[*ids, 1], prompt_logprobs=0) == 0
    assert await cached(model="m", prompt=[[*ids, 1], ids]) == 112


async def test_hashes_of_blocks_are_given_and_taken(serve):
    """Those of Kthena's documentation; and whatever the engine calls its blocks."""
    index = BlockIndex()
    index.open(0, "", 1.0)
    url, gate = await serve(EngineHolder(index, "pod.ns", lambda: True, block_size=4))

    async def with_hashes(protocol, **body):
        async with aiohttp.request("POST", f"{url}/v1/cache/predict?hashes={protocol}", json=body) as answer:
            return answer.status, await answer.json()

    status, answer = await with_hashes("kthena", token_ids=[1, 2, 3, 4, 5, 6, 7, 8])
    assert (status, answer["block_hashes"]) == (200, [["4233425515844289900", "929962052233473060"]])
    status, answer = await with_hashes("kthen", token_ids=[1])
    assert (status, answer["error"]["message"]) == (400, "hashes='kthen': did you mean \"kthena\"?")

    names = (2**64 - 1, 7, 8)
    index.apply(0, "", EventBatch(0.0, (BlockStored(names, None, tuple(range(12)), 4),)), 2.0)
    asked = {"model": "m", "block_hashes": [str(2**64 - 1), 7, 9, 8]}
    status, answer = await ask(url, asked)
    assert status == 200
    assert (answer["predicted_cached_tokens"], answer["blocks_cached"], answer["blocks_total"]) == (8, 2, 4)
    index.apply(0, "", EventBatch(0.0, (BlockRemoved((2**64 - 1,)),)), 2.0)
    assert (await ask(url, asked))[1]["predicted_cached_tokens"] == 0
    windows = BlockStored(names, None, tuple(range(12)), 4, group_idx=1, kv_cache_spec_sliding_window=8)
    index.apply(0, "", EventBatch(0.0, (BlockStored(names, None, tuple(range(12)), 4), windows)), 2.0)
    assert (await ask(url, asked))[1]["predicted_cached_tokens"] == 0  # hashes do not say what windows need
    assert gate.counts["ok"] == 4


@pytest.mark.parametrize("hashes", [[], [-1], [2**64], ["x"], ["1" * 30], ["-1"], ["\u0663"]])
async def test_hashes_that_are_none(serve, hashes):
    url, _ = await serve(EngineHolder(BlockIndex(), "pod.ns", lambda: True))
    status, answer = await ask(url, {"model": "m", "block_hashes": hashes})
    assert status == 400
    assert answer["error"]["message"].startswith("block_hashes: ")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        {"block_hashes": 5},
        {"block_hashes": [1.5]},
        b"[]",
        b"{",
        {"model": "m"},
        {"model": "m", "prompt": ""},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": "text"},
        {"token_ids": [[1], [2]]},
        {"model": "m", "prompt": {"a": 1}},
        b"[" * 100_000,
        b'{"messages":' + b"[" * 100_000,
    ],
)
async def test_bodies_that_are_no_requests(serve, body):
    url, _ = await serve(Fleet())
    status, answer = await ask(url, body)
    assert status == 400, answer
    assert set(answer["error"]) == {"message", "code"}


async def test_a_prompt_that_takes_its_time_is_waited_for(serve):
    step = Step()
    url, _ = await serve(Fleet(), step)
    step.fails = 4
    assert (await ask(url, {"prompt": "abc"}))[0] == 200


async def test_what_cannot_be_known_now_is_503(serve):
    fleet, step = Fleet(), Step()
    url, gate = await serve(fleet, step)
    step.fails = 5
    assert (await ask(url, {"prompt": "abc"}))[0] == 503
    fleet.away = True
    assert (await ask(url, {"prompt": "abd"}))[0] == 503
    fleet.away = False
    assert (await ask(url, {"prompt": "abd"}))[0] == 200
    assert gate.counts["failed"] == 2
    url, _ = await serve(None)
    assert (await ask(url, {"prompt": "abc"}))[0] == 503


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("secret", 401),
        ("Bearer wrong", 401),
        ("Basic secret", 401),
        ("Bearer secret", 200),
        ("bearer  secret", 200),
    ],
)
async def test_a_token_is_asked_for(serve, header, status):
    url, gate = await serve(Fleet(), token="secret")
    headers = {} if header is None else {"Authorization": header}
    assert (await ask(url, {"prompt": "abc"}, headers))[0] == status
    async with aiohttp.request("GET", f"{url}/stats", headers=headers) as answer:
        assert answer.status == status
    async with aiohttp.request("GET", f"{url}/health") as answer:
        assert await answer.json() == {"status": "ok"}
    assert gate.counts["unauthorized"] == (2 if status == 401 else 0)


async def test_more_than_so_many_a_second_are_turned_away(serve):
    url, gate = await serve(Fleet())
    now = 100.0
    gate.__init__(PredictSettings(per_second=3), lambda: now)
    assert [(await ask(url, {"prompt": "abc"}))[0] for _ in range(5)] == [200, 200, 200, 429, 429]
    now += 0.4
    assert [(await ask(url, {"prompt": "abc"}))[0] for _ in range(2)] == [200, 429]
    assert gate.counts["rate_limited"] == 3


async def test_less_than_one_a_second(serve):
    url, gate = await serve(Fleet())
    now = 100.0
    gate.__init__(PredictSettings(per_second=0.5), lambda: now)
    now += 2.0
    assert [(await ask(url, {"prompt": "abc"}))[0] for _ in range(2)] == [200, 429]


async def test_other_machines_are_kept_out_where_only_this_one_may_ask(serve, monkeypatch):
    url, gate = await serve(Fleet(), loopback_only=True)
    assert (await ask(url, {"prompt": "abc"}))[0] == 200
    for remote, status in (("10.0.0.1", 403), ("::ffff:127.0.0.1", 200), ("::1", 200), ("", 403)):
        monkeypatch.setattr(web.Request, "remote", remote)
        assert (await ask(url, {"prompt": "abc"}))[0] == status
    assert gate.counts["forbidden"] == 2
