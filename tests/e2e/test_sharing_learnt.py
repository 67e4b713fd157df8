"""What two pickers learn apart from picks, and tell each other or hear by themselves: responses' names, KV events."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from dataclasses import replace

import aiohttp
import pytest
import pytest_asyncio

from picker.app.envoy import Template
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.e2e.test_sharing import BY_SESSION
from tests.support.http_client import send
from tests.support.kvcache_fleet import BLOCK, body, entry, picker_config, prompt, simulated
from tests.support.pair import healthy, peers, start_pair
from tests.support.picker_process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


# --- Conversations that engines store -----------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def storing(redis_server, start_picker, start_envoy_here):
    """Two pickers that read answers, before three engines that store theirs."""
    engines = [await start_engine(EngineSimConfig(name=f"engine-{n}", cost=StepCost(speed=20))) for n in range(3)]
    entries = [{"name": f"e{n}", "address": f"127.0.0.1:{engine.port}"} for n, engine in enumerate(engines)]
    config = {
        "endpoints": {"static": entries},
        "exchange": {"learnUsage": "from-body"},
        "scheduler": BY_SESSION,
    }
    pair = await start_pair(start_picker, start_envoy_here, redis_server, config, Template.FULL_DUPLEX)
    await pair.met()
    yield pair
    for engine in engines:
        await engine.close()


def text(seed, tokens):
    return random.Random(seed).randbytes(2 * tokens).hex()


async def say(envoy, text, previous=None, *, stream=False):
    """One turn; returns who answered, what the answer is called, and its usage."""
    asked = {"model": "sim", "input": text, "max_output_tokens": 50, "stream": stream, "previous_response_id": previous}
    answer = await send(envoy.port, json.dumps(asked).encode(), path="/v1/responses")
    assert answer.status == 200, answer.body
    if stream:
        events = [line for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
        response = json.loads(events[-1].removeprefix(b"data: "))["response"]
    else:
        response = answer.seen
    return answer.headers["x-engine"], response["id"], response["usage"]


async def names(pickers, count):
    async def known():
        return [(await picker.metrics())("session_names") for picker in pickers] == [count] * len(pickers)

    await until(known)


async def test_the_next_turn_of_a_stored_response_goes_through_any_picker_to_who_holds_it(storing):
    pickers, envoys = storing.pickers, storing.envoys
    turns = {}
    for number in range(12):
        turns[number] = await say(envoys[number % 2], text(number, 1500), stream=number % 3 == 0)
    assert len({home for home, _, _ in turns.values()}) > 1
    await names(pickers, 12)

    async def go_on(number, envoy):
        home, previous, before = turns[number]
        # Another engine would answer 404.
        turns[number] = await say(envoy, text(100 + number, 100), previous, stream=number % 2 == 0)
        assert turns[number][0] == home
        # All but the last token of the answer before was computed, in whole blocks.
        known = (before["input_tokens"] + before["output_tokens"] - 1) // 16 * 16
        assert turns[number][2]["input_tokens_details"]["cached_tokens"] == known > 1400

    for number in range(12):
        await go_on(number, envoys[1 - number % 2])
    await names(pickers, 24)
    # One that starts anew knows it from the other, what that had heard from it included.
    await pickers[0].stop(signal.SIGKILL)
    await peers(pickers[1], 0)
    await pickers[0].start()
    await peers(pickers[0], 1)
    await healthy(pickers, envoys)
    await names(pickers, 24)
    for number in range(12):
        await go_on(number, envoys[0])
    for picker in pickers:
        metrics = await picker.settled()
        assert metrics("sharing_messages_total", outcome="malformed") == 0
        assert metrics("sessions_unread_total", reason="malformed_from_peer") == 0
        assert metrics("sessions_held") == 0


# --- Engines with KV events ---------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def hearing(redis_server, start_picker, start_envoy_here):
    """Starts two pickers that hear the events of two engines themselves, and know of each other's picks."""
    engines = []

    async def start(speed):
        engines.extend([
            await start_engine(replace(simulated(number, 2000), cost=StepCost(speed=speed))) for number in range(2)
        ])  # fmt: skip
        config = picker_config("direct", [entry(engine, events=True) for engine in engines])
        pair = await start_pair(start_picker, start_envoy_here, redis_server, config, Template.FULL_DUPLEX)
        await pair.met()

        async def connected():
            return all([(await picker.metrics())("kv_sources_connected") == 2 for picker in pair.pickers])

        await until(connected)
        # How large an engine's blocks are is known from its first events on.
        async with aiohttp.ClientSession() as session:
            for number, engine in enumerate(engines):
                warm = body(prompt(1000 + number, 2 * BLOCK + 1))
                async with session.post(f"{engine.url}/v1/completions", data=warm) as answer:
                    assert answer.status == 200
                for picker in pair.pickers:
                    await until_known(picker, warm, engine.stats()["name"], 2 * BLOCK)
        return engines, pair

    yield start
    for engine in engines:
        await engine.close()


