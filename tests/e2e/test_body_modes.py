"""Every way in which Envoy can send bodies to the picker: nothing is lost, and every request goes where it was sent."""

from __future__ import annotations

import itertools

import pytest

from picker.app.envoy import Template, bootstrap
from picker.core.exchange.events import BodyMode
from tests.support.bodies import chat, chat_of
from tests.support.http_client import send
from tests.support.picker_process import over, until
from tests.support.sweep import MEBIBYTE, SIZES, sweep

pytestmark = pytest.mark.asyncio(loop_scope="session")

RESPONSE_MODES = (BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
UNUSED = {BodyMode.NONE: "no_body", BodyMode.STREAMED: "body_mode_streamed"}
"""Why the prompt of a request with a body is not used, in the modes where it never is."""


def expected_unused(mode, exchange):
    if exchange.size == 0 and (mode is not BodyMode.STREAMED or not exchange.streamed):
        return "no_body"
    return UNUSED.get(mode) or ("" if exchange.size > 1 else "invalid_json")


async def swept(envoy, picker, engines):
    """Sweep, check every exchange, and return them with the metrics before and after."""
    before = await picker.metrics()
    exchanges = await sweep(envoy.port, picker, engines)
    after = await picker.settled()
    for exchange in exchanges:
        exchange.check()
    return exchanges, before, after


@pytest.mark.parametrize(("request_mode", "response_mode"), list(itertools.product(BodyMode, RESPONSE_MODES)))
async def test_mode(pickers, start_envoy_here, engines, request_mode, response_mode):
    picker = await pickers(over(engines))
    config = bootstrap(
        Template.BUFFERED,
        picker=picker.address,
        endpoints=[engine.address for engine in engines],
        request_body=request_mode,
        response_body=response_mode,
        message_timeout=10,
    )
    exchanges, before, after = await swept(await start_envoy_here(config), picker, engines)

    for exchange in exchanges:
        assert exchange.decision["prompt_unused"] == expected_unused(request_mode, exchange)

    def learned(**labels):
        return after("learned_total", **labels) - before("learned_total", **labels)

    assert learned(success="true") == len(exchanges)
    assert learned(success="false") == 0
    # Without response bodies only an answer that ends with its headers proves its end.
    assert learned(on="response_body") == (1 if response_mode is BodyMode.NONE else len(exchanges))

    blind = sum(exchange.size > 0 or exchange.streamed for exchange in exchanges)
    found = {
        kind: count - before("anomalies_total", kind=kind)
        for kind, count in after.series("anomalies_total", "kind").items()
        if count != before("anomalies_total", kind=kind)
    }
    assert found == ({"streamed_request_body": blind} if request_mode is BodyMode.STREAMED else {})


async def test_mode_streamed_is_loud(start_picker, start_envoy_here, engines):
    picker = await start_picker(over(engines))
    addresses = [engine.address for engine in engines]
    config = bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses, request_body=BodyMode.STREAMED)
    envoy = await start_envoy_here(config)
    for _ in range(3):
        assert (await send(envoy.port, chat("hello"))).status == 200
    (line,) = picker.events("Envoy sends request bodies in mode STREAMED")
    assert (line["level"], line["anomaly"]) == ("warning", "streamed_request_body")
    assert "BUFFERED" in line["event"]


async def test_full_duplex_as_shipped(pickers, start_envoy_here, engines):
    picker = await pickers(over(engines))
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    exchanges, before, after = await swept(envoy, picker, engines)
    assert len(exchanges) == 2 * len(SIZES)
    assert after("learned_total", on="response_body", success="true") - before(
        "learned_total", on="response_body", success="true"
    ) == len(exchanges)
    assert after("anomalies_total") == before("anomalies_total")


async def test_only_the_beginning_of_a_body_past_the_limit_of_buffered_partial(pickers, start_envoy_here, engines):
    picker = await pickers(over(engines))
    config = bootstrap(
        Template.BUFFERED,
        picker=picker.address,
        endpoints=[engine.address for engine in engines],
        request_body=BodyMode.BUFFERED_PARTIAL,
        buffer_limit=128 * 1024,
    )
    envoy = await start_envoy_here(config)
    exchanges = await sweep(envoy.port, picker, engines, [64 * 1024, MEBIBYTE])
    for exchange in exchanges:
        exchange.check()
    assert [exchange.decision["prompt_unused"] for exchange in exchanges] == [
        "",
        "",
        "body_truncated",
        "body_truncated",
    ]
    assert (await picker.settled()).series("anomalies_total", "kind").keys() <= {"streamed_request_body"}


async def test_decisions_can_be_watched_while_requests_pass(pickers, start_envoy_here, engines, watch):
    picker = await pickers(over(engines))
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    async with watch(picker) as decisions:

        async def watching():
            await send(envoy.port, chat("is anybody there"))
            return decisions

        await until(watching)
        decisions.clear()
        answers = [await send(envoy.port, chat_of(1000, seed), headers=[("x-tag", f"w{seed}")]) for seed in range(9)]

        async def all_came():
            return len(decisions) >= len(answers)

        await until(all_came)
    by_id = {decision.request_id: decision for decision in decisions}
    for number, answer in enumerate(answers):
        seen = next(found for engine in engines if (found := engine.seen.pop(f"w{number}", None)))
        decision = by_id[seen.request_id]
        assert list(decision.destinations) == [answer.headers["x-engine"]]
        assert decision.endpoints[0].total == max(endpoint.total for endpoint in decision.endpoints)
