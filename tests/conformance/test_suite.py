"""The tests of the public conformance suite that concern a picker, by their names there, on a real Envoy.

The suite belongs to the Gateway API Inference Extension and runs in a cluster, against a gateway with its controller. Here
Envoy is configured as a gateway would, the API server is a fake one, and the picker is the real one. What the suite tests
besides is listed in docs/conformance.md.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter

import pytest

from picker.app.envoy import Template
from tests.conformance.gateways import (
    FAIL_OPEN,
    GATEWAYS,
    Backend,
    Rule,
    buffered,
    envoy_gateway,
    full_duplex,
    full_duplex_that_fails_open,
    routes,
    speaking_h2c,
    telling_who_served,
)
from tests.conformance.servers import BACKEND
from tests.support.http_client import RawClient, send
from tests.support.picker_process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SELECTION = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
SELECTED = "x-conformance-test-selected-endpoint"
POOL = "x-conformance-test-epp-pool"
BODY = json.dumps(
    {"model": "conformance-fake-model", "prompt": "Write as if you were a critic: San Francisco"}
).encode()
TEMPLATES = [Template.BUFFERED, Template.FULL_DUPLEX]

any_gateway = pytest.mark.parametrize("gateway", GATEWAYS, ids=lambda gateway: gateway.__name__)


async def ask(port, *, select="", path="/v1/completions", body=BODY):
    headers = [("content-type", "application/json"), *([(SELECTION, select)] if select else [])]
    return await send(port, body, path=path, headers=headers)


async def left(envoy):
    """Whether an Envoy has given its picker up."""
    return (await envoy.stats("cluster.picker."))["cluster.picker.membership_healthy"] == 0


async def many(port, *, select="", path="/v1/completions", total=100, workers=10):
    """So many requests from clients that send one after the other."""
    answers = []

    async def work():
        client = await RawClient.connect(port)
        headers = [(SELECTION, select)] if select else []
        answers.extend([await client.request(BODY, path=path, headers=headers) for _ in range(total // workers)])
        await client.close()

    await asyncio.gather(*(work() for _ in range(workers)))
    assert {answer.status for answer in answers} == {200}
    return answers


@any_gateway
@pytest.mark.parametrize("pods", [[2], [0, 1], [0, 1, 2]], ids=str)
async def test_gateway_following_epp_routing(primary, picker_of, envoys, gateway, pods):
    picker = await picker_of(primary)
    envoy = await envoys(gateway(picker.address, primary.addresses))
    allowed = [primary.pods[number] for number in pods]
    for pod in allowed:
        assert (await ask(envoy.port, select=pod.ip)).seen["pod"] == pod.name
    answers = await many(envoy.port, select=",".join(pod.ip for pod in allowed))
    assert {answer.seen["pod"] for answer in answers} <= {pod.name for pod in allowed}
    for answer in answers:
        assert answer.headers[SELECTED] == answer.headers[BACKEND]


RANKS = {
    "one-pod": {1: []},
    "one-pod-with-a-fixed-rank": {0: [], 2: [1]},
    "all-pods-one-without-a-rank": {0: [], 1: [0, 2], 2: []},
}
"""The pods to choose from, and of which ranks; all of them where none is named."""


@any_gateway
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
async def test_gateway_following_epp_routing_with_data_parallelism(data_parallel, picker_of, envoys, gateway, ranks):
    picker = await picker_of(data_parallel)
    envoy = await envoys(gateway(picker.address, data_parallel.addresses))
    for pod in data_parallel.pods:
        assert (await ask(envoy.port, select=pod.ip)).seen["pod"] == pod.name
    named, allowed = [], set()
    for number, some in ranks.items():
        pod = data_parallel.pods[number]
        named += [f"{pod.ip}:{data_parallel.ports[rank]}" for rank in some] or [pod.ip]
        allowed |= {(pod.name, str(data_parallel.ports[rank])) for rank in some or range(3)}
    answers = await many(envoy.port, select=",".join(named))
    assert {(answer.seen["pod"], answer.seen["httpPort"]) for answer in answers} <= allowed


@pytest.mark.parametrize("gateway", [buffered, full_duplex, full_duplex_that_fails_open])
async def test_gateway_destination_endpoint_served(primary, picker_of, envoys, gateway):
    """From metadata, and from nothing else."""
    picker = await picker_of(primary)
    envoy = await envoys(telling_who_served(gateway(picker.address, primary.addresses)))
    for pod in primary.pods:
        answer = await ask(envoy.port, select=pod.ip)
        assert answer.seen["pod"] == pod.name
        assert answer.headers[SERVED] == f"{pod.ip}:{primary.ports[0]}"


@any_gateway
async def test_gateway_destination_endpoint_served_by_attribute(primary, picker_of, envoys, gateway):
    """Envoy tells it by `upstream.address` where it is told to, so that nothing has to write the metadata."""
    picker = await picker_of(primary)
    envoy = await envoys(gateway(picker.address, primary.addresses))
    for pod in primary.pods:
        assert (await ask(envoy.port, select=pod.ip)).headers[SERVED] == f"{pod.ip}:{primary.ports[0]}"


@pytest.mark.parametrize(
    "gateway", [lambda *of: telling_who_served(buffered(*of)), envoy_gateway], ids=["metadata", "attribute"]
)
async def test_gateway_destination_endpoint_served_is_not_the_one_selected(
    make_pool, picker_of, envoys, gateway, request
):
    """The gateway goes down the list; the picker learns, and reports, where it ended."""
    pool = await make_pool(f"list-by-{request.node.callspec.id}")
    picker = await picker_of(pool)
    envoy = await envoys(gateway(picker.address, pool.addresses))
    body = json.dumps({"model": "conformance-fake-model", "prompt": "San Francisco " * 99}).encode()
    first = (await ask(envoy.port, body=body)).headers[BACKEND]
    (lost,) = [pod for pod in pool.pods if first.startswith(f"{pod.ip}:")]
    await lost.stop()
    answer = await ask(envoy.port, body=body)
    assert answer.status == 200
    assert answer.headers[SELECTED] == first  # which has the prompt in its cache
    assert answer.headers[SERVED] == answer.headers[BACKEND] != first
    (destinations,) = [value for name, value in answer.seen["headers"] if name == "x-gateway-destination-endpoint"]
    assert destinations.split(",")[:2] == [first, answer.headers[SERVED]]

    async def learnt():
        return (await picker.metrics())("served_elsewhere_total", by="fallback") == 1

    await until(learnt)


async def test_gateway_weighted_across_two_inference_pools(primary, secondary, picker_of, envoys):
    """Each picker is told of the endpoints of both pools, and picks of its own."""
    pools = {found.name: found for found in (primary, secondary)}
    backends = [Backend(name, (await picker_of(found)).address, found.addresses) for name, found in pools.items()]
    for template in TEMPLATES:
        rule = Rule("/weighted", {primary.name: 70, secondary.name: 30})
        envoy = await envoys(routes(template, backends, [rule]))
        select = ",".join(pod.ip for found in pools.values() for pod in found.pods)
        answers = await many(envoy.port, select=select, path="/weighted", total=200, workers=5)
        hits = Counter(answer.seen["pod"].rpartition("-")[0] for answer in answers)
        assert abs(hits[primary.name] / 200 - 0.7) <= 4.5 * math.sqrt(0.7 * 0.3 / 200)
        assert hits.keys() == pools.keys()
        for answer in answers:
            name = answer.seen["pod"].rpartition("-")[0]
            assert answer.headers[POOL] == pools[name].full_name
            assert answer.headers[SELECTED] == answer.headers[BACKEND]


@pytest.mark.parametrize("gateway", FAIL_OPEN)
async def test_epp_unavailable_fail_open(primary, start_picker, start_envoy_here, gateway):
    picker = await start_picker(primary.configuration)
    envoy = await start_envoy_here(gateway(picker.address, primary.addresses))
    target = primary.pods[0]

    async def pinned():
        answer = await ask(envoy.port, select=target.ip)
        return answer.status == 200 and answer.headers.get(SELECTED) == f"{target.ip}:{primary.ports[0]}"

    await until(pinned)
    await picker.stop()
    if gateway is full_duplex_that_fails_open:
        # Until a health check says so, the body of a request may be on its way to the picker before the connection fails.
        await until(lambda: left(envoy), 20)
    for _ in range(20):
        answer = await ask(envoy.port, select=target.ip)
        assert answer.status == 200
        assert answer.headers[BACKEND] in primary.addresses
        assert SELECTED not in answer.headers
    await picker.start()
    await until(pinned, 20)


@pytest.mark.parametrize("template", TEMPLATES)
async def test_httproute_multiple_rules_different_pools(primary, secondary, picker_of, envoys, template):
    pools = (primary, secondary)
    backends = [Backend(found.name, (await picker_of(found)).address, found.addresses) for found in pools]
    rules = [Rule(f"/{found.name}", {found.name: 1}) for found in pools]
    envoy = await envoys(routes(template, backends, rules))
    for found in pools:
        for body in (BODY, b""):
            answer = await ask(envoy.port, path=f"/{found.name}", body=body)
            assert answer.status == 200
            assert answer.seen["pod"] in {pod.name for pod in found.pods}
            assert answer.headers[POOL] == found.full_name
    assert (await ask(envoy.port, path="/elsewhere")).status == 404


@pytest.mark.parametrize("template", TEMPLATES)
async def test_httproute_multiple_gateways_different_pools(primary, secondary, picker_of, envoys, template):
    for found in (primary, secondary):
        backend = Backend(found.name, (await picker_of(found)).address, found.addresses)
        envoy = await envoys(routes(template, [backend], [Rule("/", {found.name: 1})]))
        answer = await ask(envoy.port)
        assert answer.seen["pod"] in {pod.name for pod in found.pods}
        assert answer.headers[POOL] == found.full_name


@any_gateway
async def test_inferencepool_app_protocol(primary, h2c, picker_of, envoys, gateway):
    """The picker picks the same, whatever the endpoints speak."""
    spoken = await envoys(speaking_h2c(gateway((await picker_of(h2c)).address, h2c.addresses)))
    for address in h2c.addresses:
        answer = await ask(spoken.port, select=address)
        assert answer.status == 200
        assert answer.headers["x-protocol"] == "HTTP/2"
        assert answer.headers[BACKEND] == answer.headers[SERVED] == address
    http = await envoys(gateway((await picker_of(primary)).address, primary.addresses))
    for address in primary.addresses:
        assert (await ask(http.port, select=address)).headers[BACKEND] == address
