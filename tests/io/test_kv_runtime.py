"""The runtime of `kvcache-aware` over real engines' events: endpoints come and go, parts fail, odd settings are said."""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from picker.core.block_hashes.context import HashContext
from picker.core.block_hashes.kthena import standardized
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint, EngineMetrics, KvEvents
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.plugins.kvcache_args import IndexMode, KvCacheArgs, RedisArgs, Way
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.tokens.prompt import TokenPrompt
from picker.core.usage import Usage
from picker.io.kvcache import watch
from picker.io.kvcache.direct import event_source
from picker.io.kvcache.memory import router_id
from picker.io.kvcache.redis import redis_settings
from picker.io.kvcache.runtime import KvCacheRuntime
from picker.io.preparing import together
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import EngineLimits, StepCost
from picker.sim.publisher import KvEventSettings

PATH = {":path": b"/v1/completions"}


@asynccontextmanager
async def engine(block_size: int = 16, **more):
    limits = EngineLimits(block_size=block_size, num_gpu_blocks=400)
    events = more.pop("kv_events", KvEventSettings())
    running = await start_engine(
        EngineSimConfig(limits=limits, cost=StepCost(speed=1000), grace=0, kv_events=events, **more)
    )
    try:
        yield running
    finally:
        await running.close()


def endpoint(running, name: str = "a", **more) -> Endpoint:
    events = KvEvents()
    if running.publishers:
        events = KvEvents(running.publishers[0].endpoint, running.publishers[0].replay_endpoint)
    return Endpoint(name, running.url.removeprefix("http://"), kv_events=events, **more)


def make(**args):
    """A director with the plugin alone, and its runtime."""
    spec = SchedulerSpec((), (("kvcache-aware", 1.0),), {"kvcache-aware": KvCacheArgs(**args)})
    scheduler, _ = build_scheduler(spec, None, lambda *_: None)
    director = Director(scheduler, EndpointTable(), fallbacks=0, rng=random.Random(1), timer=time.perf_counter_ns)
    runtime = director.preparation = KvCacheRuntime(director, scheduler.producers[0])
    return director, runtime


def become(director, runtime, *endpoints) -> None:
    director.replace_endpoints(endpoints)
    runtime.follow()


def asking(text: str, **more) -> Decide:
    body = json.dumps({"model": "sim", "prompt": text, "max_tokens": 1, **more}).encode()
    return Decide(PATH, body, BodyState.COMPLETE, None, None)


async def decide(director, asked: Decide):
    request = director.read(asked)
    preparing = director.prepare(asked, request)
    prepared = await together(preparing) if preparing else {}
    return director.decide(asked, request=type(request)(request.request_id, request.path, request.prompt, prepared))


async def matched(director, text: str) -> list[int] | None:
    (plugin,) = (await decide(director, asking(text))).plugins
    return None if plugin.match is None else plugin.match.matched.tolist()


async def serve(session_url: str, text: str) -> None:
    import aiohttp

    async with aiohttp.request("POST", f"{session_url}/v1/completions", data=asking(text).body) as answer:
        assert answer.status == 200


TEXT = random.Random(4).randbytes(130).hex()
"""65 tokens of the simulated engine."""


async def test_endpoints_come_go_and_take_what_they_held_with_them(background, until):
    director, runtime = make(index_mode=IndexMode.DIRECT)
    background(runtime.run())
    async with engine() as first, engine() as second:
        become(director, runtime, endpoint(first), endpoint(second, "b"))
        await until(lambda: runtime.chain is not None and runtime.incomplete() == 0)
        await serve(first.url, TEXT)

        async def held():
            return await matched(director, TEXT) == [64, 0]

        await until(held)
        # The slot is another endpoint's now, whose own events are followed from the first on.
        become(director, runtime, endpoint(second, "c"))
        assert await matched(director, TEXT) == [0]
        await serve(second.url, TEXT)

        async def held_by_the_other():
            return await matched(director, TEXT) == [64]

        await until(held_by_the_other)
        become(director, runtime, endpoint(first), endpoint(second, "c"))

        async def replayed():
            return await matched(director, TEXT) == [64, 64]

        await until(replayed)
        become(director, runtime)
        assert runtime.stats() == []
        await until(lambda: not runtime.producer.index.sweep(1000))
        assert runtime.sources.events["connects"] >= 4


async def test_what_ends_starts_again_whole(background, until):
    director, runtime = make(index_mode=IndexMode.DIRECT)
    async with engine() as running:
        for _ in range(2):
            task = background(runtime.run())
            become(director, runtime, endpoint(running))
            await serve(running.url, TEXT)

            async def held():
                return await matched(director, TEXT) == [64]

            await until(held)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert runtime.chain is None
            assert await matched(director, TEXT) is None
            assert runtime.outcomes["starting"] >= 1
            director.replace_endpoints([])


