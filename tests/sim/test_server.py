"""The served engine through real HTTP: every API, streaming, faults, disconnects, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from picker.sim.config import EngineSimConfig
from picker.sim.faults import Fault
from picker.sim.launch import RunningEngine, start_engine
from picker.sim.limits import EngineLimits, StepCost

FAST = StepCost(speed=200)
SLOW = StepCost(speed=0.5)  # 32 ms a step: time to look in the middle of an answer
LONG = "x" * 400  # 100 tokens, 6 full blocks of 16


class Client:
    def __init__(self, engine: RunningEngine, session: aiohttp.ClientSession) -> None:
        self.engine, self.session = engine, session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.engine.url + path, json=body) as response:
            assert response.headers["x-engine"] == "engine-0"
            return response.status, await response.json()

    async def ok(self, path: str, **body: Any) -> Any:
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def events(self, path: str, **body: Any) -> list[tuple[str | None, Any]]:
        """Return the (event name, data) pairs of a streamed answer; data is parsed unless it is [DONE]."""
        async with self.session.post(self.engine.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        out = []
        for block in text.removesuffix("\n\n").split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            data = fields["data"]
            out.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
        return out

    async def get(self, path: str) -> str:
        async with self.session.get(self.engine.url + path) as response:
            assert response.status == 200
            return await response.text()

    async def metrics(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(await self.get("/metrics")):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return samples

    async def until(self, **wanted: Any) -> dict[str, Any]:
        """Wait until the engine's statistics have these values."""
        async with asyncio.timeout(5):
            while True:
                stats = self.engine.stats()
                if all(stats[name] == value for name, value in wanted.items()):
                    return stats
                await asyncio.sleep(0.005)


async def read_into(received: bytearray, response: aiohttp.ClientResponse) -> None:
    async for data in response.content.iter_any():
        received += data


@asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[Client]:
    engine = await start_engine(EngineSimConfig(**{"cost": FAST, "grace": 0.05, **settings}))
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(engine, session)
    finally:
        await engine.close()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serve(loras=("ad-a", "ad-b")) as client:
        yield client


