"""The admin port as its clients meet it: a generic one that knows nothing but reflection, and `picker explain`."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from picker._proto.picker.v1 import scores_pb2, scores_pb2_grpc
from picker.app import explain
from picker.io.admin import MAX_INPUT_BYTES, AdminServer
from picker.io.telemetry import MAX_WATCHERS
from picker.io.transport.health import HealthState

PROMPT = "p" * 640


@pytest.fixture
def health() -> HealthState:
    return HealthState()


@pytest.fixture
async def address(stack, health: HealthState) -> AsyncIterator[str]:
    server = AdminServer(stack.director, stack.hub, health, clock=lambda: 1_700_000_000.25)
    yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.close(0)
    assert not health._subscribers


@pytest.fixture
async def scores(address: str) -> AsyncIterator[scores_pb2_grpc.ScoresStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield scores_pb2_grpc.ScoresStub(channel)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def discover_and_explain(address: str, request: dict[str, Any]) -> tuple[list[str], dict[str, Any], str]:
    """What grpcurl does: nothing about the service is known but its address and name."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("picker.v1.Scores").methods_by_name["Explain"]
        call = channel.unary_unary(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = call(GetMessageClass(method.input_type)(**request), timeout=5)
        ext_proc = pool.FindServiceByName("envoy.service.ext_proc.v3.ExternalProcessor").methods_by_name["Process"]
        return list(database.get_services()), MessageToDict(answer), ext_proc.input_type.full_name


async def test_a_tool_can_discover_and_call_everything(stack, address: str) -> None:
    served = stack.serve(PROMPT).destinations[0]
    before = stack.metrics.decisions.series.copy()
    services, answer, ext_proc_input = await asyncio.to_thread(
        discover_and_explain, address, {"prompt": PROMPT + "q" * 640, "model": "m"}
    )
    assert set(services) == {
        "picker.v1.Scores",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert ext_proc_input == "envoy.service.ext_proc.v3.ProcessingRequest"
    assert answer["time"] == "2023-11-14T22:13:20.250Z"
    assert answer["reason"] == "routed"
    assert answer["destinations"][0] == served
    best, other = answer["endpoints"]
    assert best["address"] == served
    assert best["rank"] == 1
    assert best["total"] == 200  # least-request 100 x 1, prefix-cache 50 x 2
    prefix = best["plugins"][1]
    assert prefix == {
        "plugin": "prefix-cache", "score": 50.0, "weight": 2.0, "matched": "10", "total": "20", "unit": "blocks",
    }  # fmt: skip
    assert "matched" not in other["plugins"][1]
    assert stack.director.in_flight == 0
    assert stack.metrics.decisions.series == before
    assert len(stack.hub.recent) == 1


async def test_body_and_prompt_are_scored_as_the_requests_they_stand_for(stack, scores) -> None:
    stack.serve(PROMPT)
    body = json.dumps({"model": "m", "prompt": PROMPT}).encode()
    by_prompt = await scores.Explain(scores_pb2.ExplainRequest(prompt=PROMPT, model="m"))
    by_body = await scores.Explain(scores_pb2.ExplainRequest(body=body, path="/v1/completions?key=k-123"))
    assert by_body.path == "/v1/completions"
    assert by_prompt.endpoints == by_body.endpoints
    assert by_prompt.endpoints[0].plugins[1].matched == 10
    chat = json.dumps({"model": "chatty", "messages": [{"role": "user", "content": "hi"}]}).encode()
    answer = await scores.Explain(
        scores_pb2.ExplainRequest(
            body=chat,
            headers={"x-gateway-destination-endpoint-subset": "10.0.0.2", "x-request-id": "abc"},
        )
    )
    assert (answer.model, answer.path, answer.request_id) == ("chatty", "/v1/chat/completions", "abc")
    assert list(answer.destinations) == ["10.0.0.2:8000"]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "input"),
        ({"prompt": "x", "path": "/v1/completions"}, "path"),
        ({"body": b"{}", "model": "m"}, "model"),
        ({"body": b"{}", "path": "v1/completions"}, "path"),
        ({"prompt": "x", "headers": {":path": "/"}}, "headers"),
        ({"prompt": "x", "headers": {"Host": "x"}}, "headers"),
        ({"prompt": "x", "headers": {"x": "é"}}, "headers"),
        ({"prompt": "x", "headers": {f"x-{n}": "" for n in range(65)}}, "headers"),
        ({"body": b" " * (MAX_INPUT_BYTES + 1)}, "body"),
    ],
)
async def test_unusable_input_is_refused_by_the_name_of_its_field(scores, request_: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=rf'details = "{field}: ') as refusal:
        await scores.Explain(scores_pb2.ExplainRequest(**request_))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "unused"),
    [
        ({"prompt": ""}, "empty_prompt"),
        ({"body": b""}, "no_body"),
        ({"body": b"{"}, "invalid_json"),
        ({"body": b"[]"}, "not_an_object"),
        ({"body": b'{"messages": 5}'}, "wrong_type"),
        ({"body": b'{"input": "x"}', "path": "/v1/embeddings"}, "unknown_path"),
        ({"body": b"{}", "headers": {"content-encoding": "gzip"}}, "content_encoding"),
        ({"body": b'{"messages":[' + b",".join([b"{}"] * 4_000_000) + b"]}"}, "too_complex"),
    ],
)
async def test_what_is_routed_by_load_is_explained_by_load(scores, request_: dict[str, Any], unused: str) -> None:
    answer = await scores.Explain(scores_pb2.ExplainRequest(**request_))
    assert (answer.reason, answer.prompt_unused, len(answer.endpoints)) == ("routed", unused, 2)