async def known(picker, request):
    """The tokens of a request that each engine holds, as a picker knows it."""
    (up,) = picker.events("The picker is up")
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{up['predict']}/v1/cache/predict", data=request) as answer,
    ):
        assert answer.status == 200
        return {pod["pod_id"]: pod["cached_tokens"] for pod in (await answer.json())["pod_affinities"]}


async def until_known(picker, request, name, tokens):
    async def is_it():
        return (await known(picker, request))[name] == tokens

    await until(is_it)


def ids(text):
    """The simulated engine's tokens: four bytes each."""
    return [int.from_bytes(text[at : at + 4].encode(), "little") for at in range(0, len(text), 4)]


async def complete(envoy, request):
    answer = await send(envoy.port, request, path="/v1/completions")
    assert answer.status == 200, answer.body
    usage = answer.seen["usage"]
    return answer.headers["x-engine"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_both_hear_the_same_events_and_nothing_counts_twice(hearing):
    _, pair = await hearing(500)
    rng = random.Random(4)
    stems = [prompt(number, 16 * (number + 2)) for number in range(6)]
    hits = 0
    for turn in range(24):
        asked = rng.choice(stems) + prompt(100 + turn, rng.choice((0, 5, 16, 31)))
        request, tokens = body(asked), len(asked) // 4
        predicted = [await known(picker, request) for picker in pair.pickers]
        assert predicted[0] == predicted[1]
        name, cached = await complete(pair.envoys[turn % 2], request)
        assert cached == predicted[0][name] == max(predicted[0].values())
        hits += cached > 0
        for picker in pair.pickers:
            await until_known(picker, request, name, (tokens - 1) // BLOCK * BLOCK)
    assert hits > 8
    for picker in pair.pickers:
        metrics = await picker.settled()
        # Each compares those that it sent.
        assert metrics("predictions_compared_total") == 12
        assert metrics("predictions_compared_total", outcome="exact") == 12
        assert metrics("endpoint_queued_tokens") == 0
        assert metrics("sharing_messages_total", outcome="malformed") == 0


async def test_a_burst_with_one_new_prefix_through_both_sticks_together_and_counts_once(hearing):
    engines, pair = await hearing(0.5)
    prefix = prompt(1, 2000)
    # As token ids, so that it does not matter how fast this machine tokenizes twelve prompts at once.
    requests = [body(ids(prefix + prompt(10 + number, 40)), max_tokens=20) for number in range(12)]
    first = asyncio.create_task(complete(pair.envoys[0], requests[0]))

    async def heard():
        return (await pair.pickers[1].metrics())("sharing_remote_requests") == 1

    await until(heard)
    others = [asyncio.create_task(complete(pair.envoys[number % 2], requests[number])) for number in range(1, 12)]

    async def all_there():
        """All twelve count at both, once each."""
        pages = [await picker.metrics() for picker in pair.pickers]
        return [sum(page.series("endpoint_in_flight_requests", "address").values()) for page in pages] == [12, 12]

    await until(all_there)
    queued = [(await picker.metrics())("endpoint_queued_tokens") for picker in pair.pickers]
    # Of the prefix at most one copy is to be computed, of the others what is their own, in whole blocks.
    assert max(queued) <= 2040 + 11 * (40 + BLOCK)
    # Each sees on one engine all that it will hold of a prompt, whole blocks but for the last token, whoever sent it.
    for request in requests:
        for picker in pair.pickers:
            matched = await picker.matched(request, "kvcache-aware", "/v1/completions")
            assert sorted(matched.values()) == [(0, 2032), (2032, 2032)]
    answers = await asyncio.gather(first, *others)
    (home,) = {name for name, _ in answers}
    assert answers[0][1] == 0
    assert all(cached in (0, 2000) for _, cached in answers)
    for picker in pair.pickers:
        for request in requests:
            await until_known(picker, request, home, 2032)
        other = next(engine.stats()["name"] for engine in engines if engine.stats()["name"] != home)
        assert (await known(picker, requests[0]))[other] == 0
        metrics = await picker.settled()
        assert metrics("predictions_compared_total", outcome="over") == 0
        assert metrics("endpoint_queued_tokens") == 0
