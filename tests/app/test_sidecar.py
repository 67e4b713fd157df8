"""The sidecar as a whole, beside simulated engines that publish over real ZMQ, with a real Redis and real streams."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import ssl
import struct
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
import xxhash
from aiohttp import web
from structlog.testing import capture_logs

from picker.app.sidecar import Sidecar
from picker.app.sidecar_settings import SettingsError, SyncMode, add_arguments, read_settings
from picker.core.block_hashes.context import HashContext
from picker.core.block_hashes.kthena import standardized
from picker.core.block_index.index import BlockIndex
from picker.core.kv_index.hash_index import HashIndex
from picker.core.kv_index.owners import Candidate
from picker.io.kv_index.engine_face import renamed
from picker.io.kv_index.redis_reader import ReaderSettings, RedisReader
from picker.io.kv_index.stream_client import ClientSettings
from picker.io.kv_index.stream_clients import StreamClients
from picker.io.transport.tls import SelfSigned
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import EngineLimits, StepCost
from picker.sim.publisher import EventFaults, KvEventSettings

BLOCK = 4


def settings(environment=None, *arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--engine", "vllm", "--host", "127.0.0.1", "--port", "0", *arguments]
    return read_settings(parser.parse_args(given), environment or {})


@asynccontextmanager
async def running(engine, environment, *arguments, **parts):
    publisher = engine.publishers[0]
    sources = {"VLLM_ZMQ_ENDPOINT": publisher.endpoint, "VLLM_ZMQ_REPLAY_ENDPOINT": publisher.replay_endpoint}
    names = ("--pod", "pod-0.default", "--model", "sim", "--engine-base-url", engine.url)
    sidecar = Sidecar(settings({**sources, **environment}, *names, *arguments), **parts)
    await sidecar.start()
    try:
        yield sidecar
    finally:
        await sidecar.stop()


@pytest.fixture
async def engine():
    config = EngineSimConfig(
        loras=("adapter",),
        limits=EngineLimits(block_size=BLOCK, num_gpu_blocks=40),
        cost=StepCost(speed=1000),
        kv_events=KvEventSettings(),
        grace=0.1,
    )
    engine = await start_engine(config)
    yield engine
    await engine.close()


async def complete(session, engine, tokens, model="sim") -> int:
    """The cached tokens that the engine reports for a prompt."""
    body = {"model": model, "prompt": tokens, "max_tokens": 2}
    async with session.post(f"{engine.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


class Feed:
    def __init__(self, index: BlockIndex, slot: int) -> None:
        self.index, self.slot, self.batches = index, slot, 0

    def on_batch(self, batch, _) -> None:
        self.batches += 1
        self.index.apply(self.slot, "sim", batch, 1.0)

    def on_restart(self, rank) -> None:
        self.index.restart(self.slot, rank)

    def on_incomplete(self, rank, _) -> None:
        self.index.restart(self.slot, rank)


def prompts(count: int) -> list[list[int]]:
    """Prompts that share beginnings, more than fit into the cache together."""
    rng = random.Random(5)
    stems = [[rng.randrange(5000) for _ in range(24)] for _ in range(6)]
    made = []
    for _ in range(count):
        stem = rng.choice(stems)
        made.append(stem[: rng.choice((8, 16, 20, 24))] + [rng.randrange(5000) for _ in range(rng.randrange(0, 12))])
    return made


async def test_through_streams_every_prediction_is_what_the_engine_reports(engine, background, until):
    index = BlockIndex()
    feed = Feed(index, 0)
    clients = StreamClients(ClientSettings("ns/router", reconnect=0.01), HashIndex(), lambda _: feed)
    background(clients.run())
    async with running(engine, {"KV_EVENT_SYNC_MODE": "memory"}) as sidecar, aiohttp.ClientSession() as session:
        (publisher,), (rank,) = engine.publishers, sidecar.subscriber.ranks
        await complete(session, engine, list(range(20)))
        await until(lambda: rank.last_seq is not None and rank.last_seq == publisher._sequence - 1)
        clients.follow({0: ("pod", f"127.0.0.1:{sidecar.port}")})
        await until(lambda: index.stats() and index.stats()[0].blocks == len(sidecar.ownership._ranks[0].live))
        told = rank.counts["batches"] - feed.batches

        def arrived() -> bool:
            return rank.last_seq == publisher._sequence - 1 and feed.batches + told == rank.counts["batches"]

        reported = 0
        for tokens in prompts(60):
            await until(arrived)
            expected = index.predict(index.prompt("sim", tokens), 0).cached_tokens
            cached = await complete(session, engine, tokens)
            assert cached == expected
            reported += cached
        assert reported > 100
        assert sidecar.ownership.counts["evicted"] == 0


async def test_redis_can_be_filled_with_keys_of_others(engine, redis_server, until):
    environment = {
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(redis_server.port),
        "KV_EVENT_HASH_PROTOCOL": "llm-d-xxh64",
        "KV_EVENT_HASH_SEED": "seed",
    }
    tokens = list(range(100, 130))
    key = xxhash.xxh64(
        struct.pack("<QQ", xxhash.xxh64_intdigest(b"seed"), len(b"sim")) + b"sim"
    ).intdigest()  # llm-d's root of a model, and from there on block by block
    expected = []
    for start in range(0, 28, BLOCK):
        key = xxhash.xxh64_intdigest(struct.pack(f"<Q{BLOCK}I", key, *tokens[start : start + BLOCK]))
        expected.append(f"matrix:kv:block:sim@{key}")
    async with (
        running(engine, environment) as sidecar,
        aiohttp.ClientSession() as session,
        redis_server.client() as client,
    ):
        await complete(session, engine, tokens)
        await until(lambda: sidecar.ownership.held >= 7 and sidecar.redis.in_step)
        assert set(expected) <= set(await client.keys("matrix:kv:block:*"))


async def test_through_redis_a_prompt_is_found_where_it_is(engine, redis_server, background, until):
    environment = {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis_server.port), "KV_EVENT_MEDIUM": "true"}
    reader = RedisReader(redis_server.settings)
    background(reader.run())
    tokens = list(range(100, 130))
    hashes = standardized(tokens, BLOCK, HashContext())
    candidates = {b"pod-0.default": Candidate(0)}
    async with running(engine, environment) as sidecar, aiohttp.ClientSession() as session:
        await complete(session, engine, tokens)
        await complete(session, engine, tokens, "adapter")
        await until(lambda: all(sidecar.ownership.blocks.get(model, 0) >= 7 for model in ("sim", "adapter")))
        await until(lambda: sidecar.redis.in_step and reader.connected)
        for model in ("sim", "adapter"):
            found = await reader.lookup(model, hashes, candidates)
            assert found.groups == [(7, 1)]
            assert found.weights == {}
        async with redis_server.client() as client:
            assert (await client.hget(f"matrix:kv:block:sim@{hashes[0]}", "pod-0.default")).endswith("|GPU")
            assert [key async for key in client.scan_iter("vllm:kv:block:pod-0.default@*")]
            await engine.publishers[0].restart()
            await until(lambda: sidecar.redis.in_step and not sidecar.ownership.held, 20)
            assert await client.keys("matrix:*") == []
            await complete(session, engine, [*tokens[:-4], 9, 9, 9, 9, 9, 9])
            await until(lambda: sidecar.ownership.held and sidecar.redis.in_step)
    async with redis_server.client() as client:
        assert await client.keys("*") == []


async def test_metrics_health_stats_and_adapters(engine, until):
    async with (
        running(engine, {"KV_EVENT_SYNC_MODE": "memory"}) as sidecar,
        aiohttp.ClientSession(f"http://127.0.0.1:{sidecar.port}") as session,
    ):
        async with aiohttp.ClientSession() as direct:
            await complete(direct, engine, list(range(9)))
        await until(lambda: sidecar.ownership.held)
        async with session.get("/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "healthy", "service": "runtime"})
        async with session.get("/metrics") as response:
            page = await response.text()
        assert response.content_type == "text/plain"
        lines = page.splitlines()
        for name in ("vllm", "kthena"):
            assert [line for line in lines if line.startswith(f"{name}:num_requests_waiting")]
            assert [line for line in lines if line.startswith(f"{name}:time_to_first_token_seconds_bucket")]
            assert [line for line in lines if line.startswith(f"# TYPE {name}:generation_tokens")]
        assert 'picker_sidecar_blocks{model="sim"} 2.0' in lines
        assert 'picker_sidecar_complete{rank="0"} 1.0' in lines
        async with session.get("/stats") as response:
            stats = await response.json()
        assert (stats["mode"], stats["blocks"], stats["ranks"]["0"]["complete"]) == ("memory", {"sim": 2}, True)


async def test_what_is_passed_on_and_what_is_not():
    seen = []

    async def load(request):
        seen.append((request.path, await request.json(), request.headers.get("Authorization")))
        return web.json_response({"ok": True}, status=202)

    app = web.Application()
    app.router.add_post("/v1/load_lora_adapter", load)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    extra = web.Application()

    async def predict(_):
        return web.json_response({"pod_affinities": []})

    extra.router.add_post("/predict", predict)
    sidecar = Sidecar(settings({"KV_EVENT_SYNC_MODE": "memory"}, "--engine-base-url", url), apps={"/v1/cache": extra})
    with capture_logs() as logs:
        await sidecar.start()
    assert "Pod identifier or model name not provided, skipping event handler registration" in [
        log["event"] for log in logs
    ]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{sidecar.port}") as session:
        headers = {"Authorization": "Bearer x"}
        async with session.post("/v1/load_lora_adapter", json={"lora_name": "a"}, headers=headers) as response:
            assert (response.status, await response.json()) == (202, {"ok": True})
        assert seen == [("/v1/load_lora_adapter", {"lora_name": "a"}, "Bearer x")]
        async with session.post("/v1/unload_lora_adapter", json={}) as response:
            assert response.status == 404
        async with session.get("/metrics") as response:
            assert response.status == 502
        async with session.post("/v1/completions", json={}) as response:
            assert response.status == 404
        async with session.post("/v1/cache/predict", json={}) as response:
            assert await response.json() == {"pod_affinities": []}
        await runner.cleanup()
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            async with session.post(path, json={}) as response:
                assert response.status == 502
        async with session.get("/metrics") as response:
            assert response.status == 502
        async with session.get("/health") as response:
            assert response.status == 200
    await sidecar.stop()


async def test_a_sidecar_that_writes_to_redis_has_no_streams(engine):
    environment = {"KV_EVENT_SYNC_MODE": "redis", "REDIS_HOST": "127.0.0.1", "REDIS_PORT": "1"}
    async with running(engine, environment) as sidecar, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{sidecar.port}/kvcache/routers/register"
        async with session.post(url, json={"router_id": "r"}) as response:
            assert response.status == 409
            assert await response.json() == {"detail": "Runtime is not in memory KV event sync mode"}


async def test_a_token_and_tls_guard_the_streams(engine, background, until, tmp_path):
    certificate = SelfSigned().certificate()
    chain, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    chain.write_bytes(certificate.chain)
    key.write_bytes(certificate.key)
    (tmp_path / "token").write_text("secret\n")
    environment = {
        "KV_EVENT_SYNC_MODE": "memory",
        "KV_EVENT_TOKEN_FILE": str(tmp_path / "token"),
        "TLS_CERT_FILE": str(chain),
        "TLS_KEY_FILE": str(key),
    }
    trusting = ssl.create_default_context(cafile=str(chain))
    async with running(engine, environment) as sidecar:
        address = f"127.0.0.1:{sidecar.port}"
        allowed = StreamClients(ClientSettings("a", token="secret", tls=trusting), HashIndex())
        refused = StreamClients(ClientSettings("b", token="guess", tls=trusting), HashIndex())
        distrusting = StreamClients(ClientSettings("c", token="secret", tls=ssl.create_default_context()), HashIndex())
        for clients in (allowed, refused, distrusting):
            background(clients.run())
            clients.follow({0: ("pod", address)})
        await until(lambda: allowed.counts["lines"])
        await until(lambda: refused.counts["status_401"])
        await until(lambda: distrusting.counts["unreachable"])
        assert sidecar.streams.streams == 1


async def test_four_engines_with_sidecars_and_two_pickers(background, until):
    config = EngineSimConfig(
        limits=EngineLimits(block_size=BLOCK, num_gpu_blocks=60), cost=StepCost(speed=1000), kv_events=KvEventSettings(), grace=0.1
    )  # fmt: skip
    engines = [await start_engine(config) for _ in range(4)]
    pickers = []
    for number in range(2):
        index = BlockIndex()
        clients = StreamClients(
            ClientSettings(f"ns/{number}", reconnect=0.01), HashIndex(), lambda slot, index=index: Feed(index, slot)
        )
        background(clients.run())
        pickers.append((clients, index))
    memory = {"KV_EVENT_SYNC_MODE": "memory"}
    async with (
        running(engines[0], memory) as a,
        running(engines[1], memory) as b,
        running(engines[2], memory) as c,
        running(engines[3], memory) as d,
        aiohttp.ClientSession() as session,
    ):
        for clients, _ in pickers:
            clients.follow({slot: (slot, f"127.0.0.1:{it.port}") for slot, it in enumerate((a, b, c, d))})
        given = prompts(80)
        await asyncio.gather(*[complete(session, engines[n % 4], tokens) for n, tokens in enumerate(given)])
        for slot, sidecar in enumerate((a, b, c, d)):
            for clients, index in pickers:
                await until(
                    lambda slot=slot, sidecar=sidecar: (
                        sidecar.subscriber.ranks[0].last_seq == engines[slot].publishers[0]._sequence - 1
                    )
                )
                held = len(sidecar.ownership._ranks[0].live)
                await until(
                    lambda slot=slot, index=index, held=held: (
                        [source.blocks for source in index.stats() if source.slot == slot] == [held]
                    )
                )
                assert clients.streams[slot].connected
        for tokens in given[-20:]:
            for slot in range(4):
                predictions = {index.predict(index.prompt("sim", tokens), slot).cached_tokens for _, index in pickers}
                assert len(predictions) == 1
    for engine in engines:
        await engine.close()


async def test_after_lost_frames_and_restarts_redis_says_what_is_true(redis_server, background, until):
    faults = EventFaults(drop_every=7, repeat_every=5, swap_every=11, corrupt_every=13)
    config = EngineSimConfig(
        limits=EngineLimits(block_size=BLOCK, num_gpu_blocks=40),
        cost=StepCost(speed=1000),
        kv_events=KvEventSettings(faults=faults),
        grace=0.1,
    )
    engine = await start_engine(config)
    (publisher,) = engine.publishers
    environment = {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis_server.port)}
    reader = RedisReader(redis_server.settings, ReaderSettings(budget=1.0, reconnect=0.01))
    background(reader.run())
    given = prompts(120)

    async with aiohttp.ClientSession() as session:

        async def ask(some) -> None:
            await asyncio.gather(*[complete(session, engine, tokens) for tokens in some])

        async with running(engine, environment):
            await ask(given[:30])
            redis_server.kill()
            await ask(given[30:60])
        redis_server.start()
        await ask(given[60:70])
        async with running(engine, environment) as sidecar:
            await ask(given[70:90])
            publisher.faults = EventFaults()
            (rank,) = sidecar.subscriber.ranks
            reported = 0
            for tokens in given[90:]:
                await until(lambda: rank.last_seq == publisher._sequence - 1 and rank.complete)
                await until(lambda: sidecar.redis.in_step and reader.connected)
                usable = (len(tokens) - 1) // BLOCK * BLOCK
                hashes = standardized(tokens[:usable], BLOCK, HashContext())
                found = await reader.lookup("sim", hashes, {b"pod-0.default": Candidate(0)})
                expected = found.groups[0][0] * BLOCK if found.groups else 0
                cached = await complete(session, engine, tokens)
                assert cached == expected
                reported += cached
            assert reported > 100
    await engine.close()


async def test_the_command(engine, redis_server):
    """As a process, with Kthena's options, environment and words."""
    code = """
import argparse, sys
from picker.app import sidecar
parser = argparse.ArgumentParser()
sidecar.add_arguments(parser)
sys.exit(sidecar.run(parser.parse_args()))
"""
    publisher = engine.publishers[0]
    environment = {
        **os.environ,
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(redis_server.port),
        "KV_EVENT_SYNC_MODE": "sometimes",
        "VLLM_ZMQ_ENDPOINT": publisher.endpoint,
        "VLLM_ZMQ_REPLAY_ENDPOINT": publisher.replay_endpoint,
    }
    arguments = [
        "-E",
        "vLLM",
        "-H",
        "127.0.0.1",
        "-P",
        "0",
        "-B",
        engine.url,
        "-M",
        "/metrics",
        "-I",
        "p.ns",
        "-N",
        "sim",
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, env=environment, stderr=asyncio.subprocess.PIPE
    )
    expected = {
        "KV_EVENT_SYNC_MODE is 'sometimes', which is neither redis nor memory: taken for redis",
        "KV event sync mode: redis (write to Redis)",
        "Redis client initialized successfully",
        "vLLM ZMQ subscriber initialized successfully",
        "vLLM KV-cache event handler registered",
    }
    try:
        async with asyncio.timeout(20):
            while expected:
                line = await process.stderr.readline()
                assert line, f"missing {expected}"
                expected.discard(json.loads(line)["event"])
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_settings_are_kthenas():
    plain = settings()
    assert (plain.engine, plain.mode, plain.source.endpoint) == ("vllm", SyncMode.REDIS, "tcp://localhost:5557")
    assert (plain.source.topic, plain.source.exact_topic, plain.source.replay_endpoint) == ("kv-events", True, None)
    assert (plain.redis.host, plain.redis.port, plain.redis.db) == ("redis-server", 6379, 0)
    assert plain.request_timeout == 30.0
    sglang = settings({"SGLANG_ZMQ_ENDPOINT": "tcp://10.0.0.1:6000"}, "--engine", "SGLang")
    assert (sglang.engine, sglang.source.topic, sglang.source.endpoint) == ("sglang", "", "tcp://10.0.0.1:6000")
    assert settings({}, "--engine", "vllmDisaggregated").engine == "vllm"
    assert settings({"KV_EVENT_SYNC_MODE": "Memory"}).mode is SyncMode.MEMORY