@pytest.mark.parametrize("method", ["Explain", "Watch"])
async def test_bytes_that_are_no_message_are_refused_without_a_traceback(
    address: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="the message is no picker") as refusal:
            async for _ in channel.unary_stream(f"/picker.v1.Scores/{method}")(b"\xff\xff"):
                pass
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


async def test_no_endpoint_is_an_answer(stack, scores) -> None:
    stack.director.replace_endpoints([])
    answer = await scores.Explain(scores_pb2.ExplainRequest(prompt="x"))
    assert answer.reason == "no_endpoints"
    assert not answer.destinations


async def test_watch_streams_decisions_without_prompts(stack, scores) -> None:
    watching = scores.Watch(scores_pb2.WatchRequest(model="b"))
    reading = asyncio.ensure_future(watching.read())
    await until(lambda: len(stack.hub._watchers) == 1)
    stack.decide("sesame", "a")
    stack.decide("sesame", "b", path="/v1/completions?key=sesame", request_id="mine")
    decision = await asyncio.wait_for(reading, 5)
    assert decision.request_id == "mine"
    assert decision.model == "b"
    assert len(decision.endpoints) == 2
    assert b"sesame" not in decision.SerializeToString()
    watching.cancel()
    await until(lambda: not stack.hub._watchers)


async def test_one_watcher_too_many_is_told_so(stack, scores) -> None:
    watching = [scores.Watch(scores_pb2.WatchRequest()) for _ in range(MAX_WATCHERS)]
    await until(lambda: len(stack.hub._watchers) == MAX_WATCHERS)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await scores.Watch(scores_pb2.WatchRequest()).read()
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for each in watching:
        each.cancel()


