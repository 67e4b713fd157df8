"""The Deployment of another endpoint picker, with this one's image: it follows the same InferencePool, over TLS."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from contextlib import closing

import aiohttp
import grpc.aio
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.pods import pod

CONFIG = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: prefix-cache-scorer
- type: max-score-picker
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: max-score-picker}
"""
POOL = """
apiVersion: v1
kind: Namespace
metadata: {name: models}
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: vllm-qwen, namespace: models}
spec:
  selector: {matchLabels: {app: vllm-qwen}}
  targetPorts: [{number: 8000}, {number: 8001}]
  endpointPickerRef: {name: vllm-qwen-epp, port: {number: 9002}}
"""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def endpoint_picker(cluster, kubectl, tmp_path):
    """Started by the arguments of a published chart. Its pod's credentials are those of a ServiceAccount."""
    await kubectl("apply", "--validate=false", "-f", "-", stdin=POOL)
    for number in range(2):
        found = pod(f"vllm-{number}", f"127.0.1.{number + 1}", namespace="models", labels={"app": "vllm-qwen"})
        cluster.apply(found)
    (tmp_path / "default-plugins.yaml").write_text(CONFIG)
    ports = {name: free_port() for name in ("grpc-port", "grpc-health-port", "metrics-port")}
    command = [sys.executable, "-c", STARTED_IN_A_POD, "--pool-name", "vllm-qwen", "--pool-namespace", "models"]
    command += ["--pool-group", "inference.networking.k8s.io", "--zap-encoder", "json"]
    command += ["--config-file", str(tmp_path / "default-plugins.yaml"), "-v=4", "--drain-timeout", "0s"]
    command += [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("token")
    (account / "namespace").write_text("models")
    environment = {**os.environ, "SERVER": cluster.url, "ACCOUNT": str(account)}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    yield ports
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.wait(), 30)


STARTED_IN_A_POD = """
import os, pathlib, sys
from picker.io.discovery import kubernetes, kubernetes_access
account = pathlib.Path(os.environ["ACCOUNT"])
kubernetes.in_cluster = lambda: kubernetes_access.Access(
    server=os.environ["SERVER"], namespace="models", token_file=account / "token"
)
from picker.app.cli import main
sys.exit(main())
"""
"""The API server of the test speaks plain HTTP, and a pod's credentials have a fixed place: only that is different."""


async def health(port: int, service: str, certificate: str | None = None) -> int:
    if certificate is None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    else:
        credentials = grpc.ssl_channel_credentials(certificate.encode())
        options = (("grpc.ssl_target_name_override", "localhost"),)
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)
    async with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)).status


async def test_it_follows_the_pool_and_serves_what_gateways_and_probes_expect(endpoint_picker, until):
    async def metrics() -> str:
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{endpoint_picker['metrics-port']}/metrics"
                async with session.get(url) as answer:
                    return await answer.text()
        except aiohttp.ClientError:
            return ""

    async def knows_every_port_of_every_pod() -> bool:
        return "picker_endpoints 4.0" in await metrics()

    await until(knows_every_port_of_every_pod, 20)
    for service in ("liveness", "readiness", "inference-extension"):
        assert await health(endpoint_picker["grpc-health-port"], service) == health_pb2.HealthCheckResponse.SERVING
    address = ("127.0.0.1", endpoint_picker["grpc-port"])
    certificate = await asyncio.to_thread(ssl.get_server_certificate, address)
    serving = await health(address[1], "envoy.service.ext_proc.v3.ExternalProcessor", certificate)
    assert serving == health_pb2.HealthCheckResponse.SERVING

    url = f"http://127.0.0.1:{endpoint_picker['metrics-port']}/debug/config"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        config = yaml.safe_load(await answer.text())
    score = config["scheduler"]["plugins"]["Score"]["enabled"]
    assert score == [{"name": "queue", "weight": 2.0}, {"name": "prefix-cache", "weight": 3.0}]
