"""What the shipped configurations promise, held by a real Envoy with real sockets on both sides."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import pytest_asyncio

from picker.app.envoy import Template, bootstrap, connection_manager
from picker.core.exchange.events import BodyMode
from picker.core.headers import CLIENT_FORBIDDEN, DESTINATION, LB_METADATA, SUBSET, SUBSET_METADATA

pytestmark = pytest.mark.asyncio(loop_scope="session")

MEBIBYTE = 1 << 20
UNKNOWN = "192.0.2.1:8000"
SPOOFED_ORIGINAL_DESTINATION = "x-envoy-original-dst-host"


@pytest_asyncio.fixture(loop_scope="session")
async def buffered(envoys, upstreams, constant_picker, dead_address):
    """The recommended configuration over three live endpoints and a dead one."""
    endpoints = [*(upstream.address for upstream in upstreams), dead_address]
    return await envoys(bootstrap(Template.BUFFERED, picker=constant_picker.address, endpoints=endpoints))


@pytest_asyncio.fixture(loop_scope="session")
async def duplex(envoys, constant_picker):
    return await envoys(bootstrap(Template.FULL_DUPLEX, picker=constant_picker.address))


@pytest_asyncio.fixture(params=[Template.BUFFERED, Template.FULL_DUPLEX], loop_scope="session")
async def either(request, buffered, duplex):
    return {Template.BUFFERED: buffered, Template.FULL_DUPLEX: duplex}[request.param]


def spoofed(address):
    """Every control header a client might send, all naming one endpoint."""
    return [(name, address) for name in (*sorted(CLIENT_FORBIDDEN), SPOOFED_ORIGINAL_DESTINATION)]


def control_headers(names):
    return {name.lower() for name in names} & CLIENT_FORBIDDEN


async def until(condition):
    """Wait for something that another process does in its own time."""
    deadline = asyncio.get_running_loop().time() + 8
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)


# The pick


@pytest.mark.parametrize("number", range(3))
async def test_a_slowly_uploaded_request_reaches_the_pick(either, upstreams, constant_picker, send, number):
    constant_picker.destination = upstreams[number].address
    answer = await send(either.port, [b"a" * 1000, b"b" * 1000, b"c" * 1000], every=0.05)
    assert answer.status == 200
    assert answer.seen["port"] == upstreams[number].port
    assert answer.seen["sha256"] == hashlib.sha256(b"a" * 1000 + b"b" * 1000 + b"c" * 1000).hexdigest()


async def test_a_request_without_a_body_reaches_the_pick(either, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[1].address
    answer = await send(either.port, method="GET", path="/v1/models")
    assert (answer.status, answer.seen["port"]) == (200, upstreams[1].port)


async def test_a_prompt_of_ten_mebibytes_passes(either, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    body = b"0123456789abcdef" * (10 * MEBIBYTE // 16)
    answer = await send(either.port, body)
    assert (answer.status, answer.seen["length"]) == (200, len(body))
    assert answer.seen["sha256"] == hashlib.sha256(body).hexdigest()


async def test_a_body_above_the_buffer_limit_is_refused_by_envoy(buffered, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    before = [upstream.requests for upstream in upstreams]
    answer = await send(buffered.port, bytes(33 * MEBIBYTE))
    assert answer.status == 413
    assert [upstream.requests for upstream in upstreams] == before


async def test_the_response_names_the_endpoint_that_served(either, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[2].address
    await send(either.port, b"{}")
    message = constant_picker.streams[-1].one("response_headers")
    assert message.attributes["envoy.filters.http.ext_proc"]["upstream.address"] == upstreams[2].address


async def test_a_subset_hint_reaches_the_picker(envoys, upstreams, constant_picker, send):
    addresses = [upstream.address for upstream in upstreams]
    config = bootstrap(Template.BUFFERED, picker=constant_picker.address, endpoints=addresses, subset=addresses[:2])
    await send((await envoys(config)).port, b"{}")
    metadata = constant_picker.streams[-1].messages[0].metadata_context.filter_metadata
    assert metadata[SUBSET_METADATA][SUBSET] == ",".join(addresses[:2])


async def test_without_a_picker_requests_go_round(envoys, upstreams, send):
    addresses = [upstream.address for upstream in upstreams]
    config = bootstrap(Template.BUFFERED, picker=None, endpoints=addresses, fallback_policy="round_robin")
    envoy = await envoys(config)
    ports = [(await send(envoy.port, b"{}")).seen["port"] for _ in range(6)]
    assert sorted(ports[:3]) == sorted(upstream.port for upstream in upstreams)
    assert ports[:3] == ports[3:]


# Clients do not choose


async def test_control_headers_of_clients_reach_neither_the_picker_nor_an_endpoint(
    either, upstreams, constant_picker, send
):
    constant_picker.destination = upstreams[0].address
    answer = await send(either.port, b"{}", headers=spoofed(upstreams[1].address))
    assert answer.seen["port"] == upstreams[0].port
    assert answer.seen_headers(DESTINATION) == [upstreams[0].address]
    assert control_headers(name for name, _ in answer.seen["headers"]) == {DESTINATION}
    assert not control_headers(constant_picker.streams[-1].headers())


async def test_control_headers_are_stripped_however_they_are_written(buffered, upstreams, send):
    target = upstreams[1].address
    headers = [("X-Gateway-Destination-Endpoint", target), ("x-gateway-destination-endpoint", target)]
    answer = await send(buffered.port, b"{}", headers=headers)
    assert answer.seen_headers(DESTINATION) == []


async def test_a_client_does_not_choose_when_the_picker_names_nobody(duplex, upstreams, constant_picker, send):
    before = [upstream.requests for upstream in upstreams]
    answer = await send(duplex.port, b"{}", headers=spoofed(upstreams[1].address))
    assert constant_picker.streams
    assert answer.status == 503
    assert [upstream.requests for upstream in upstreams] == before


async def test_a_client_does_not_choose_while_the_picker_is_down_buffered(envoys, upstreams, dead_address, send):
    addresses = [upstream.address for upstream in upstreams]
    envoy = await envoys(bootstrap(Template.BUFFERED, picker=dead_address, endpoints=addresses))
    ports = set()
    for _ in range(60):
        answer = await send(envoy.port, b"{}", headers=spoofed(upstreams[1].address))
        assert answer.status == 200
        assert not control_headers(name for name, _ in answer.seen["headers"])
        ports.add(answer.seen["port"])
    assert ports == {upstream.port for upstream in upstreams}


async def test_buffered_does_not_obey_the_header_even_if_it_were_not_stripped(envoys, upstreams, dead_address, send):
    addresses = [upstream.address for upstream in upstreams]
    config = bootstrap(Template.BUFFERED, picker=dead_address, endpoints=addresses, fallback_policy="round_robin")
    del connection_manager(config)["early_header_mutation_extensions"]
    envoy = await envoys(config)
    answers = [await send(envoy.port, b"{}", headers=[(DESTINATION, addresses[1])]) for _ in range(3)]
    assert {answer.seen["port"] for answer in answers} == {upstream.port for upstream in upstreams}
    assert all(answer.seen_headers(DESTINATION) == [addresses[1]] for answer in answers)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_client_does_not_choose_while_the_picker_is_down_full_duplex(
    envoys, upstreams, dead_address, send, method
):
    envoy = await envoys(bootstrap(Template.FULL_DUPLEX, picker=dead_address))
    before = [upstream.requests for upstream in upstreams]
    answer = await send(envoy.port, method=method, headers=spoofed(upstreams[1].address))
    assert answer.status == 503
    assert [upstream.requests for upstream in upstreams] == before


async def test_the_retry_headers_of_envoy_are_not_for_clients(buffered, upstreams, constant_picker, dead_address, send):
    constant_picker.destination = f"{dead_address},{upstreams[0].address}"
    answer = await send(buffered.port, b"{}", headers=[("x-envoy-max-retries", "0"), ("x-envoy-retry-on", "5xx")])
    assert answer.status == 200


# Fallbacks


async def test_a_dead_pick_falls_over_to_the_next_of_the_list(buffered, upstreams, constant_picker, dead_address, send):
    constant_picker.destination = f"{dead_address},{upstreams[2].address},{upstreams[0].address}"
    for size in (2, 10 * MEBIBYTE):
        answer = await send(buffered.port, bytes(size))
        assert (answer.status, answer.seen["port"], answer.seen["length"]) == (200, upstreams[2].port, size)
        message = constant_picker.streams[-1].one("response_headers")
        assert message.attributes["envoy.filters.http.ext_proc"]["upstream.address"] == upstreams[2].address
        picked = message.metadata_context.filter_metadata[LB_METADATA][DESTINATION]
        assert picked == constant_picker.destination


async def test_addresses_outside_the_cluster_are_skipped(buffered, upstreams, constant_picker, send):
    constant_picker.destination = f"{UNKNOWN},{upstreams[1].address}"
    assert (await send(buffered.port, b"{}")).seen["port"] == upstreams[1].port


async def test_after_the_list_comes_the_fallback_policy(buffered, upstreams, constant_picker, dead_address, send):
    for destination in (UNKNOWN, dead_address, f"{dead_address},{UNKNOWN},{dead_address}"):
        constant_picker.destination = destination
        answer = await send(buffered.port, b"{}")
        assert answer.status == 200
        assert answer.seen["port"] in {upstream.port for upstream in upstreams}


async def test_original_destination_takes_one_endpoint_and_the_picker_is_told(duplex, upstreams, constant_picker, send):
    constant_picker.destination = f"{upstreams[0].address},{upstreams[1].address}"
    assert (await send(duplex.port, b"{}")).status == 503
    assert constant_picker.streams[-1].metadata["x-picker-fallbacks"] == "0"


async def test_buffered_says_nothing_about_fallbacks(buffered, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    await send(buffered.port, b"{}")
    assert "x-picker-fallbacks" not in constant_picker.streams[-1].metadata


# The picker fails


async def test_no_request_fails_when_the_picker_dies_and_comes_back(envoys, upstreams, start_constant_picker, send):
    picker = start_constant_picker()
    addresses = [upstream.address for upstream in upstreams]
    envoy = await envoys(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))

    async def asked():
        before = len(picker.streams)
        assert (await send(envoy.port, b"{}")).status == 200
        return len(picker.streams) > before

    async def not_asked():
        return not await asked()

    assert await asked()
    picker.kill()
    assert await not_asked()
    picker.start()
    await until(asked)


async def test_a_hung_picker_costs_one_message_timeout(envoys, upstreams, constant_picker, send):
    addresses = [upstream.address for upstream in upstreams]
    config = bootstrap(Template.BUFFERED, picker=constant_picker.address, endpoints=addresses, message_timeout=0.2)
    constant_picker.hangs = True
    answer = await send((await envoys(config)).port, b"{}")
    assert answer.status == 200
    assert constant_picker.streams


async def test_a_draining_picker_is_left_where_requests_can_go_on_without_it(
    envoys, upstreams, start_constant_picker, send
):
    picker = start_constant_picker()
    picker.destination = upstreams[0].address
    addresses = [upstream.address for upstream in upstreams]
    failing_open = await envoys(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))
    failing_closed = await envoys(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    picker.set_serving(False)
    for envoy in (failing_open, failing_closed):

        async def left(envoy=envoy):
            return (await envoy.stats("cluster.picker."))["cluster.picker.membership_healthy"] == 0

        await until(left)
    assert (await send(failing_open.port, b"{}")).status == 200
    assert picker.streams == []
    assert (await send(failing_closed.port, b"{}")).seen["port"] == upstreams[0].port
    assert len(picker.streams) == 1


# The protocol


async def test_the_message_timeout_does_not_bound_uploads(envoys, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    addresses = [upstream.address for upstream in upstreams]
    for template in Template:
        config = bootstrap(template, picker=constant_picker.address, endpoints=addresses, message_timeout=0.2)
        answer = await send((await envoys(config)).port, [b"slow"] * 3, every=0.2)
        assert (answer.status, answer.seen["length"]) == (200, 12)


async def test_a_body_that_ends_in_trailers_is_sent_once_in_full_duplex(envoys, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    config = bootstrap(Template.FULL_DUPLEX, picker=constant_picker.address, http1_trailers=True)
    answer = await send((await envoys(config)).port, [b"one", b"two"], trailers=[("x-checksum", "1")])
    assert (answer.status, answer.seen["length"]) == (200, 6)
    assert "request_trailers" in constant_picker.streams[-1].kinds
    assert not any(message.request_body.end_of_stream for message in constant_picker.streams[-1].messages)


async def test_a_content_length_from_the_picker_is_dropped_in_full_duplex(duplex, upstreams, constant_picker, send):
    constant_picker.destination = upstreams[0].address
    constant_picker.extra_headers = {"content-length": "5", "x-kept": "yes"}
    answer = await send(duplex.port, b"longer than five")
    assert (answer.status, answer.seen["length"]) == (200, 16)
    assert answer.seen_headers("x-kept") == ["yes"]
    assert answer.seen_headers("content-length") == []


async def test_a_streamed_request_body_comes_too_late_for_a_pick(envoys, upstreams, constant_picker, send):
    constant_picker.destination = UNKNOWN
    config = bootstrap(
        Template.BUFFERED,
        picker=constant_picker.address,
        endpoints=[upstreams[0].address],
        request_body=BodyMode.STREAMED,
    )
    answer = await send((await envoys(config)).port, [b"{", b"}"], every=0.1)
    assert answer.seen_headers(DESTINATION) == []


@pytest.mark.parametrize("graceful", [False, True])
async def test_envoy_ends_streams_by_reset_unless_told_otherwise(envoys, upstreams, constant_picker, send, graceful):
    config = bootstrap(
        Template.BUFFERED,
        picker=constant_picker.address,
        endpoints=[upstreams[0].address],
        graceful_close=graceful,
    )
    envoy = await envoys(config)
    await send(envoy.port, b"{}")
    assert await asyncio.to_thread(constant_picker.streams[-1].ended.wait, 5)
    resets = (await envoy.stats("cluster.picker.http2."))["cluster.picker.http2.tx_reset"]
    assert resets == (0 if graceful else 1)


async def test_a_client_that_leaves_ends_the_stream(either, upstreams, constant_picker, connect):
    constant_picker.destination = upstreams[0].address
    client = await connect(either.port)
    await client.head("POST", "/stream?chunks=100&every=0.1", [("content-length", "2")])
    await client.send(b"{}")
    await until(lambda: _seen(constant_picker, "response_headers"))
    assert not constant_picker.streams[-1].ended.is_set()
    client.abort()
    assert await asyncio.to_thread(constant_picker.streams[-1].ended.wait, 5)


async def _seen(picker, kind):
    return bool(picker.streams) and kind in picker.streams[-1].kinds
