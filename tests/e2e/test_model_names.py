"""A name that stands for other models: what engines get, and what clients are told, through a real Envoy."""

from __future__ import annotations

import hashlib
import json

import pytest
import pytest_asyncio

from picker.app.envoy import Template, bootstrap
from picker.core.exchange.events import BodyMode
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.support.http_client import send

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODELS = {"rewrites": [{"name": "fast", "targets": [{"model": "org/model-7b-2026-11"}]}]}
WAYS = [
    (Template.BUFFERED, None),
    (Template.BUFFERED, BodyMode.STREAMED),
    (Template.BUFFERED, BodyMode.BUFFERED),
    (Template.FULL_DUPLEX, None),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine():
    started = await start_engine(EngineSimConfig(model="org/model-7b-2026-11", cost=StepCost(speed=50)))
    yield started
    await started.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("template", "response"), WAYS)
async def test_engines_get_the_target_and_clients_read_the_name(
    engine, pickers, start_envoy_here, template, response, stream
):
    place = f"127.0.0.1:{engine.port}"
    picker = await pickers({"endpoints": {"static": [{"name": "a", "address": place}]}, "models": MODELS})
    envoy = await start_envoy_here(
        bootstrap(template, picker=picker.address, endpoints=[place], response_body=response)
    )
    body = json.dumps(
        {
            "stream": stream,
            "messages": [{"role": "user", "content": 'say "model":"fast" ' * 5000}],
            "model": "fast",
            "max_tokens": 6,
        }
    ).encode()
    answer = await send(envoy.port, body)
    # An engine that does not serve the model answers 404.
    assert answer.status == 200, answer.body
    seen = template is Template.FULL_DUPLEX or response is not None
    name = "fast" if seen else "org/model-7b-2026-11"
    if stream:
        events = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
        assert len(events) > 1
        assert {json.loads(event)["model"] for event in events} == {name}
        assert answer.body.rstrip().endswith(b"data: [DONE]")
    else:
        assert answer.seen["model"] == name


async def test_other_requests_pass_byte_for_byte(pickers, start_envoy_here, engines):
    entries = [{"name": f"e{n}", "address": one.address} for n, one in enumerate(engines)]
    picker = await pickers({"endpoints": {"static": entries}, "models": MODELS})
    envoy = await start_envoy_here(
        bootstrap(Template.BUFFERED, picker=picker.address, endpoints=[one.address for one in engines])
    )
    for tag, sent, arrived in (
        ("other", b'{ "model" : "else", "prompt": "x" }', b'{ "model" : "else", "prompt": "x" }'),
        ("name", b'{ "model" : "fast", "prompt": "x" }', b'{ "model" : "org/model-7b-2026-11", "prompt": "x" }'),
        ("broken", b'{ "model" : "fast", "prompt": ', b'{ "model" : "fast", "prompt": '),
    ):
        answer = await send(envoy.port, sent, path="/v1/completions", headers=[("x-tag", f"models-{tag}")])
        assert answer.status == 200
        seen = next(one.seen[f"models-{tag}"] for one in engines if f"models-{tag}" in one.seen)
        assert seen.length == len(arrived)
        assert seen.all("content-length") == [str(len(arrived))]
        assert seen.sha256 == hashlib.sha256(arrived).hexdigest()