async def test_endpoints_with_one_publisher_are_not_followed(background, until):
    director, runtime = make(index_mode=IndexMode.DIRECT)
    background(runtime.run())
    async with engine() as running:
        one = endpoint(running)
        other = Endpoint("b", "127.0.0.1:9", kv_events=one.kv_events)
        with capture_logs() as logs:
            become(director, runtime, one, other)
        assert [log["endpoint"] for log in logs if "share a publisher" in log["event"]] == [one.address, other.address]
        await until(lambda: runtime.chain is not None)
        await serve(running.url, TEXT)
        assert await matched(director, TEXT) == [0, 0]
        assert runtime.incomplete() == 2
        become(director, runtime, one)

        async def held():
            return await matched(director, TEXT) == [64]

        await until(held)


async def test_a_tokenizer_that_hangs_delays_a_decision_by_its_deadline_only(background, until):
    started = asyncio.Event()

    async def hang(_):
        started.set()
        await asyncio.Event().wait()

    app = web.Application()
    app.router.add_post("/tokenize", hang)
    runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    director, runtime = make(index_mode=IndexMode.DIRECT)
    director.decision_seconds = 0.05
    background(runtime.run())
    become(director, runtime, Endpoint("a", f"127.0.0.1:{runner.addresses[0][1]}"))
    await until(lambda: runtime.chain is not None)
    async with asyncio.timeout(5):
        assert await matched(director, TEXT) is None
    assert started.is_set()
    assert runtime.outcomes["not_tokenized"] + runtime.outcomes["deadline"] == 1
    # Token ids need no tokenizer.
    decision = await decide(director, asking("", prompt=list(range(40))))
    assert decision.plugins[0].match.total == 32
    await runner.cleanup()


async def test_a_redis_that_stalls_costs_its_budget_and_then_nothing(background, until, redis_server):
    args = RedisArgs(address=f"127.0.0.1:{redis_server.port}", budget_seconds=0.02)
    director, runtime = make(index_mode=IndexMode.REDIS, redis=args, tokenizers=(Way.ENGINE,))
    background(runtime.run())
    become(director, runtime, Endpoint("a", "127.0.0.1:9"))
    await until(lambda: runtime.sources.is_connected(0))
    asked = asking("", prompt=list(range(40)))
    assert (await decide(director, asked)).plugins[0].match.matched.tolist() == [0]
    redis_server.stall()
    for _ in range(5):
        assert (await decide(director, asked)).plugins[0].match is None
    outcomes = runtime.redis.reader.outcomes
    assert outcomes["timeout"] == 3
    assert outcomes["circuit_open"] == 2
    assert runtime.outcomes == {"ok": 1, "no_owners": 5, "not_tokenized": 0, "deadline": 0}
    assert await runtime.held([]) == [("a", 0, 0, False)]
    redis_server.resume()

    async def answers():
        return (await decide(director, asked)).plugins[0].match is not None

    await until(answers)


async def test_the_block_size_is_that_of_events(background, until):
    director, runtime = make(index_mode=IndexMode.DIRECT)
    background(runtime.run())
    with capture_logs() as logs:
        async with engine(block_size=32) as running:
            become(director, runtime, endpoint(running))
            await serve(running.url, TEXT)
            await until(lambda: runtime.block_size == 32)
            await serve(running.url, TEXT + "more")
            await asyncio.sleep(0.6)
    (said,) = [log for log in logs if "blockSizeToHash" in log["event"]]
    assert (said["configured"], said["engines"]) == (16, 32)


async def test_an_engine_without_events_is_noticed_when_requests_go_there(background, until, monkeypatch):
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(watch, "SILENT_PICKS", 3)
    director, runtime = make(index_mode=IndexMode.DIRECT)
    with capture_logs() as logs:
        background(runtime.run())
        async with engine() as running:
            become(director, runtime, endpoint(running))
            await until(lambda: runtime.chain is not None and runtime.incomplete() == 0)
            for number in range(6):
                director.route(await decide(director, asking(TEXT + str(number))))

            def said():
                return [log for log in logs if "says nothing of its cache" in log["event"]]

            await until(said)
            become(director, runtime, Endpoint("b", "127.0.0.1:9"))
            for number in range(6):
                director.route(await decide(director, asking("", prompt=list(range(40 + number)))))
            await until(lambda: [log for log in logs if "cannot be had" in log["event"]])
            assert len(said()) == 1


