"""Requests of every shape that clients send, through both shipped configurations."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import random

import pytest

from picker.app.envoy import Template, bootstrap
from tests.support import http2_client
from tests.support.bodies import chat, chat_of
from tests.support.engine import answer_bytes
from tests.support.http_client import RawClient, send
from tests.support.leaving import STAGES, leave

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"


@pytest.fixture
def seen(engines):
    """What an engine saw of the request with a tag, once it has."""

    def find(tag):
        (found,) = [engine.seen.pop(tag) for engine in engines if tag in engine.seen]
        return found

    return find


async def decision_on(picker, seen):
    (decision,) = [found for found in await picker.decisions() if found["request_id"] == seen.request_id]
    return decision


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# Bodies


async def test_a_slow_upload_is_routed_by_all_of_it(shipped, seen):
    body = chat_of(30_000, seed=1)
    pieces = [body[at : at + 3000] for at in range(0, len(body), 3000)]
    answer = await send(shipped.port, pieces, every=0.03, headers=[("x-tag", "slow")])
    assert answer.status == 200
    found = seen("slow")
    assert found.sha256 == sha256(body)
    decision = await decision_on(shipped.picker, found)
    assert decision["prompt_unused"] == ""
    assert 25_000 < decision["destination"]["of"] * 512 <= 31_000, "blocks of 512 bytes"
    assert decision["destination"]["address"] == found.engine.address


async def test_request_trailers_reach_the_engine(start_picker, start_envoy_here, wire):
    received = asyncio.Queue()

    async def keep(reader, writer):
        received.put_nowait(await reader.readuntil(b"x-checksum: 1\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    port = await wire(keep)
    address = f"127.0.0.1:{port}"
    picker = await start_picker({"endpoints": {"static": [{"address": address}]}, "scrape": {"enabled": False}})
    body = chat("with trailers")
    for template in Template:
        config = bootstrap(template, picker=picker.address, endpoints=[address], http1_trailers=True)
        envoy = await start_envoy_here(config)
        answer = await send(envoy.port, [body[:20], body[20:]], trailers=[("x-checksum", "1")])
        assert (answer.status, answer.body) == (200, b"ok")
        head, _, rest = (await received.get()).partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        chunks, content = rest, b""
        while (size := int(chunks.partition(b"\r\n")[0], 16)) > 0:
            content += chunks.partition(b"\r\n")[2][:size]
            chunks = chunks.partition(b"\r\n")[2][size + 2 :]
        assert content == body
        assert chunks == b"0\r\nx-checksum: 1\r\n\r\n"
    metrics = await picker.settled()
    assert metrics("learned_total", success="true") == len(Template)
    assert metrics("anomalies_total") == 0


async def test_response_trailers_reach_the_client_and_end_the_request(start_picker, start_envoy_here, wire):
    async def answer_with_trailers(reader, writer):
        while await reader.readuntil(b"{}"):
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-end\r\n\r\n")
            writer.write(b"2\r\nok\r\n0\r\nx-end: 1\r\n\r\n")

    address = f"127.0.0.1:{await wire(answer_with_trailers)}"
    picker = await start_picker({"endpoints": {"static": [{"address": address}]}, "scrape": {"enabled": False}})
    config = bootstrap(Template.FULL_DUPLEX, picker=picker.address, http1_trailers=True)
    envoy = await start_envoy_here(config)
    client = await RawClient.connect(envoy.port)
    await client.head("POST", CHAT, [("content-length", "2"), ("te", "trailers")])
    await client.send(b"{}")
    assert (await client.answer_head())[0] == 200
    assert await asyncio.wait_for(client.rest(b"x-end: 1\r\n\r\n"), 5) == b"2\r\nok\r\n0\r\nx-end: 1\r\n\r\n"
    await client.close()
    assert (await picker.settled())("learned_total", on="response_trailers", success="true") == 1


async def test_expect_100_continue(shipped, seen):
    body = chat("are you there?")
    client = await RawClient.connect(shipped.port)
    headers = [("x-tag", "expect"), ("expect", "100-continue"), ("content-length", str(len(body)))]
    await client.head("POST", CHAT, headers)
    assert (await asyncio.wait_for(client.answer_head(), 5))[0] == 100
    await client.send(body)
    assert (await client.answer()).status == 200
    assert seen("expect").sha256 == sha256(body)
    await client.close()


@pytest.mark.parametrize(
    ("body", "headers", "unused"),
    [
        (b"{not json", [], "invalid_json"),
        (b"\xff\xfe\x00", [], "invalid_json"),
        (b"[1, 2]", [], "not_an_object"),
        (b'{"messages": 7}', [], "wrong_type"),
        (b'{"messages": []}', [], "empty_prompt"),
        (b'{"messages":' + b"[" * 200_000, [], "invalid_json"),
        (gzip.compress(chat("squeezed")), [("content-encoding", "gzip")], "content_encoding"),
        (chat("plain"), [("content-encoding", "identity")], ""),
    ],
    ids=["not-json", "not-text", "array", "wrong-type", "empty", "deep", "gzip", "identity"],
)
async def test_a_body_that_cannot_be_used_is_routed_all_the_same(shipped, seen, body, headers, unused):
    answer = await send(shipped.port, body, headers=[*headers, ("x-tag", "odd")])
    assert answer.status == 200
    found = seen("odd")
    assert found.sha256 == sha256(body)
    assert [pair for pair in found.headers if pair[0] == "content-encoding"] == headers
    decision = await decision_on(shipped.picker, found)
    assert (decision["reason"], decision["prompt_unused"]) == ("routed", unused)


async def test_a_compressed_answer_passes_untouched(shipped):
    answer = await send(shipped.port, chat("zip it"), path=f"{CHAT}?bytes=70000&chunks=3&encoding=gzip")
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.body == answer_bytes(70_000)


# Methods, paths, headers, versions


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
async def test_a_request_without_a_body_is_routed_by_load(shipped, seen, method):
    answer = await send(shipped.port, method=method, path="/v1/models?bytes=50", headers=[("x-tag", method)])
    assert answer.status == 200
    assert answer.body == (b"" if method == "HEAD" else answer_bytes(50))
    found = seen(method)
    assert found.method == method
    decision = await decision_on(shipped.picker, found)
    assert (decision["prompt_unused"], decision["destination"]["address"]) == ("no_body", found.engine.address)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//v1//chat/completions",
        "/v1/chat/completions?prompt=%7B%22a%22%3A1%7D&a=1&a=2",
        "/v1/%63hat/completions",
        "/a%00b/%ff%fe/%0d%0ax-tag:%20b",
        "/" + "long/" * 1600,
        "/v1/../../etc/passwd",
    ],
)
async def test_any_path_reaches_the_engine_as_it_is(shipped, seen, path):
    answer = await send(shipped.port, chat("hi"), path=path, headers=[("x-tag", "path")])
    assert answer.status == 200
    assert seen("path").target == path


async def test_headers_that_repeat_reach_the_engine(shipped, seen):
    headers = [("x-tag", "twice"), ("x-twice", "one"), ("x-twice", "two"), ("cookie", "a=1"), ("cookie", "b=2")]
    assert (await send(shipped.port, chat("hi"), headers=headers)).status == 200
    found = seen("twice")
    assert found.all("x-twice") in (["one", "two"], ["one,two"])
    assert "; ".join(found.all("cookie")) == "a=1; b=2"


async def test_an_http_1_0_client(shipped, seen):
    body = chat("an old client")
    client = await RawClient.connect(shipped.port)
    headers = [("content-length", str(len(body))), ("x-tag", "old")]
    await client.head("POST", f"{CHAT}?bytes=70000&chunks=3", headers, version="1.0")
    await client.send(body)
    assert (await client.answer()).body == answer_bytes(70_000)
    await client.close()
    assert seen("old").sha256 == sha256(body)


async def test_many_requests_on_one_http2_connection(shipped, seen):
    bodies = [chat_of(size, seed=size) for size in (100, 62_000, 300_000, 1_000_000)]
    tags = [f"h2-{number}" for number in range(len(bodies))]
    answers = await http2_client.send_all(shipped.port, f"{CHAT}?bytes=90000&chunks=4", bodies, tags)
    for body, tag, answer in zip(bodies, tags, answers, strict=True):
        assert (answer.status, answer.body) == (200, answer_bytes(90_000))
        found = seen(tag)
        assert found.sha256 == sha256(body)
        assert (await decision_on(shipped.picker, found))["destination"]["address"] == found.engine.address


async def test_many_requests_in_turn_on_one_connection(shipped, seen):
    client = await RawClient.connect(shipped.port)
    for number in range(10):
        body = chat_of(1000 * number + 100, seed=number)
        answer = await client.request(body, path=f"{CHAT}?bytes=100", headers=[("x-tag", "turn")])
        assert answer.body == answer_bytes(100)
        assert seen("turn").sha256 == sha256(body)
    await client.close()


# Clients that leave


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_leaves_nothing_behind(shipped, stage):
    before = await shipped.picker.metrics()
    await leave(shipped.port, stage, random.Random(1))
    after = await shipped.picker.settled()
    assert after("anomalies_total") == before("anomalies_total")


async def test_any_number_of_clients_that_leave_leaves_nothing_behind(shipped):
    dice = random.Random(7)
    picker = shipped.picker
    before = await picker.metrics()
    await asyncio.gather(*(leave(shipped.port, dice.choice(STAGES), dice) for _ in range(200)))
    after = await picker.settled()
    assert after("anomalies_total") == before("anomalies_total")
    routed = after("decisions_total", reason="routed") - before("decisions_total", reason="routed")
    assert after("learned_total") - before("learned_total") == routed
    assert (await send(shipped.port, chat("still there?"))).status == 200
