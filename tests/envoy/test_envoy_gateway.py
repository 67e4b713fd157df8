"""What manifests/components/envoy-gateway promises, on a real Envoy configured as Envoy Gateway would from them."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest
import pytest_asyncio

from picker.app.envoy import find_envoy
from picker.core.headers import CLIENT_FORBIDDEN, DESTINATION, LB_METADATA
from tests.manifests.builds import build
from tests.manifests.envoy_gateway import bootstrap

pytestmark = pytest.mark.asyncio(loop_scope="session")

MEBIBYTE = 1 << 20
UNKNOWN = "192.0.2.1:8000"


def generated(picker: str, endpoints: list[str], **options: str) -> dict:
    return bootstrap(build("envoy-gateway"), picker=picker, endpoints=endpoints, **options)


@pytest.fixture
def addresses(upstreams):
    return [upstream.address for upstream in upstreams]


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(envoys, addresses, constant_picker, dead_address):
    """Three live endpoints, a dead one, and a picker."""
    return await envoys(generated(constant_picker.address, [*addresses, dead_address]))


@pytest_asyncio.fixture(loop_scope="session")
async def without_picker(envoys, addresses, dead_address):
    return await envoys(generated(dead_address, addresses))


async def test_envoy_accepts_it(tmp_path):
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(generated("127.0.0.1:9002", ["127.0.0.1:8001"])))
    command = [find_envoy(), "--mode", "validate", "-l", "warning", "-c", path]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 0, done.stderr


# The header is obeyed, with fallback


@pytest.mark.parametrize("number", range(3))
async def test_a_request_goes_where_the_picker_says(gateway, upstreams, constant_picker, send, number):
    constant_picker.destination = upstreams[number].address
    answer = await send(gateway.port, [b"a" * 1000, b"b" * 1000], every=0.02)
    assert (answer.status, answer.seen["port"], answer.seen["length"]) == (200, upstreams[number].port, 2000)


async def test_without_a_body_too(gateway, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[1].address
    answer = await send(gateway.port, method="GET", path="/v1/models")
    assert (answer.status, answer.seen["port"]) == (200, upstreams[1].port)


async def test_a_dead_pick_falls_over_to_the_next_of_the_list(gateway, upstreams, constant_picker, dead_address, send):
    constant_picker.destination = f"{dead_address},{upstreams[2].address},{upstreams[0].address}"
    answer = await send(gateway.port, b"{}")
    assert (answer.status, answer.seen["port"]) == (200, upstreams[2].port)


async def test_only_endpoints_of_the_service_can_be_named(gateway, upstreams, constant_picker, send):
    constant_picker.destination = f"{UNKNOWN},{upstreams[1].address}"
    assert (await send(gateway.port, b"{}")).seen["port"] == upstreams[1].port


async def test_after_the_list_comes_the_fallback_policy(gateway, upstreams, constant_picker, dead_address, send):
    for destination in (UNKNOWN, dead_address):
        constant_picker.destination = destination
        answer = await send(gateway.port, b"{}")
        assert answer.status == 200
        assert answer.seen["port"] in {upstream.port for upstream in upstreams}


# The picker learns who served


async def test_the_picker_is_told_who_served(gateway, upstreams, constant_picker, dead_address, send):
    constant_picker.destination = f"{dead_address},{upstreams[2].address}"
    await send(gateway.port, b"{}")
    stream = constant_picker.streams[-1]
    assert stream.kinds == ["request_headers", "request_body", "response_headers"]
    message = stream.one("response_headers")
    assert message.attributes["envoy.filters.http.ext_proc"]["upstream.address"] == upstreams[2].address
    assert message.metadata_context.filter_metadata[LB_METADATA][DESTINATION] == constant_picker.destination


async def test_the_gateways_deadline_for_grpc_does_not_end_the_stream_of_a_long_answer(
    envoys, addresses, constant_picker, connect
):
    """Envoy Gateway sets `grpc_service.timeout`, 10 s, and cannot be told otherwise; here it is shorter."""
    envoy = await envoys(generated(constant_picker.address, addresses, grpc_timeout="0.3s"))
    constant_picker.destination = addresses[0]
    client = await connect(envoy.port)
    await client.head("POST", "/stream?chunks=12&every=0.1", [("content-length", "2")])
    await client.send(b"{}")
    await client.answer_head()
    stream = constant_picker.streams[-1]
    ended_early = False
    received = b""
    async for chunk in client.chunks():
        received += chunk
        ended_early = ended_early or (stream.ended.is_set() and b"data: 11" not in received)
    assert b"data: 11" in received
    assert not ended_early
    assert await asyncio.to_thread(stream.ended.wait, 5)
    await client.close()


# Clients do not choose


def spoofed(address: str) -> list[tuple[str, str]]:
    return [(name, address) for name in sorted(CLIENT_FORBIDDEN)]


async def test_control_headers_of_clients_reach_nobody(gateway, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    answer = await send(gateway.port, b"{}", headers=spoofed(upstreams[1].address))
    assert answer.seen["port"] == upstreams[0].port
    assert answer.seen_headers(DESTINATION) == [upstreams[0].address]
    assert not CLIENT_FORBIDDEN & set(constant_picker.streams[-1].headers())


async def test_clients_do_not_choose_while_the_picker_is_down(without_picker, upstreams, send):
    ports = set()
    for _ in range(40):
        answer = await send(without_picker.port, b"{}", headers=spoofed(upstreams[1].address))
        assert answer.status == 200
        assert answer.seen_headers(DESTINATION) == []
        ports.add(answer.seen["port"])
    assert ports == {upstream.port for upstream in upstreams}


async def test_without_early_removal_clients_would_choose(envoys, addresses, upstreams, dead_address, send):
    """Why the ClientTrafficPolicy is shipped: the gateway obeys the header, whoever wrote it."""
    documents = build("envoy-gateway")
    (policy,) = [each for each in documents if each["kind"] == "ClientTrafficPolicy"]
    policy["spec"]["headers"]["earlyRequestHeaders"]["remove"] = []
    envoy = await envoys(bootstrap(documents, picker=dead_address, endpoints=addresses))
    answers = [await send(envoy.port, b"{}", headers=spoofed(addresses[1])) for _ in range(5)]
    assert {answer.seen["port"] for answer in answers} == {upstreams[1].port}


# The buffer limit


async def test_prompts_of_many_megabytes_pass(gateway, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    answer = await send(gateway.port, bytes(10 * MEBIBYTE))
    assert (answer.status, answer.seen["length"]) == (200, 10 * MEBIBYTE)
    assert answer.seen["port"] == upstreams[0].port


async def test_a_body_above_the_limit_is_refused_by_envoy(gateway, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    before = [upstream.requests for upstream in upstreams]
    assert (await send(gateway.port, bytes(17 * MEBIBYTE))).status == 413
    assert [upstream.requests for upstream in upstreams] == before


async def test_with_the_gateways_default_limit_prompts_would_be_refused(envoys, addresses, constant_picker, send):
    """Why the limit is in the ClientTrafficPolicy."""
    documents = build("envoy-gateway")
    (policy,) = [each for each in documents if each["kind"] == "ClientTrafficPolicy"]
    del policy["spec"]["connection"]
    envoy = await envoys(bootstrap(documents, picker=constant_picker.address, endpoints=addresses))
    assert (await send(envoy.port, bytes(MEBIBYTE))).status == 413


# Fail open


async def test_no_request_fails_when_the_picker_is_down(without_picker, send):
    assert {(await send(without_picker.port, b"{}")).status for _ in range(10)} == {200}


async def test_no_request_fails_when_the_picker_dies_and_comes_back(envoys, addresses, start_constant_picker, send):
    picker = start_constant_picker()
    envoy = await envoys(generated(picker.address, addresses))

    async def asked() -> bool:
        before = len(picker.streams)
        assert (await send(envoy.port, b"{}")).status == 200
        return len(picker.streams) > before

    assert await asked()
    picker.kill()
    assert not await asked()
    picker.start()
    deadline = asyncio.get_running_loop().time() + 10
    while not await asked():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)


async def test_a_picker_that_hangs_costs_one_message_timeout(envoys, addresses, constant_picker, send):
    documents = build("envoy-gateway")
    (policy,) = [each for each in documents if each["kind"] == "EnvoyExtensionPolicy"]
    policy["spec"]["extProc"][0]["messageTimeout"] = "200ms"
    envoy = await envoys(bootstrap(documents, picker=constant_picker.address, endpoints=addresses))
    constant_picker.hangs = True
    assert (await send(envoy.port, b"{}")).status == 200
    assert constant_picker.streams


async def test_a_draining_picker_is_left(envoys, addresses, start_constant_picker, send):
    picker = start_constant_picker()
    config = generated(picker.address, addresses)
    (cluster,) = [each for each in config["static_resources"]["clusters"] if each["name"] == "picker"]
    # Envoy checks once a minute until the first request, and only then by the interval: too long for a test.
    cluster["health_checks"][0]["no_traffic_interval"] = "1s"
    envoy = await envoys(config)
    assert (await send(envoy.port, b"{}")).status == 200
    assert len(picker.streams) == 1
    picker.set_serving(False)
    deadline = asyncio.get_running_loop().time() + 15
    while (await envoy.stats("cluster.picker."))["cluster.picker.membership_healthy"]:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.1)
    assert (await send(envoy.port, b"{}")).status == 200
    assert len(picker.streams) == 1