async def test_an_engine_that_reports_something_else_is_noticed(background, until, monkeypatch):
    monkeypatch.setattr(watch, "DISAGREEING", 3)
    monkeypatch.setattr(watch, "_SAID_EVERY", 0.0)
    director, runtime = make(index_mode=IndexMode.DIRECT)
    done = Finish(success=True, learned_on=LearnedOn.STREAM_END, status=200, served=None)
    with capture_logs() as logs:
        background(runtime.run())
        async with engine() as running:
            become(director, runtime, endpoint(running))
            await until(lambda: runtime.chain is not None and runtime.incomplete() == 0)
            for number in range(3):
                ticket = director.route(await decide(director, asking(TEXT + str(number))))
                ticket.finish(done, Usage(prompt_tokens=100, cached_tokens=64))
            await until(lambda: [log for log in logs if "not what was predicted" in log["event"]])
            await until(lambda: [log for log in logs if log["event"] == "Cached tokens, predicted and reported"])
    (said,) = [log for log in logs if "not what was predicted" in log["event"]]
    assert (said["requests"], said["predicted_minus_reported"]) == (3, -192)
    assert "blockSizeToHash" in said["event"]
    (told,) = [log for log in logs if log["event"] == "Cached tokens, predicted and reported"]
    assert (told["requests"], told["exact_share"], told["under"]) == (3, 0.0, 3)


async def test_a_model_that_nobody_serves_is_noticed(background, until, monkeypatch):
    monkeypatch.setattr(watch, "SILENT_PICKS", 3)
    director, runtime = make(index_mode=IndexMode.DIRECT, model_aliases={"alias": "sim"})
    with capture_logs() as logs:
        background(runtime.run())
        async with engine() as running:
            become(director, runtime, endpoint(running))
            await until(lambda: runtime.chain is not None)
            known = EngineMetrics(models=frozenset({"sim", "adapter"}), bases=("sim",))
            director.table.observe(0, known, time.monotonic())
            for model in ("sim", "adapter", "alias", "other", "other", "other"):
                await decide(director, asking("", prompt=list(range(40)), model=model))
            await until(lambda: [log for log in logs if "No engine serves" in log["event"]])
    assert [log["model"] for log in logs if "No engine serves" in log["event"]] == ["other"]


async def test_several_base_models_are_noticed(background, until):
    director, runtime = make(index_mode=IndexMode.DIRECT)
    with capture_logs() as logs:
        background(runtime.run())
        become(director, runtime, Endpoint("a", "127.0.0.1:9"), Endpoint("b", "127.0.0.1:10"))
        for slot, names in enumerate((("one", "alias"), ("alias", "two"))):
            director.table.observe(slot, EngineMetrics(models=frozenset(names), bases=names), time.monotonic())
        await asyncio.sleep(0.6)
        assert [log for log in logs if "different base models" in log["event"]] == []
        director.table.observe(1, EngineMetrics(models=frozenset({"two"}), bases=("two",)), time.monotonic())
        await until(lambda: [log for log in logs if "different base models" in log["event"]])


async def test_prompts_that_never_match_are_noticed(background, until, monkeypatch):
    monkeypatch.setattr(watch, "NEVER_MATCHED", 4)
    director, runtime = make(index_mode=IndexMode.DIRECT)
    with capture_logs() as logs:
        background(runtime.run())
        become(director, runtime, Endpoint("a", "127.0.0.1:9"))
        await until(lambda: runtime.chain is not None)
        for _ in range(4):
            await decide(director, asking("", prompt=list(range(40))))
        await until(lambda: [log for log in logs if "has ever matched" in log["event"]])


