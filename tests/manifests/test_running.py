"""What the manifests start does start, and answers where the kubelet, gateways and Prometheus ask."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.app import sidecar_settings
from picker.app.envoy import Template, find_envoy, load
from picker.core.engine_page import NAMES
from picker.sim import command as engine_sim
from picker.sim.config import EngineSimConfig
from picker.sim.launch import start_engine
from picker.sim.limits import StepCost
from tests.manifests.builds import MANIFESTS, ROOT, build, one
from tests.manifests.reading import picker_config, pod_templates

STATIC = "endpoints: {static: [{address: '127.0.0.1:1'}]}\n"


class Running:
    """A picker started as the Deployment starts it, but for its ports and its file."""

    def __init__(self, config: str, directory: Path) -> None:
        (directory / "picker.yaml").write_text(config)
        (container,) = pod_templates(build("base"))["picker"]["spec"]["containers"]
        arguments = [each.replace("/etc/picker", str(directory)) for each in container["args"]]
        self.probes = {kind: container[kind] for kind in ("readinessProbe", "livenessProbe", "startupProbe")}
        self.numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
        self.ports = {name: free_port() for name in self.numbers}
        arguments += [f"--grpc-port={self.ports['grpc-ext-proc']}", f"--grpc-health-port={self.ports['grpc-admin']}"]
        arguments += [f"--metrics-port={self.ports['http-metrics']}", "--drain-timeout=0s"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")}
        command = [sys.executable, "-m", "picker", *arguments]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def probe(self, name: str) -> bool:
        """What the kubelet would see."""
        probe = self.probes[name]
        if "grpc" in probe:
            by_number = {number: port for port, number in self.numbers.items()}
            port = self.ports[by_number[probe["grpc"]["port"]]]
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
                try:
                    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
                except grpc.RpcError:
                    return False
                return answer.status == health_pb2.HealthCheckResponse.SERVING
        port = self.ports[probe["httpGet"]["port"]]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{probe['httpGet']['path']}", timeout=2) as answer:
                return 200 <= answer.status < 400
        except OSError:
            return False

    def wait(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while not self.probe(name):
            assert self.process.poll() is None, self.process.communicate()[0].decode()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        try:
            url = f"http://127.0.0.1:{self.ports['http-metrics']}{path}"
            with urllib.request.urlopen(url, timeout=2) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        try:
            output, _ = self.process.communicate(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()
        return output.decode()


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start(tmp_path) -> Iterator:
    started: list[Running] = []

    def run(config: str) -> Running:
        started.append(Running(config, tmp_path))
        return started[-1]

    yield run
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


def test_a_picker_that_knows_its_endpoints_is_ready_where_the_kubelet_asks(start):
    picker = start(STATIC)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        picker.wait(name)
    status, page = picker.get("/metrics")
    assert status == 200
    assert "picker_endpoints 1.0" in page
    assert picker.stop()
    assert picker.process.returncode == 0


def test_the_shipped_configuration_outside_of_a_cluster_lives_and_is_not_ready(start):
    picker = start(one(build("base"), "ConfigMap", "picker")["data"]["picker.yaml"])
    picker.wait("startupProbe")
    assert picker.probe("livenessProbe")
    assert not picker.probe("readinessProbe")
    status, why = picker.get("/health")
    assert status == 503
    assert "KUBERNETES_SERVICE_HOST" in why


# Plain Envoy


def test_the_demo_s_envoy_is_the_recommended_one_but_for_addresses():
    recommended = load(Template.BUFFERED)
    shipped = yaml.safe_load((MANIFESTS / "components/envoy/envoy.yaml").read_text())
    for config in (recommended, shipped):
        for cluster in config["static_resources"]["clusters"]:
            for key in ("type", "load_assignment", "dns_refresh_rate"):
                cluster.pop(key, None)
    assert shipped == recommended


def test_the_demo_s_envoy_is_accepted_by_envoy_as_its_pod_starts_it(tmp_path):
    documents = build("demo")
    (container,) = pod_templates(documents)["envoy"]["spec"]["containers"]
    (config,) = [each for each in documents if each["kind"] == "ConfigMap" and "envoy.yaml" in each["data"]]
    (tmp_path / "envoy.yaml").write_text(config["data"]["envoy.yaml"])
    arguments = [each.replace("/etc/envoy", str(tmp_path)) for each in container["args"]]
    done = subprocess.run(
        [find_envoy(), "--mode", "validate", *arguments], capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 0, done.stderr
    listeners = yaml.safe_load(config["data"]["envoy.yaml"])["static_resources"]["listeners"]
    listening = {each["address"]["socket_address"]["port_value"] for each in listeners}
    assert listening == {port["containerPort"] for port in container["ports"]}


# Engines


def test_the_simulated_engine_takes_its_arguments():
    (container,) = pod_templates(build("demo"))["engine-sim"]["spec"]["containers"]
    name, *arguments = container["args"]
    assert name == "engine-sim"
    parser = ArgumentParser()
    engine_sim.add_arguments(parser)
    options = parser.parse_args(arguments)
    assert {options.port, options.kv_events_port, options.kv_events_replay_port} == {
        port["containerPort"] for port in container["ports"]
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_publish_where_the_picker_listens(engine):
    """`tcp://*` makes an engine listen; `publisher` is `null` by default in vLLM up to 0.11 and in SGLang."""
    template = pod_templates(build("engines"))[engine]
    container, runtime = template["spec"]["containers"]
    (option,) = [each for each in container["args"] if each.startswith("--kv-events-config=")]
    events = json.loads(option.partition("=")[2])
    assert events["publisher"] == "zmq"
    assert events["endpoint"].startswith("tcp://*:")
    assert events["replay_endpoint"].startswith("tcp://*:")
    assert engine == "sglang" or events["enable_kv_cache_events"] is True
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["kv-events"] == int(events["endpoint"].rpartition(":")[2])
    assert ports["kv-replay"] == int(events["replay_endpoint"].rpartition(":")[2])
    assert f"--port={ports['http']}" in container["args"]

    args = picker_config(build("production")).scheduler.plugin_config
    (direct,) = [entry.args for entry in args if entry.name == "kvcache-aware"]
    assert (direct.zmq_port, direct.zmq_replay_port) == (ports["kv-events"], ports["kv-replay"])
    assert events["topic"].startswith(direct.topic)
    assert template["metadata"]["labels"]["llm-d.ai/engine-type"] in NAMES
    assert picker_config(build("base")).endpoints.kubernetes.ports == (ports["http"],)
    assert runtime["name"] == "runtime"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_sidecars_take_their_arguments_and_hear_the_engine(engine):
    template = pod_templates(build("engines"))[engine]
    container, runtime = template["spec"]["containers"]
    name, *arguments = runtime["args"]
    assert name == "sidecar"
    values = {each["name"]: each.get("value", "pod-1") for each in runtime["env"]}
    expanded = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], each) for each in arguments]
    parser = ArgumentParser()
    sidecar_settings.add_arguments(parser)
    settings = sidecar_settings.read_settings(parser.parse_args(expanded), values)
    (option,) = [each for each in container["args"] if each.startswith("--kv-events-config=")]
    events = json.loads(option.partition("=")[2])
    assert settings.warnings == ()
    assert settings.engine == engine
    assert settings.source.endpoint == events["endpoint"].replace("*", "localhost")
    assert settings.source.replay_endpoint == events["replay_endpoint"].replace("*", "localhost")
    assert settings.source.topic == events["topic"]
    assert settings.pod == "pod-1.pod-1"
    assert [settings.port] == [port["containerPort"] for port in runtime["ports"]]
    (model,) = [each for each in container["args"] if re.match("--model(-path)?=", each)]
    assert settings.model == model.partition("=")[2]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_an_engine_is_told_to_end_when_its_answers_are_over(engine):
    """The shipped hook, against an engine of that kind with a request of a second; a sleep of 15 s is left out."""
    (container, _) = pod_templates(build("engines"))[engine]["spec"]["containers"]
    shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
    running = await start_engine(EngineSimConfig(flavour=engine, cost=StepCost(base=0.05)))
    script = script.replace("sleep 15;", "").replace("sleep 2", "sleep 0.1")
    script = script.replace("localhost:8000", running.url.removeprefix("http://"))
    try:
        body = {"model": "sim", "prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            answer = asyncio.create_task(session.post(f"{running.url}/v1/completions", json=body))
            while not (await running_requests(session, running.url)):
                await asyncio.sleep(0.01)
            hook = await asyncio.create_subprocess_exec(shell, option, script)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(hook.wait()), 0.3)
            assert (await answer).status == 200
            assert await asyncio.wait_for(hook.wait(), 20) == 0
    finally:
        await running.close()


async def running_requests(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/metrics") as answer:
        page = await answer.text()
    return bool(re.search(r"^(vllm:num_requests_running|sglang:num_running_reqs)[^ ]* [1-9]", page, re.MULTILINE))


@pytest.mark.parametrize("name", ["README.md", "docs/gateways.md", "docs/operations.md", "manifests/README.md"])
def test_paths_in_the_guides_are_those_of_the_repository(name):
    """What is applied is there: a kustomization for `-k`, files for `-f`."""
    text = (ROOT / name).read_text()
    for option, path in re.findall(r"kubectl apply (-k|-f) (manifests/[a-z/-]*)", text):
        place = ROOT / path
        if "NAME" not in text[text.index(path) : text.index(path) + len(path) + 4]:
            assert list(place.glob("kustomization.yaml" if option == "-k" else "*.yaml")), path
    for overlay in re.findall(r"`overlays/([a-z-]+)`", text):
        assert (MANIFESTS / "overlays" / overlay / "kustomization.yaml").is_file()
    for component in re.findall(r"components/([a-z-]+)", text):
        assert (MANIFESTS / "components" / component / "kustomization.yaml").is_file()


def test_commands_in_the_guides_are_those_of_the_tools():
    """Every `picker` command in the guides of Kubernetes is one that there is."""
    for name in ("README.md", "docs/operations.md", "docs/gateways.md"):
        for line in (MANIFESTS.parent / name).read_text().splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if line.startswith("$ picker ") else []
            if words:
                done = subprocess.run(
                    [sys.executable, "-m", "picker", words[1], "--help"], capture_output=True, check=False, timeout=20
                )
                assert done.returncode == 0, line