async def test_health_follows_readiness(address: str, health: HealthState) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    ready_services = (
        "",
        "readiness",
        "envoy.service.ext_proc.v3.ExternalProcessor",
        "inference-extension",
        "picker.v1.Scores",
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert [await check(service) for service in ready_services] == [not_serving] * 5
        assert await check("liveness") == serving
        watching = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watching.read()).status == not_serving
        health.set_ready(True)
        assert (await asyncio.wait_for(watching.read(), 5)).status == serving
        watching.cancel()
        assert [await check(service) for service in ready_services] == [serving] * 5
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check("nonsense")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def run_explain(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    return await asyncio.to_thread(explain.run, parser.parse_args(arguments))


async def test_explain_prints_a_table(stack, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    served = stack.serve(PROMPT).destinations[0]
    assert await run_explain("--prompt", PROMPT + "q" * 640, "--model", "m", "--admin", address) == 0
    lines = capsys.readouterr().out.splitlines()
    (chosen,) = [line for line in lines if "▶ 1" in line]
    for shown in (served, "default/pod-", "100", "50  (10/20 blocks)", "200"):
        assert shown in chosen
    assert any("least-request ×1" in line and "prefix-cache ×2" in line for line in lines)
    assert any("filter least-request left 2" in line for line in lines)


async def test_explain_lets_no_name_colour_the_terminal(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_explain("--prompt", "x", "--model", "\x1b[31m[bold]", "--admin", address) == 0
    assert "model �[31m[bold]," in capsys.readouterr().out


async def test_explain_prints_json_and_reads_bodies(
    stack, address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.serve(PROMPT)
    body = json.dumps({"model": "m", "prompt": PROMPT})
    (tmp_path / "body.json").write_text(body)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(body.encode())))
    answers = []
    for source in (str(tmp_path / "body.json"), "-"):
        arguments = ("--body", source, "--path", "/v1/completions", "--admin", address, "--json")
        assert await run_explain(*arguments) == 0
        answers.append(json.loads(capsys.readouterr().out))
    for answer in answers:
        assert answer["reason"] == "routed"
        assert answer["endpoints"][0]["plugins"][1]["matched"] == 10
        assert answer["endpoints"][1]["plugins"][1]["matched"] == 0
        assert answer["prompt_unused"] == ""


async def test_explain_says_that_a_prompt_is_unused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_explain("--prompt", "", "--admin", address) == 0
    assert "the prompt is unused: empty_prompt" in capsys.readouterr().out


async def test_explain_says_a_refusal(stack, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    stack.director.replace_endpoints([])
    assert await run_explain("--prompt", "x", "--admin", address) == 0
    assert "refused: no_endpoints" in capsys.readouterr().out


async def test_explain_says_what_to_do_about_errors(
    address: str, capsys: pytest.CaptureFixture[str], unused_tcp_port: int, tmp_path: Path
) -> None:
    long = tmp_path / "long"
    long.write_bytes(bytes(2 * MAX_INPUT_BYTES + 512 * 1024))
    nobody = f"127.0.0.1:{unused_tcp_port}"
    for arguments, said in (
        (("--prompt", "x", "--admin", nobody), "--admin"),
        (("--body", str(long), "--admin", address), "send a shorter one"),
        (("--body", str(tmp_path / "missing"), "--admin", address), "No such file"),
        (("--prompt", "\udcff", "--admin", address), "not UTF-8"),
    ):
        assert await run_explain(*arguments) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("picker explain: ")
        assert said in err


class Health(HealthState):
    """Fails to say whether it serves, as often as `failures` says."""

    failures = 0

    def is_serving(self, service: str) -> bool | None:
        if self.failures:
            self.failures -= 1
            raise ValueError("no idea")
        return super().is_serving(service)


async def test_readiness_is_told_though_that_failed_before(stack) -> None:
    health = Health()
    server = AdminServer(stack.director, stack.hub, health)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        health.failures = 1
        health.set_ready(True)
        async with asyncio.timeout(5):
            while (await stub.Check(health_pb2.HealthCheckRequest(service="readiness"))).status != 1:
                await asyncio.sleep(0.02)
    assert stack.metrics.registry.get_sample_value("picker_errors_total", {"where": "admin_health"}) == 1
    await server.close(0)