@pytest.mark.parametrize(
    ("own", "args", "endpoint_of", "replay", "topic"),
    [
        (KvEvents(), {}, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", ""),
        (KvEvents(), {"zmq_port": 1, "zmq_replay_port": 2}, "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", ""),
        (KvEvents(), {"zmq_replay": False, "topic": "t"}, "tcp://10.0.0.1:5557", None, "t"),
        (KvEvents("tcp://h:7"), {"topic": "t"}, "tcp://h:7", None, "t"),
        (KvEvents("tcp://h:7", "tcp://h:8", "own"), {"topic": "t"}, "tcp://h:7", "tcp://h:8", "own"),
        (KvEvents("", "tcp://h:8"), {}, "tcp://10.0.0.1:5557", "tcp://h:8", ""),
    ],
)
def test_where_events_are(own, args, endpoint_of, replay, topic):
    source = event_source(Endpoint("a", "10.0.0.1:8000", kv_events=own), KvCacheArgs(**args))
    assert (source.endpoint, source.replay_endpoint, source.topic) == (endpoint_of, replay, topic)


def test_ranks_that_are_endpoints_of_their_own_publish_at_the_ports_after():
    args = KvCacheArgs(zmq_replay_port=6000)
    source = event_source(Endpoint("a", "10.0.0.1:8003", rank=3), args)
    assert (source.endpoint, source.replay_endpoint) == ("tcp://10.0.0.1:5560", "tcp://10.0.0.1:6003")
    named = Endpoint("a", "10.0.0.1:8003", kv_events=KvEvents("tcp://h:7", "tcp://h:18"), rank=3)
    assert (event_source(named, args).endpoint, event_source(named, args).replay_endpoint) == (
        "tcp://h:10",
        "tcp://h:21",
    )


def test_where_events_are_over_ipv6():
    assert event_source(Endpoint("a", "[fd00::1]:8000"), KvCacheArgs()).endpoint == "tcp://[fd00::1]:5557"


@pytest.mark.parametrize(
    ("address", "environment", "expected"),
    [
        ("", {}, ("redis-server", 6379, "")),
        ("", {"REDIS_HOST": "r", "REDIS_PORT": "7", "REDIS_PASSWORD": "p"}, ("r", 7, "p")),
        ("other:1", {"REDIS_HOST": "r", "REDIS_PORT": "7"}, ("other", 1, "")),
        ("[::1]:1", {}, ("::1", 1, "")),
        ("", {"REDIS_PORT": "tcp://10.0.0.1:6379"}, ("redis-server", 6379, "")),
    ],
)
def test_where_redis_is(address, environment, expected):
    found = redis_settings(RedisArgs(address=address), environment)
    assert (found.host, found.port, found.password) == expected


def test_what_sidecars_know_a_picker_by():
    assert router_id({"POD_NAMESPACE": "ns", "POD_NAME": "pod"}) == "ns/pod"
    assert "/" not in router_id({"POD_NAME": "pod"})
    assert router_id({}) != router_id({})  # two pickers on one host


async def test_a_sidecar_of_kthena_is_understood(background, until):
    lines: asyncio.Queue[dict] = asyncio.Queue()
    registered = []

    async def register(request):
        registered.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        while True:
            line = {"pod_identifier": "a.default", "model_name": "sim", "events": [await lines.get()]}
            await response.write(json.dumps(line).encode() + b"\n")

    app = web.Application()
    app.router.add_post("/kvcache/routers/register", register)
    runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    director, runtime = make(index_mode=IndexMode.MEMORY)
    background(runtime.run())
    become(director, runtime, Endpoint("a", "127.0.0.1:9", runtime=f"127.0.0.1:{runner.addresses[0][1]}"))
    await until(lambda: runtime.sources.is_connected(0))
    assert registered[0]["router_id"]
    director.table.observe(0, EngineMetrics(models=frozenset({"sim"}), bases=("sim",)), time.monotonic())
    asked = asking("", prompt=list(range(97)))

    async def match() -> int | None:
        (found,) = (await decide(director, asked)).plugins[0].match.matched.tolist()
        return found

    async def becomes(tokens: int) -> None:
        async def is_it() -> bool:
            return await match() == tokens

        await until(is_it)

    blocks = standardized(array("I", range(96)), 16, HashContext())
    now = int(time.time())
    lines.put_nowait({"type": "snapshot", "block_hashes": blocks[:4], "timestamps": [now] * 4})
    await becomes(64)
    tokens = TokenPrompt(array("I", range(97)), "sim")
    assert await runtime.held([tokens]) == [("a", 64, 4, True)]
    assert await runtime.held_named("sim", blocks[:3]) == [("a", 48, 3, True)]
    assert await runtime.held_named("other", blocks) == [("a", 0, 0, True)]
    lines.put_nowait({"type": "stored", "block_hashes": blocks[4:], "timestamp": now})
    await becomes(96)
    lines.put_nowait({"type": "removed", "block_hashes": blocks[2:3]})
    await becomes(32)
    # A pick is visible though such a sidecar says nothing of the engine's own blocks.
    await until(lambda: runtime.producer.index.stats()[0].block_sizes == (16,))
    assert runtime.stats()[0]["ranks"]["0"]["complete"]
    ticket = director.route(await decide(director, asked))
    assert await match() == 96
    ticket.finish(Finish(success=True, learned_on=LearnedOn.STREAM_END, status=200, served=None))
    assert await match() == 32
    # The engine restarted, as its metrics say: the sidecar does not notice.
    director.restarted(0)
    assert await match() == 0
    lines.put_nowait({"type": "stored", "block_hashes": blocks, "timestamp": now})
    await becomes(96)
    await runner.cleanup()
    await becomes(0)
    director.route(await decide(director, asked))  # what is known now is this pick alone
    assert [rank["complete"] for rank in runtime.stats()[0]["ranks"].values()] == [False]
