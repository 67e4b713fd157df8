"""Replies of engines, read while they pass, are known when the client sends them back: with real caches behind it."""

from __future__ import annotations

import json

import pytest

from picker.app.envoy import Template, bootstrap
from picker.core.usage import UsageReader
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.support.http_client import send

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAME = "session-prefix-cache-producer"
SCHEDULER = {
    "pluginConfig": [{"name": "prefix-cache-scorer", "args": {"prefixMatchInfoProducerName": NAME}}],
    "plugins": {
        "Score": {
            "enabled": [{"name": "least-request", "weight": 1}, {"name": "prefix-cache-scorer", "weight": 2}],
        }
    },
}


@pytest.mark.parametrize("learn", ["from-body", "off"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("template", [Template.FULL_DUPLEX, Template.OBSERVABILITY])
async def test_the_next_turn_matches_beyond_the_last_prompt_when_replies_are_read(
    start_picker, start_envoy_here, template, stream, learn
):
    running = [await start_engine(EngineSimConfig(cost=StepCost(speed=500), grace=0)) for _ in range(2)]
    try:
        addresses = [engine.url.removeprefix("http://") for engine in running]
        picker = await start_picker(
            {
                "endpoints": {"static": [{"address": address} for address in addresses]},
                "exchange": {"learnUsage": learn},
                "scheduler": SCHEDULER,
            }
        )
        envoy = await start_envoy_here(bootstrap(template, picker=picker.address, endpoints=addresses))

        async def say(*messages):
            body = {"model": "sim", "messages": messages, "max_tokens": 600, "stream": stream}
            answer = await send(envoy.port, json.dumps(body | {"stream_options": {"include_usage": True}}).encode())
            assert answer.status == 200
            reader = UsageReader(answer.headers["content-type"].encode(), b"", "/v1/chat/completions", keep_reply=True)
            reader.feed(answer.body)
            return reader.result().reply.decode()

        await say({"role": "user", "content": "the first request shows the picker that there are observers"})
        question = {"role": "user", "content": "question"}
        reply = await say(question)
        assert len(reply) > 600
        await picker.settled()
        known, total = await best(picker, question, {"role": "assistant", "content": reply}, question)
        assert (known / total > 0.9) == (learn == "from-body")
        other, _ = await best(picker, question, {"role": "assistant", "content": "X" + reply}, question)
        assert other / total < 0.1
    finally:
        for engine in running:
            await engine.close()


async def best(picker, *messages):
    body = json.dumps({"model": "sim", "messages": messages}).encode()
    return max((await picker.matched(body, "prefix-cache-scorer")).values())
