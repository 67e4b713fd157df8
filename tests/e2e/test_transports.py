"""What carries ext_proc makes no difference to any request: our own HTTP/2, grpcio, TLS, and how Envoy ends streams."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from picker.app.envoy import Template, bootstrap
from picker.core.exchange.events import BodyMode
from tests.support.bodies import chat
from tests.support.engine import answer_bytes
from tests.support.http_client import RawClient, send
from tests.support.leaving import STAGES, leave
from tests.support.load import load
from tests.support.picker_process import over
from tests.support.sweep import MEBIBYTE, sweep

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRANSPORTS = ("http2", "grpcio")
NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = BodyMode
COUNTED = {
    "learned_total": "success",
    "anomalies_total": "kind",
    "requests_finished_total": "status",
    "prompt_unused_total": "reason",
    "decisions_total": "reason",
}
MODES = [(BUFFERED, NONE), (PARTIAL, BUFFERED), (STREAMED, STREAMED), (NONE, DUPLEX), (DUPLEX, NONE), (DUPLEX, DUPLEX)]


def over_transport(engines, transport, **listen):
    return over(engines, listen={"transport": transport, **listen})


@pytest.mark.parametrize(("request_body", "response_body"), MODES)
async def test_both_transports_answer_the_same(pickers, start_envoy_here, engines, request_body, response_body):
    addresses = [engine.address for engine in engines]
    results = []
    for transport in TRANSPORTS:
        picker = await pickers(over_transport(engines, transport))
        config = bootstrap(
            Template.BUFFERED,
            picker=picker.address,
            endpoints=addresses,
            request_body=request_body,
            response_body=response_body,
            message_timeout=10,
        )
        envoy = await start_envoy_here(config)
        before = await picker.metrics()
        exchanges = await sweep(envoy.port, picker, engines)
        for exchange in exchanges:
            exchange.check()
        odd = [await send(envoy.port, body) for body in (b"{bad", b'{"messages": 3}')]
        odd += [await send(envoy.port, method=method, path="/v1/models?bytes=9") for method in ("GET", "HEAD")]
        await leave_halfway(envoy.port)
        after = await picker.settled()
        counted = {
            name: {
                value: after(name, **{label: value}) - before(name, **{label: value})
                for value in after.series(name, label)
            }
            for name, label in COUNTED.items()
        }
        results.append(
            (
                [exchange.summary for exchange in exchanges],
                [(answer.status, answer.body, sorted(answer.headers.keys() - {"date"})) for answer in odd],
                {name: {value: count for value, count in series.items() if count} for name, series in counted.items()},
            )
        )
    assert results[0] == results[1]


async def leave_halfway(port):
    """Leave in the middle of an answer that has begun."""
    client = await RawClient.connect(port)
    await client.head("POST", "/v1/chat/completions?bytes=3000&chunks=30&every=0.02", [("content-length", "2")])
    await client.send(b"{}")
    assert (await client.answer_head())[0] == 200
    client.abort()


@pytest.mark.parametrize("template", Template)
async def test_both_transports_refuse_the_same(pickers, start_envoy_here, template):
    refusals = []
    for transport in TRANSPORTS:
        picker = await pickers(over_transport([], transport))
        envoy = await start_envoy_here(bootstrap(template, picker=picker.address, endpoints=["127.0.0.1:1"]))
        answers = [await send(envoy.port, body) for body in (chat("nobody"), b"")]
        refusals.append([(answer.status, answer.headers["content-type"], answer.body) for answer in answers])
        await picker.settled()
    assert refusals[0] == refusals[1]
    assert [status for status, *_ in refusals[0]] == [503, 503]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_ext_proc_through_tls(start_picker, start_envoy_here, engines, transport):
    picker = await start_picker(over_transport(engines, transport, tls={"mode": "self-signed"}))
    for template in Template:
        config = bootstrap(template, picker=picker.address, endpoints=[engine.address for engine in engines])
        (cluster,) = [cluster for cluster in config["static_resources"]["clusters"] if cluster["name"] == "picker"]
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"]},
            },
        }
        envoy = await start_envoy_here(config)
        for exchange in await sweep(envoy.port, picker, engines, [0, 1, 62_001, MEBIBYTE]):
            exchange.check()
        stats = await envoy.stats("cluster.picker.")
        assert stats["cluster.picker.ssl.handshake"] > 0
        assert stats["cluster.picker.health_check.success"] > 0
    await picker.settled()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_however_envoy_ends_streams(start_picker, start_envoy_here, engines, transport):
    picker = await start_picker(over_transport(engines, transport))
    addresses = [engine.address for engine in engines]
    served = 0
    for template, graceful in itertools.product(Template, (True, False)):
        config = bootstrap(template, picker=picker.address, endpoints=addresses, graceful_close=graceful)
        envoy = await start_envoy_here(config)
        async with load(envoy.port) as traffic:
            await traffic.more(150)
        assert traffic.errors == {}
        served += traffic.total
        metrics = await picker.settled()
        assert metrics("anomalies_total") == 0
        assert metrics("learned_total", success="true") == served
        resets = (await envoy.stats("cluster.picker.http2."))["cluster.picker.http2.tx_reset"]
        # However Envoy ends other streams, observing ones are reset.
        observing = template is Template.OBSERVABILITY
        assert resets == traffic.total * (observing + (not graceful))
        assert metrics("transport_events_total", event="handler_errors") == 0


@pytest.mark.parametrize("template", Template)
async def test_clients_that_leave_leave_nothing_behind_with_grpcio(pickers, start_envoy_here, engines, template):
    picker = await pickers(over_transport(engines, "grpcio"))
    addresses = [engine.address for engine in engines]
    envoy = await start_envoy_here(bootstrap(template, picker=picker.address, endpoints=addresses))
    dice = random.Random(11)
    before = await picker.metrics()
    await asyncio.gather(*(leave(envoy.port, dice.choice(STAGES), dice) for _ in range(150)))
    after = await picker.settled()
    assert after("anomalies_total") == before("anomalies_total")
    routed = after("decisions_total", reason="routed") - before("decisions_total", reason="routed")
    assert after("learned_total") - before("learned_total") == routed


async def test_more_requests_than_a_connection_may_have_streams(start_picker, start_envoy_here, engines):
    picker = await start_picker(over_transport(engines, "http2", maxConcurrentStreams=10))
    addresses = [engine.address for engine in engines]
    # Envoy learns the limit once a connection is up; what it sent until then is refused, and goes on without a pick.
    envoy = await start_envoy_here(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))
    path = "/v1/chat/completions?bytes=100&chunks=4&every=0.1"
    answers = await asyncio.gather(*(send(envoy.port, chat(f"{number}"), path=path) for number in range(60)))
    assert {answer.status for answer in answers} == {200}
    metrics = await picker.settled()
    assert metrics("transport_events_total", event="connections_opened") > 1
    assert metrics("decisions_total", reason="routed") >= 10


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_clients_that_do_not_read_take_nothing_from_others(start_picker, start_envoy_here, engines, transport):
    picker = await start_picker(over_transport(engines, transport))
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    size = 10 * MEBIBYTE
    idle = [
        RawClient(*await asyncio.open_connection("127.0.0.1", envoy.port, limit=1024))  # what is not read stays unread
        for _ in range(40)
    ]
    for client in idle:
        await client.head("POST", f"/v1/chat/completions?bytes={size}&chunks=20", [("content-length", "2")])
        await client.send(b"{}")
    path = "/v1/chat/completions?bytes=70000&chunks=4"
    answers = await asyncio.gather(*(send(envoy.port, chat(f"{number}"), path=path) for number in range(10)))
    assert {(answer.status, answer.body) for answer in answers} == {(200, answer_bytes(70_000))}
    assert (await idle[0].answer()).body == answer_bytes(size)
    assert (await envoy.stats("cluster.picker.http2."))["cluster.picker.http2.outbound_flood"] == 0
    for client in idle:
        client.abort()
    assert (await picker.settled())("anomalies_total") == 0
