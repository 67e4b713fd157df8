"""Routing by what engines really hold: through real Envoy, with events over real ZMQ, sidecars and a real Redis."""

from __future__ import annotations

import asyncio
import json
import random
import sys

import pytest
import pytest_asyncio

from picker.app.envoy import Template
from tests.support.http_client import send
from tests.support.kvcache_fleet import BLOCK, MODES, SCORES, body, fleets, prompt
from tests.support.picker_process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def start_fleet(start_picker, start_envoy_here, make_redis):
    async with fleets(start_picker, start_envoy_here, make_redis) as start:
        yield start


@pytest.mark.parametrize("mode", MODES)
async def test_requests_go_to_the_holder_and_predictions_are_what_engines_report(start_fleet, mode):
    fleet = await start_fleet(mode, blocks=24)
    rng = random.Random(3)
    stems = [prompt(number, 16 * (number + 2)) for number in range(6)]
    hits = 0
    for turn in range(36):
        text = rng.choice(stems) + prompt(100 + turn, rng.choice((0, 5, 16, 31)))
        request = body(text)
        predicted = await fleet.predicted(request)
        name, cached = await fleet.send(request)
        assert cached == predicted[name], turn
        # Whoever has most of it got it: nothing else is in flight.
        assert predicted[name] == max(predicted.values())
        hits += cached > 0
        await fleet.until_predicted(request, name, (len(text) // 4 - 1) // BLOCK * BLOCK)
    assert hits > 12
    metrics = await fleet.picker.settled()
    assert metrics("kvcache_preparations_total", outcome="ok") == 36
    assert metrics("predictions_compared_total", outcome="exact") == 36
    assert [metrics("prediction_error_tokens_bucket", le=bound) for bound in ("-1", "0", "+Inf")] == [0, 36, 36]
    assert sum(engine.stats()["evictions"] for engine in fleet.engines) > 0


@pytest.mark.parametrize("mode", ["direct", "memory"])
async def test_events_tell_when_a_prompt_is_computed(start_fleet, mode):
    """Before the answer does, which is long and comes in one piece."""
    fleet = await start_fleet(mode, plugins={})
    for number in range(8):
        await fleet.send(body(prompt(number, 100), max_tokens=600))
    metrics = await fleet.picker.settled()
    # How large an engine's blocks are is known from its first events on.
    assert metrics("prefill_over_total") == 8
    assert metrics("prefill_over_total", signal="kv_events") >= 6
    assert metrics("endpoint_queued_tokens") == 0


@pytest.mark.parametrize("template", Template)
async def test_what_tells_prompts_apart_for_engines_does_so_here(start_fleet, template):
    fleet = await start_fleet("direct", template=template)
    text = prompt(1, 100)
    name, cached = await fleet.send(body(text))
    assert cached == 0
    await fleet.until_predicted(body(text), name, 96)
    for more in ({"cache_salt": "tenant"}, {"prompt_logprobs": 1}, {"model": "adapter"}):
        assert (await fleet.predicted(body(text, **more)))[name] == 0
    holder = fleet.named(name)
    assert await fleet.ask(holder, body(text, prompt_logprobs=1)) == 0
    assert await fleet.ask(holder, body(text, model="adapter")) == 0
    await fleet.until_predicted(body(text, model="adapter"), name, 96)
    assert await fleet.send(body(text, model="adapter")) == (name, 96)
    ids = [int.from_bytes(text[at : at + 4].encode(), "little") for at in range(0, len(text), 4)]
    assert (await fleet.predicted(json.dumps({"token_ids": ids}).encode()))[name] == 96


@pytest.mark.parametrize("template", Template)
async def test_a_conversation_stays_where_its_blocks_are(start_fleet, template):
    fleet = await start_fleet("direct", template=template)
    messages = [{"role": "system", "content": prompt(5, 200)}]
    home = ""
    for turn in range(4):
        messages.append({"role": "user", "content": prompt(50 + turn, 30)})
        request = json.dumps({"model": "sim", "messages": messages, "max_tokens": 40}).encode()
        if turn:
            explained = await fleet.picker.matched(request, "kvcache-aware")
            (held, total), (other, _) = sorted(explained.values(), reverse=True)
            # All but the new question was computed before, the answers included.
            assert total - held <= 3 * BLOCK
            assert other == 0
        predicted = await fleet.predicted(request)
        answer = await send(fleet.port, request)
        usage = answer.seen["usage"]
        home = home or answer.headers["x-engine"]
        assert answer.headers["x-engine"] == home
        assert usage["prompt_tokens_details"]["cached_tokens"] == predicted[home]
        messages.append(answer.seen["choices"][0]["message"])
        await fleet.until_predicted(request, home, (usage["prompt_tokens"] - 1) // BLOCK * BLOCK)


@pytest.mark.parametrize("mode", MODES)
async def test_after_an_eviction_the_prediction_falls_and_a_restart_forgets(start_fleet, mode):
    fleet = await start_fleet(mode, blocks=64)
    first = prompt(1, 320)
    name, _ = await fleet.send(body(first))
    await fleet.until_predicted(body(first), name, 304)
    holder = fleet.named(name)
    await fleet.ask(holder, body(prompt(2, 640)))
    await fleet.ask(holder, body(prompt(3, 320)))

    async def fell() -> int | None:
        found = (await fleet.predicted(body(first))).get(name)
        return found if found is not None and found < 304 else None

    await until(fell)
    await fleet.until_predicted(body(prompt(3, 320)), name, 304)
    left = (await fleet.predicted(body(first)))[name]
    assert await fleet.ask(holder, body(first)) == left

    await fleet.until_predicted(body(first), name, 304)
    async with fleet.session.post(f"{holder.url}/sim/restart") as answer:
        assert answer.status == 200
    await fleet.ask(holder, body(prompt(4, 64)))
    await fleet.until_predicted(body(prompt(4, 64)), name, 48)
    assert (await fleet.predicted(body(first)))[name] == 0
    assert await fleet.ask(holder, body(first)) == 0


@pytest.mark.parametrize("mode", ["memory", "redis"])
async def test_requests_go_on_without_sidecars_and_redis_and_all_heals(start_fleet, mode):
    fleet = await start_fleet(mode)
    texts = [prompt(number, 64) for number in range(4)]
    homes = {text: (await fleet.send(body(text)))[0] for text in texts}
    for text, name in homes.items():
        await fleet.until_predicted(body(text), name, 48)
    if mode == "memory":
        await asyncio.gather(*(sidecar.kill() for sidecar in fleet.sidecars))

        async def nobody() -> bool:
            return (await fleet.predicted(body(texts[0]))) == {"sim-0": 0, "sim-1": 0}

    else:
        fleet.redis.kill()

        async def nobody() -> bool:
            return (await fleet.predicted(body(texts[0]))) == {}

    await until(nobody)
    for text in texts:
        await fleet.send(body(text))
    metrics = await fleet.picker.settled()
    assert metrics("decisions_total", reason="routed") == 8
    if mode == "memory":
        await asyncio.gather(*(sidecar.start() for sidecar in fleet.sidecars))
    else:
        assert metrics("kvcache_preparations_total", outcome="no_owners") == 4
        fleet.redis.start()
    for text, name in homes.items():
        await fleet.until_predicted(body(text), name, 48, 20)
        assert (await fleet.send(body(text)))[1] == 48


async def test_an_engine_that_cannot_tokenize_is_not_waited_for(start_fleet):
    fleet = await start_fleet("direct", tokenizers=["service"], tokenizerService={"endpoint": "http://127.0.0.1:9"})
    await fleet.send(body(prompt(1, 64)))
    metrics = await fleet.picker.settled()
    assert metrics("kvcache_preparations_total", outcome="not_tokenized") == 1
    assert metrics("kvcache_tokenizing_total", step="service", outcome="error") == 1
    decision = (await fleet.picker.decisions(1))[0]
    assert decision["reason"] == "routed"


@pytest.mark.parametrize("mode", ["memory", "redis"])
async def test_a_sidecar_predicts_for_its_engine(start_fleet, mode):
    fleet = await start_fleet(mode)
    request = body(prompt(1, 100))
    assert await fleet.ask(fleet.engines[0], request) == 0

    async def answer(sidecar) -> dict[str, object]:
        async with fleet.session.post(f"http://{sidecar.address}/v1/cache/predict", data=request) as found:
            assert found.status == 200
            return await found.json()

    async def known() -> bool:
        return (await answer(fleet.sidecars[0]))["predicted_cached_tokens"] == 96

    await until(known)
    assert await answer(fleet.sidecars[0]) == {
        "predicted_cached_tokens": 96,
        "total_prompt_tokens": 100,
        "blocks_total": 6,
        "blocks_cached": 6,
        "cache_hit_ratio": 0.96,
        "pod_affinities": [{"pod_id": "sim-0.default", "cached_blocks": 6, "cached_tokens": 96, "complete": True}],
    }
    assert (await answer(fleet.sidecars[1]))["predicted_cached_tokens"] == 0


async def test_lost_repeated_swapped_and_broken_frames_end_in_the_same_knowledge(start_fleet):
    fleet = await start_fleet("direct", blocks=40)
    faults = {"drop_every": 5, "repeat_every": 4, "swap_every": 7, "corrupt_every": 6}
    for engine in fleet.engines:
        async with fleet.session.post(f"{engine.url}/sim/kv_event_faults", json=faults) as answer:
            assert answer.status == 200
    rng = random.Random(9)
    stems = [prompt(number, 16 * (number + 2)) for number in range(8)]
    texts = [rng.choice(stems) + prompt(100 + turn, rng.choice((5, 16, 31))) for turn in range(60)]
    for text in texts:
        await fleet.send(body(text))
    for engine in fleet.engines:
        async with fleet.session.post(f"{engine.url}/sim/kv_event_faults", json={}) as answer:
            assert answer.status == 200
    marks = {}
    for engine in fleet.engines:
        name = engine.stats()["name"]
        marks[name] = prompt(1000, 40)
        await fleet.ask(engine, body(marks[name]))
    for name, text in marks.items():
        await fleet.until_predicted(body(text), name, 32, 20)

    async def whole() -> bool:
        return (await fleet.picker.metrics())("kv_incomplete_endpoints") == 0

    await until(whole, 20)
    for text in texts[-8:]:
        predicted = await fleet.predicted(body(text))
        name, cached = await fleet.send(body(text))
        assert cached == predicted[name]
        await fleet.until_predicted(body(text), name, (len(text) // 4 - 1) // BLOCK * BLOCK)
    metrics = await fleet.picker.settled()
    assert metrics("kv_events_total", kind="gaps") > 0
    assert metrics("kv_events_dropped_total", reason="duplicate") > 0


async def test_the_plugin_comes_changes_and_goes_with_the_configuration(start_fleet):
    fleet = await start_fleet("direct")
    picker, text = fleet.picker, prompt(1, 64)
    name, _ = await fleet.send(body(text))
    await fleet.until_predicted(body(text), name, 48)
    whole = picker.config

    async def metric(wanted: float, metric: str, **labels: str) -> None:
        async def is_it() -> bool:
            return (await picker.metrics())(metric, **labels) == wanted

        await until(is_it)

    # Other arguments: the index begins anew, and what engines hold comes back by replay.
    args = {"indexMode": "direct", "maxBlocksPerPod": 1000}
    picker.write({**whole, "scheduler": {"pluginConfig": [{"name": "kvcache-aware", "args": args}], "plugins": SCORES}})

    async def again() -> bool:
        return len(picker.events("KVCacheAware: direct mode active")) == 2

    await until(again)
    await fleet.until_predicted(body(text), name, 48)
    # Something else changes: it stays as it is.
    picker.write({**picker.config, "exchange": {"decisionSeconds": 0.5}})

    async def reloaded() -> bool:
        return (await picker.metrics())("config_reloads_total", outcome="ok") == 2

    await until(reloaded)
    assert (await fleet.predicted(body(text)))[name] == 48
    assert len(picker.events("KVCacheAware: direct mode active")) == 2
    # Without the plugin there is nothing to ask.
    picker.write({key: value for key, value in whole.items() if key != "scheduler"})
    await metric(0, "kv_sources_connected")
    assert await fleet.predicted(body(text)) == {}
    assert (await send(fleet.port, body(text), path="/v1/completions")).status == 200
    picker.write(whole)
    await metric(2, "kv_sources_connected")
    await fleet.until_predicted(body(text), name, 48)


async def test_without_the_token_that_the_configuration_names_the_picker_does_not_start(tmp_path):
    path = tmp_path / "picker.yaml"
    path.write_text("predict: {tokenEnvironment: PICKER_TOKEN_THAT_IS_NOT_SET}\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "picker", "serve", "-c", str(path)), stderr=asyncio.subprocess.PIPE
    )
    _, error = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert b"PICKER_TOKEN_THAT_IS_NOT_SET" in error


async def test_chained_hashes_in_redis_keep_salts_apart(start_fleet):
    fleet = await start_fleet("redis", hashProtocol="llm-d-xxh64")
    text = prompt(7, 160)
    name, _ = await fleet.send(body(text, cache_salt="one"))
    await fleet.until_predicted(body(text, cache_salt="one"), name, 144)
    assert await fleet.send(body(text, cache_salt="one")) == (name, 144)
    assert set((await fleet.predicted(body(text, cache_salt="two"))).values()) == {0}
    assert set((await fleet.predicted(body(text))).values()) == {0}
    url = f"{fleet.predict}/v1/cache/predict"
    async with fleet.session.post(f"{url}?hashes=llm-d-xxh64", data=body(text, cache_salt="one")) as answer:
        ((*named, last),) = (await answer.json())["block_hashes"]
    asked = json.dumps({"model": "sim", "block_hashes": [*named, last]}).encode()
    assert (await fleet.predicted(asked))[name] == 160
    assert (await fleet.predicted(asked.replace(named[1].encode(), b"1")))[name] == 16
