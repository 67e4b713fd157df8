"""Who may say where a request goes: the picker, within what the gateway allows. Never a client."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import pytest_asyncio

from picker.app.envoy import Template, bootstrap, connection_manager
from tests.support.bodies import chat
from tests.support.engine import Engine
from tests.support.http_client import send
from tests.support.picker_process import KTHENA, OFTEN, over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

DESTINATION = "x-gateway-destination-endpoint"
CONTROL = {
    DESTINATION,
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint-subset",
    "x-picker-fallbacks",
    "x-prefiller-host-port",
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
}
HINT = "envoy.lb.subset_hint"


def steering(address):
    """Every header by which a client might try to choose this endpoint."""
    return [
        (name, address) for name in (*sorted(CONTROL), "X-Gateway-Destination-Endpoint", "x-envoy-original-dst-host")
    ]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def full_engines():
    """Three engines, of which the last says that it is full, so that the picker never picks it."""
    engines = [Engine() for _ in range(3)]
    engines[2].waiting = 50
    for engine in engines:
        await engine.start()
    yield engines
    for engine in engines:
        await engine.kill()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def picker(pickers, full_engines):
    picker = await pickers(over(full_engines, scheduler=KTHENA, scrape=OFTEN))

    async def scraped():
        return (await picker.metrics())("endpoint_waiting_requests") == 50

    await until(scraped)
    return picker


# Control headers


@pytest.mark.parametrize("stripped", [True, False], ids=["stripped-by-envoy", "left-to-the-picker"])
@pytest.mark.parametrize("template", Template)
async def test_a_client_does_not_choose(picker, envoys, full_engines, template, stripped):
    config = bootstrap(template, picker=picker.address, endpoints=[engine.address for engine in full_engines])
    if not stripped:
        del connection_manager(config)["early_header_mutation_extensions"]
    envoy = await envoys(config)
    before = await picker.metrics()
    wanted = full_engines[2]

    async def ask(number, method):
        headers = [*steering(wanted.address), ("x-tag", f"steer-{number}")]
        return await send(envoy.port, chat(f"{number}") if method == "POST" else b"", method=method, headers=headers)

    answers = await asyncio.gather(*(ask(number, "POST" if number % 2 else "GET") for number in range(30)))
    assert {answer.status for answer in answers} == {200}
    assert wanted.requests == 0
    decisions = {decision["request_id"]: decision for decision in await picker.decisions()}
    for number in range(30):
        seen = next(found for engine in full_engines if (found := engine.seen.pop(f"steer-{number}", None)))
        decision = await picker.decision(decisions[seen.request_id]["number"])
        assert seen.engine.address == decision["destinations"][0]
        assert {name for name, _ in seen.headers} & CONTROL == {DESTINATION}
        assert seen.all(DESTINATION) == [",".join(decision["destinations"])]
        assert wanted.address not in decision["destinations"]
    reported = (await picker.settled())("anomalies_total", kind="control_header_from_client")
    assert reported - before("anomalies_total", kind="control_header_from_client") == (0 if stripped else 30)


async def test_the_number_of_fallbacks_is_not_up_to_a_client(picker, envoys, full_engines):
    engines = [engine.address for engine in full_engines]
    envoy = await envoys(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=engines))
    for wanted in ("0", "16"):
        await send(envoy.port, chat("fallbacks"), headers=[("x-picker-fallbacks", wanted), ("x-tag", "fallbacks")])
        seen = next(found for engine in full_engines if (found := engine.seen.pop("fallbacks", None)))
        assert len(seen.all(DESTINATION)[0].split(",")) == 2


async def test_a_client_does_not_choose_while_the_picker_is_down(start_picker, envoys, start_engines):
    engines = await start_engines(3)
    picker = await start_picker(over(engines))
    addresses = [engine.address for engine in engines]
    buffered = await envoys(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))
    duplex = await envoys(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    assert (await send(buffered.port, chat("hello"))).status == 200
    assert (await send(duplex.port, chat("hello"))).status == 200
    await picker.stop()

    served = Counter()
    for number in range(60):
        headers = [*steering(addresses[1]), ("x-tag", f"down-{number}")]
        answer = await send(buffered.port, chat("hello"), headers=headers)
        assert answer.status == 200
        served[answer.headers["x-engine"]] += 1
        seen = next(found for engine in engines if (found := engine.seen.pop(f"down-{number}", None)))
        assert not {name for name, _ in seen.headers} & CONTROL
    assert served.keys() == set(addresses)
    assert served[addresses[1]] < 40

    before = sum(engine.requests for engine in engines)
    for method in ("POST", "GET"):
        assert (await send(duplex.port, method=method, headers=steering(addresses[1]))).status == 503
    assert sum(engine.requests for engine in engines) == before


# The subset hint


def with_hint(template, picker, engines, hint):
    """An Envoy whose filters allow only these endpoints; `hint` is what stands in the metadata."""
    addresses = [engine.address for engine in engines]
    config = bootstrap(template, picker=picker.address, endpoints=addresses, subset=[])
    setter = connection_manager(config)["http_filters"][0]["typed_config"]
    assert setter["metadata"][0]["metadata_namespace"] == HINT
    setter["metadata"][0]["value"] = {f"{DESTINATION}-subset": hint}
    return config


HINTS = {
    "one": ("{0}", [0]),
    "spaces": (" {1} , 192.0.2.7:8000", [1]),
    "string": ("{0},{1}", [0, 1]),
    "list": (["{1}", "{2}"], [1, 2]),
    "list-with-unknown": (["192.0.2.7", "{2}"], [2]),
    "host": ("127.0.0.1", [0, 1, 2]),
    "list-with-host": (["127.0.0.1"], [0, 1, 2]),
}
"""The hint, with endpoints by number, and the endpoints that it allows."""


@pytest.mark.parametrize("template", Template)
@pytest.mark.parametrize("case", HINTS)
async def test_picks_are_within_the_subset(pickers, start_envoy_here, engines, template, case):
    picker = await pickers(over(engines))
    addresses = [engine.address for engine in engines]
    hint, allowed = HINTS[case]
    hint = hint.format(*addresses) if isinstance(hint, str) else [place.format(*addresses) for place in hint]
    envoy = await start_envoy_here(with_hint(template, picker, engines, hint))
    answers = await asyncio.gather(*(send(envoy.port, chat(f"{number}" * 99)) for number in range(8)))
    assert {answer.status for answer in answers} == {200}
    assert {answer.headers["x-engine"] for answer in answers} <= {addresses[index] for index in allowed}
    recent = [await picker.decision(found["number"]) for found in await picker.decisions(8)]
    for decision in recent:
        assert {endpoint["address"] for endpoint in decision["endpoints"]} == {addresses[index] for index in allowed}


@pytest.mark.parametrize("template", Template)
@pytest.mark.parametrize("hint", ["192.0.2.7:8000", ["192.0.2.7", "127.0.0.1:1"], "", []], ids=str)
async def test_a_subset_without_endpoints_is_refused(pickers, start_envoy_here, engines, template, hint):
    picker = await pickers(over(engines))
    envoy = await start_envoy_here(with_hint(template, picker, engines, hint))
    before = sum(engine.requests for engine in engines)
    for body in (chat("hello"), b""):
        answer = await send(envoy.port, body)
        assert answer.status == 503
        assert answer.headers["content-type"] == "application/json"
        assert answer.seen["error"]["type"] == "none_in_subset"
    assert sum(engine.requests for engine in engines) == before


async def test_a_subset_hint_of_a_client_is_none(pickers, envoys, engines):
    picker = await pickers(over(engines))
    envoy = await envoys(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    headers = [("x-gateway-destination-endpoint-subset", "192.0.2.7:8000")]
    assert (await send(envoy.port, chat("hello"), headers=headers)).status == 200