async def test_a_completion_reports_what_came_from_the_cache(client: Client) -> None:
    cold = await client.ok("/v1/completions", model="sim", prompt=LONG, max_tokens=5)
    warm = await client.ok("/v1/completions", model="sim", prompt=LONG, max_tokens=5)
    assert cold["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "total_tokens": 105,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    assert cold["object"] == "text_completion"
    assert cold["model"] == "sim"
    assert cold["choices"][0]["finish_reason"] == "length"
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"] != ""
    assert client.engine.stats()["cached_tokens"] == 96


async def test_token_ids_are_a_prompt_too_and_several_prompts_get_several_choices(client: Client) -> None:
    ids = list(range(1000, 1040))
    one = await client.ok("/v1/completions", prompt=ids)
    assert (one["usage"]["prompt_tokens"], one["usage"]["completion_tokens"]) == (40, 16)
    two = await client.ok("/v1/completions", prompt=[ids, ids[:33]], max_tokens=2)
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["usage"]["prompt_tokens"] == 73
    assert two["usage"]["completion_tokens"] == 4
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    texts = await client.ok("/v1/completions", prompt=["abcdefgh", "abcd"], max_tokens=1)
    assert (len(texts["choices"]), texts["usage"]["prompt_tokens"]) == (2, 3)


async def test_a_conversation_finds_its_earlier_turns_and_answers_in_the_cache(client: Client) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": LONG},
        {"role": "user", "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "question"}]},
    ]
    first = await client.ok("/v1/chat/completions", model="sim", messages=messages, max_completion_tokens=64)
    assert first["object"] == "chat.completion"
    assert first["usage"]["completion_tokens"] == 64
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    second = await client.ok("/v1/chat/completions", model="sim", messages=messages)
    known = first["usage"]["total_tokens"] - 1  # the last token of an answer is not computed
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16


async def test_a_streamed_completion_is_the_same_text_in_pieces(client: Client) -> None:
    whole = await client.ok("/v1/completions", prompt=LONG, max_tokens=8)
    events = await client.events("/v1/completions", prompt=LONG, max_tokens=8)
    assert events[-1] == (None, "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_streaming_usage_comes_in_the_last_chunk_or_in_every_one(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await client.events("/v1/completions", prompt=[LONG, "abcd"], max_tokens=4, stream_options=options)
    *chunks, last = [data for _, data in events[:-1]]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 101,
        "completion_tokens": 8,
        "total_tokens": 109,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for index, prompt_tokens in enumerate((100, 1)):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert {usage["prompt_tokens"] for usage in usages} == {prompt_tokens}
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(set(counts))
        assert counts[-1] == 4


async def test_a_streamed_chat_begins_with_the_role(client: Client) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "max_tokens": 6}
    whole = await client.ok("/v1/chat/completions", **body)
    events = await client.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    chunks = [data for _, data in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_responses_have_their_own_shape_of_usage_and_events(client: Client) -> None:
    body = {"model": "sim", "instructions": LONG, "input": "question", "max_output_tokens": 4}
    await client.ok("/v1/responses", **body)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "question"}]}]
    whole = await client.ok("/v1/responses", **{**body, "input": items})
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 112}
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + 4
    text = whole["output"][0]["content"][0]["text"]
    events = await client.events("/v1/responses", **body)
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[0][0] == "response.created"
    assert "".join(data["delta"] for name, data in events if name == "response.output_text.delta") == text
    assert events[-1][0] == "response.completed"
    assert events[-1][1]["response"]["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_can_be_named_by_a_later_request(client: Client, stream: bool) -> None:
    async def ask(**body: Any) -> tuple[str, str, int, int]:
        if stream:
            answer = (await client.events("/v1/responses", max_output_tokens=20, **body))[-1][1]["response"]
        else:
            answer = await client.ok("/v1/responses", max_output_tokens=20, **body)
        usage = answer["usage"]
        text = answer["output"][0]["content"][0]["text"]
        return answer["id"], text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    first, text, before, _ = await ask(input=LONG)
    second, _, tokens, cached = await ask(input="more", previous_response_id=first)
    # The prompt before, its answer, and what is new.
    assert cached == (before + 19) // 16 * 16
    whole = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "more"},
    ]
    _, _, sent_whole, _ = await ask(input=whole)
    assert sent_whole == tokens
    _, _, longer, cached = await ask(input="more", previous_response_id=second)
    assert cached == (tokens + 19) // 16 * 16
    _, _, with_instructions, _ = await ask(input="more", previous_response_id=second, instructions="Be brief.")
    assert with_instructions > longer
    unstored, *_ = await ask(input=LONG, store=False)
    for unknown in (unstored, "resp_unknown"):
        status, answer = await client.post("/v1/responses", {"input": "more", "previous_response_id": unknown})
        assert (status, answer["error"]["param"]) == (404, "previous_response_id")
    assert (await client.post("/sim/restart", {}))[0] == 200
    assert (await client.post("/v1/responses", {"input": "more", "previous_response_id": first}))[0] == 404


async def test_messages_count_cached_tokens_apart(client: Client) -> None:
    body = {"model": "sim", "max_tokens": 4, "system": LONG, "messages": [{"role": "user", "content": "question"}]}
    cold = await client.ok("/v1/messages", **body)
    warm = await client.ok("/v1/messages", **body)
    assert cold["usage"]["cache_read_input_tokens"] == 0
    assert warm["usage"] == {
        "input_tokens": cold["usage"]["input_tokens"] - 112,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 112,
        "output_tokens": 4,
    }
    events = await client.events("/v1/messages", **body)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0][1]["message"]["usage"]["cache_read_input_tokens"] == 112
    assert events[-2][1]["usage"]["output_tokens"] == 4
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == warm["content"][0]["text"]