@pytest.mark.parametrize(
    ("environment", "arguments", "names"),
    [
        ({"REDIS_PORT": "x"}, (), "REDIS_PORT is 'x'"),
        ({"REDIS_PORT": "70000"}, (), "REDIS_PORT is '70000'"),
        ({"REDIS_DB": "-1"}, (), "REDIS_DB"),
        ({"REQUEST_TIMEOUT": "soon"}, (), "REQUEST_TIMEOUT is 'soon'"),
        ({"REQUEST_TIMEOUT": "nan"}, (), "REQUEST_TIMEOUT"),
        ({"KV_EVENT_MEDIUM": "perhaps"}, (), "KV_EVENT_MEDIUM"),
        ({"KV_EVENT_HASH_PROTOCOL": "llm-d-xxh"}, (), 'KV_EVENT_HASH_PROTOCOL is .*did you mean "llm-d-xxh64"'),
        ({"TLS_CERT_FILE": "x"}, (), "TLS_KEY_FILE"),
        ({"KV_EVENT_TOKEN_FILE": "/does/not/exist"}, (), "KV_EVENT_TOKEN_FILE"),
        ({"VLLM_ZMQ_ENDPOINT": "tcp://*:5557"}, (), "VLLM_ZMQ_ENDPOINT"),
        ({"VLLM_ZMQ_RANKS": "0"}, (), "VLLM_ZMQ_RANKS"),
        ({}, ("--engine-base-url", "localhost:8000"), "--engine-base-url"),
        ({}, ("--port", "99999"), "--port"),
    ],
)
def test_settings_that_make_no_sense_are_named(environment, arguments, names):
    with pytest.raises(SettingsError, match=names):
        settings(environment, *arguments)


def test_metrics_have_kthenas_names_too():
    page = b"""# HELP vllm:num_requests_waiting Waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="vllm:num_requests_waiting"} 3.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 2.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{le="0.1"} 1
vllm:inter_token_latency_seconds_sum 0.5
vllm:generation_tokens_total 7
"""
    assert renamed(page).decode().splitlines() == [
        "kthena:generation_tokens_total 7",
        "# HELP kthena:num_requests_waiting Waiting.",
        "# TYPE kthena:num_requests_waiting gauge",
        'kthena:num_requests_waiting{engine="0",model_name="vllm:num_requests_waiting"} 3.0',
        "# TYPE kthena:time_per_output_token_seconds histogram",
        'kthena:time_per_output_token_seconds_bucket{le="0.1"} 1',
        "kthena:time_per_output_token_seconds_sum 0.5",
    ]
    assert renamed(b"sglang:num_queue_reqs 4\n") == b"kthena:num_requests_waiting 4\n"
    assert renamed(b"") == b""