async def test_adapters_and_salts_are_caches_of_their_own(client: Client) -> None:
    cached = []
    for extra in (
        {},
        {"model": "ad-a"},
        {"model": "ad-b"},
        {"cache_salt": "t"},
        {"model": "ad-a"},
        {"cache_salt": "t"},
    ):
        answer = await client.ok("/v1/completions", prompt=LONG, **extra)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 0, 0, 96, 96]
    models = json.loads(await client.get("/v1/models"))["data"]
    assert [(model["id"], model["parent"]) for model in models] == [("sim", None), ("ad-a", "sim"), ("ad-b", "sim")]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "`other` does not exist"),
        ("/v1/completions", {"model": "sim"}, 400, "`prompt`"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt is empty"),
        ("/v1/completions", {"prompt": []}, 400, "prompt is empty"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "mixes types"),
        ("/v1/completions", {"prompt": [-1]}, 400, "outside 0"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**12}, 400, "maximum context length is 131072"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n is 2"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages is empty"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "text only",
        ),
        ("/v1/responses", {"input": 5}, 400, "input"),
        ("/v1/messages", {"model": "sim", "messages": [{"role": "user", "content": "a"}]}, 400, "max_tokens"),
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/sim/faults", {"mode": "flood"}, 400, "mode"),
        ("/sim/faults", {"mode": "error", "share": 2}, 400, "share"),
    ],
)
async def test_bad_bodies_get_an_error_that_says_why(
    client: Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    got, answer = await client.post(path, body)
    assert got == answer["error"]["code"] == status
    assert message in answer["error"]["message"]
    assert client.engine.stats()["requests"] == 0


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}', b"null"])
async def test_what_is_no_json_is_a_bad_request(client: Client, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        async with client.session.post(client.engine.url + path, data=data) as response:
            assert response.status == 400


async def test_any_model_serves_unknown_names_from_the_base_cache() -> None:
    async with serve(any_model=True) as client:
        await client.ok("/v1/completions", prompt=LONG)
        answer = await client.ok("/v1/completions", prompt=LONG, model="other")
        assert (answer["model"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == ("other", 96)


async def test_tokenize_counts_what_generation_counts(client: Client) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "héllo"}]
    tokens = await client.ok("/tokenize", model="sim", messages=messages, return_token_strs=True)
    usage = (await client.ok("/v1/chat/completions", messages=messages))["usage"]
    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]
    assert tokens["token_strs"][0] == "<|im_start|>"
    plain = await client.ok("/tokenize", prompt="abcdefgh")
    assert plain == {
        "count": 2,
        "max_model_len": 131072,
        "tokens": [int.from_bytes(b"abcd", "little"), int.from_bytes(b"efgh", "little")],
        "token_strs": None,
    }
    ids = await client.ok("/v1/completions", prompt=tokens["tokens"], max_tokens=1)
    assert ids["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokens["count"] - 1) // 16 * 16


async def test_a_reset_empties_the_cache(client: Client) -> None:
    await client.ok("/v1/completions", prompt=LONG)
    assert await client.post("/reset_prefix_cache", {}) == (200, {"reset": True})
    answer = await client.ok("/v1/completions", prompt=LONG)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_health_and_version(client: Client) -> None:
    assert await client.get("/health") == ""
    assert json.loads(await client.get("/version")) == {"version": "0.32.0+sim"}


async def test_vllm_metrics(client: Client) -> None:
    for _ in range(2):
        await client.ok("/v1/completions", prompt=LONG, max_tokens=5, model="ad-a")
    samples = await client.metrics()
    labels = (("engine", "0"), ("model_name", "sim"))
    assert samples["vllm:num_requests_running"] == {labels: 0}
    assert samples["vllm:num_requests_waiting"] == {labels: 0}
    assert samples["vllm:kv_cache_usage_perc"] == {labels: 0}
    assert samples["vllm:prefix_cache_queries_total"] == {labels: 200}
    assert samples["vllm:prefix_cache_hits_total"] == {labels: 96}
    assert samples["vllm:time_to_first_token_seconds_count"] == {labels: 2}
    assert samples["vllm:inter_token_latency_seconds_count"] == {labels: 8}
    assert samples["vllm:inter_token_latency_seconds_bucket"][(*labels[:1], ("le", "+Inf"), labels[1])] == 8
    ((info, value),) = samples["vllm:cache_config_info"].items()
    assert value == 1
    assert {("block_size", "16"), ("num_gpu_blocks", "24001")} <= set(info)
    ((lora, _),) = samples["vllm:lora_requests_info"].items()
    assert {("max_lora", "2"), ("running_lora_adapters", ""), ("waiting_lora_adapters", "")} <= set(lora)


async def test_metrics_show_running_waiting_and_used_blocks() -> None:
    limits = EngineLimits(num_gpu_blocks=11, max_num_seqs=1)
    async with serve(cost=SLOW, limits=limits, loras=("ad-a",)) as client:
        body = {"prompt": "x" * 64, "max_tokens": 50, "model": "ad-a"}
        tasks = [asyncio.create_task(client.ok("/v1/completions", **body)) for _ in range(3)]
        await client.until(running=1, waiting=2)
        samples = await client.metrics()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [*samples["vllm:num_requests_running"].values()] == [1]
        assert [*samples["vllm:num_requests_waiting"].values()] == [2]
        assert min(samples["vllm:kv_cache_usage_perc"].values()) >= 0.1
        ((lora, _),) = samples["vllm:lora_requests_info"].items()
        assert {("running_lora_adapters", "ad-a"), ("waiting_lora_adapters", "ad-a")} <= set(lora)
        await client.until(running=0, waiting=0, used_blocks=0, aborted=3)


async def test_sglang_metrics() -> None:
    async with serve(flavour="sglang") as client:
        for _ in range(2):
            await client.ok("/v1/completions", prompt=LONG)
        samples = await client.metrics()
        assert [*samples["sglang:num_running_reqs"].values()] == [0]
        assert [*samples["sglang:num_queue_reqs"].values()] == [0]
        assert [*samples["sglang:token_usage"].values()] == [0]
        assert [*samples["sglang:max_total_num_tokens"].values()] == [384_000]
        assert [*samples["sglang:cache_hit_rate"].values()] == [pytest.approx(0.48)]
        assert [*samples["sglang:cached_tokens_total"].values()] == [96]
        assert not any(name.startswith("vllm:") for name in samples)


async def test_a_client_that_leaves_frees_its_blocks() -> None:
    async with serve(cost=SLOW) as client:
        for stream in (False, True):
            body = {"prompt": LONG, "max_tokens": 1000, "stream": stream}
            request = asyncio.create_task(client.session.post(client.engine.url + "/v1/completions", json=body))
            await client.until(running=1)
            assert client.engine.stats()["used_blocks"] >= 7
            if stream:
                response = await request
                await response.content.readany()
                response.close()
            else:
                request.cancel()
            await client.until(running=0, used_blocks=0, aborted=1 + stream)


async def test_a_full_queue_answers_503() -> None:
    async with serve(cost=SLOW, limits=EngineLimits(max_num_seqs=1), max_waiting=1) as client:
        tasks = []
        for running, waiting in ((1, 0), (1, 1)):
            tasks.append(asyncio.create_task(client.ok("/v1/completions", prompt="a", max_tokens=500)))
            await client.until(running=running, waiting=waiting)
        status, answer = await client.post("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (503, 503)
        assert client.engine.stats()["refused"] == {"503": 1}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_errors_on_demand_hit_their_share_of_requests(client: Client) -> None:
    status, fault = await client.post("/sim/faults", {"mode": "error", "status": 502, "share": 0.25})
    assert (status, fault["share"]) == (200, 0.25)
    statuses = [(await client.post("/v1/completions", {"prompt": "a"}))[0] for _ in range(8)]
    assert statuses == [200, 200, 200, 502] * 2
    await client.ok("/sim/faults", mode="none")
    await client.ok("/v1/completions", prompt="a")
    stats = json.loads(await client.get("/sim/stats"))
    assert stats["faults"] == {"none": 7, "error": 2, "slow": 0, "abort": 0, "hang": 0}
    assert stats["requests"] == 7


async def test_abort_breaks_the_connection_before_the_headers_or_after_some_chunks() -> None:
    async with serve(fault=Fault(mode="abort", after_chunks=3)) as client:
        with pytest.raises(aiohttp.ClientError):
            await client.post("/v1/completions", {"prompt": "a"})
        url = client.engine.url + "/v1/completions"
        async with client.session.post(url, json={"prompt": "a", "max_tokens": 2000, "stream": True}) as response:
            assert response.status == 200
            received = bytearray()
            with pytest.raises(aiohttp.ClientError):
                await read_into(received, response)
        assert received.count(b"data: ") >= 3
        assert b"[DONE]" not in received
        await client.until(running=0, used_blocks=0)
        assert client.engine.stats()["faults"]["abort"] == 2


async def test_hang_answers_nothing_until_the_client_leaves() -> None:
    async with serve(fault=Fault(mode="hang")) as client:
        for stream in (False, True):
            answer = client.events if stream else client.ok
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer("/v1/completions", prompt="a"), 0.15)
        await client.until(running=0, used_blocks=0)


async def test_slow_makes_steps_longer(client: Client) -> None:
    async def seconds() -> float:
        before = (await client.metrics())["vllm:inter_token_latency_seconds_sum"]
        await client.ok("/v1/completions", prompt="a", max_tokens=20)
        after = (await client.metrics())["vllm:inter_token_latency_seconds_sum"]
        return sum(after.values()) - sum(before.values())

    await client.ok("/sim/faults", mode="slow", factor=100)
    slow = await seconds()
    # 19 steps of 16 ms, 200 times as fast and 100 times slower: engine time, not the machine's, so a lower bound holds.
    assert slow >= 19 * 0.016 / 200 * 100 * 0.99
    await client.ok("/sim/faults", mode="none")
    assert await seconds() < slow


async def test_a_port_in_use_is_an_error_and_leaves_nothing_behind(client: Client) -> None:
    with pytest.raises(OSError, match="address already in use"):
        await start_engine(EngineSimConfig(port=client.engine.port))


async def test_running_requests_get_grace_when_the_engine_stops() -> None:
    engine = await start_engine(EngineSimConfig(cost=SLOW, grace=5))
    async with aiohttp.ClientSession() as session:
        client = Client(engine, session)
        request = asyncio.create_task(client.ok("/v1/completions", prompt="a", max_tokens=4))
        await client.until(running=1)
        await engine.close()
        assert (await request)["usage"]["completion_tokens"] == 4


async def test_an_engine_whose_events_cannot_be_published_fails_every_request_and_says_so() -> None:
    def publish(*_: object) -> None:
        raise ConnectionError("the publisher is gone")

    engine = await start_engine(EngineSimConfig(cost=FAST, grace=0.05), publish)
    async with aiohttp.ClientSession() as session:
        client = Client(engine, session)
        stream = asyncio.create_task(client.events("/v1/completions", prompt=LONG))
        assert (await client.post("/v1/completions", {"prompt": LONG}))[0] == 500
        with pytest.raises(aiohttp.ClientError):
            await stream
        assert (await client.post("/v1/completions", {"prompt": LONG}))[0] == 500
        async with session.get(engine.url + "/health") as response:
            assert response.status == 503
        with pytest.raises(ConnectionError, match="the publisher is gone"):
            await engine.failed()
    await engine.close()
