"""Deployments of other endpoint pickers start this one by a change of the image."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser
from contextlib import closing

import pytest

from picker.app import flags
from picker.app.config import load
from picker.core.strict import ConfigError

POOL = ("--pool-name", "vllm-llama3", "--pool-namespace", "inference")


def read(*arguments: str, **environment: str) -> flags.Flags:
    parser = ArgumentParser()
    flags.add_arguments(parser)
    return flags.read(parser.parse_args(arguments), environment)


def problems(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(*arguments)
    return [str(problem) for problem in caught.value.problems]


def warnings(*arguments: str) -> list[str]:
    return list(read(*POOL, *arguments).warnings)


def setting(path: str, *arguments: str) -> object:
    found: object = read(*POOL, *arguments).overrides
    for key in path.split("."):
        assert isinstance(found, dict)
        found = found.get(key)
    return found


# What a published chart passes: the endpoint picker's of the Gateway API Inference Extension, version 1


CHART = (
    *("--pool-name", "vllm-qwen", "--pool-namespace", "default", "--pool-group", "inference.networking.k8s.io"),
    *("--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml"),
    *("--grpc-port", "9002", "--grpc-health-port", "9003", "--metrics-port", "9090"),
    *("--kv-cache-usage-percentage-metric", "vllm:kv_cache_usage_perc", "--v", "4", "--tracing=false"),
)


def test_a_published_chart_is_understood():
    found = read(*CHART)
    assert found.warnings == ()
    assert str(found.path) == "/config/default-plugins.yaml"
    assert found.overrides == {
        "listen": {
            "extproc": "0.0.0.0:9002",
            "admin": "0.0.0.0:9003",
            "http": "0.0.0.0:9090",
            "tls": {"mode": "self-signed"},
        },
        "log": {"format": "json", "level": "debug"},
        "endpoints": {
            "kubernetes": {
                "pool": {"name": "vllm-qwen", "group": "inference.networking.k8s.io"},
                "namespace": "default",
            }
        },
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("--grpc-port", "9102"),
        ("--grpc-port=9102",),
        ("-grpc-port", "9102"),
        ("-grpc-port=9102",),
        ("--grpc-port=1", "--grpc-port=9102"),
    ],
)
def test_every_way_to_write_a_flag(arguments):
    assert setting("listen.extproc", *arguments) == "0.0.0.0:9102"


@pytest.mark.parametrize("arguments", [("-v=4",), ("-v", "5"), ("--v=4",), ("-v4",)])
def test_verbosity_as_go_programs_take_it(arguments):
    assert setting("log.level", *arguments) == "debug"


@pytest.mark.parametrize("name", ["--config-file", "-config-file", "-c", "--config"])
def test_the_configuration_file_by_all_its_names(name):
    assert str(read(name, "picker.yaml").path) == "picker.yaml"


# Settings


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("--drain-timeout=30s", "listen.drainSeconds", 30.0),
        ("--drain-timeout=1m30s", "listen.drainSeconds", 90.0),
        ("--refresh-metrics-interval=50ms", "scrape.intervalSeconds", 0.05),
        ("--metrics-staleness-threshold=2.5s", "scrape.staleSeconds", 2.5),
        ("--model-server-metrics-path=/stats/prometheus", "scrape.path", "/stats/prometheus"),
        ("--grpc-max-recv-msg-size=10MiB", "listen.maxMessageBytes", 10 * 1024 * 1024),
        ("--grpc-max-recv-msg-size=25MB", "listen.maxMessageBytes", 25_000_000),
        ("--grpc-max-recv-msg-size=1048576", "listen.maxMessageBytes", 1_048_576),
        ("--zap-log-level=error", "log.level", "error"),
        ("--zap-log-level=5", "log.level", "debug"),
        ("-v=2", "log.level", "info"),
    ],
)
def test_a_flag_sets_a_setting(argument, path, value):
    assert setting(path, argument) == value


@pytest.mark.parametrize(
    ("arguments", "tls"),
    [
        (POOL, {"mode": "self-signed"}),
        ((*POOL, "--secure-serving"), {"mode": "self-signed"}),
        ((*POOL, "--secure-serving=false"), {"mode": "off"}),
        ((*POOL, "-secure-serving=f"), {"mode": "off"}),
        ((*POOL, "--cert-path", "/certs"), {"mode": "files", "certificate": "/certs/tls.crt", "key": "/certs/tls.key"}),
        (("-c", "f", "--secure-serving"), {"mode": "self-signed"}),
        (("-c", "f"), None),
    ],
)
def test_encryption_is_on_for_an_endpoint_picker_unless_it_is_turned_off(arguments, tls):
    assert read(*arguments).overrides.get("listen", {}).get("tls") == tls


def test_the_namespace_comes_from_the_environment():
    def namespace(*arguments: str, **environment: str) -> str:
        return read("--pool-name=p", *arguments, **environment).overrides["endpoints"]["kubernetes"]["namespace"]

    assert namespace("--pool-namespace=a", NAMESPACE="b") == "a"
    assert namespace(NAMESPACE="b") == "b"
    assert namespace() == "default"


def test_pods_by_label_selector():
    found = read(
        "--endpoint-selector=app in (vllm,sglang),!old", "--endpoint-target-ports=8000,8001,8000", NAMESPACE="n"
    )
    assert found.overrides["endpoints"] == {
        "kubernetes": {"selector": "app in (vllm,sglang),!old", "ports": [8000, 8001], "namespace": "n"}
    }


@pytest.mark.parametrize(
    "endpoints",
    [
        "static: [{address: '10.0.0.1:8000'}]",
        "file: {path: endpoints.yaml}",
        "kubernetes: {selector: app=other, ports: [1], kubeconfig: here, engine: sglang}",
        "nonsense",
    ],
)
def test_flags_go_before_the_endpoints_of_a_file(endpoints):
    loaded = load(f"endpoints: {{{endpoints}}}\nscrape: {{intervalSeconds: 1}}", read(*POOL).overrides)
    source = loaded.config.endpoints.kubernetes
    assert (source.pool.name, source.namespace, source.selector, source.ports) == ("vllm-llama3", "inference", "", ())
    assert source.kubeconfig == ("here" if "kubeconfig" in endpoints else "")
    assert loaded.config.scrape.interval_seconds == 1


# What has no effect, and what is refused


@pytest.mark.parametrize(
    "argument",
    [
        "--ha-enable-leader-election",
        "--tracing=true",
        "--enable-pprof",
        "--emit-endpoint-scores",
        "--refresh-prometheus-metrics-interval=5s",
        "--lora-info-metric=vllm:lora_requests_info",
        "--tls-min-version=VersionTLS12",
    ],
)
def test_a_flag_without_effect_says_so(argument):
    (warning,) = warnings(argument)
    name, _, _ = argument.partition("=")
    assert warning.startswith(f"{name}: has no effect: ")


@pytest.mark.parametrize(
    "argument",
    [
        "--ha-enable-leader-election=false",
        "--tracing=0",
        "--metrics-endpoint-auth=false",
        "--disable-endpoint-subset-filter=false",
        "--model-server-metrics-scheme=http",
        "--total-queued-requests-metric=vllm:num_requests_waiting",
    ],
)
def test_what_asks_for_nothing_is_silent(argument):
    assert warnings(argument) == []


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("--metrics-endpoint-auth", "set it to false, and let only Prometheus reach the metrics port"),
        ("--metrics-cert-dir=/certs", "metrics are served in plain text; remove it"),
        ("--disable-endpoint-subset-filter=true", "a gateway's subset of endpoints is always obeyed; remove it"),
        ("--model-server-metrics-scheme=https", "engines are read over http; remove it"),
        ("--total-queued-requests-metric=my:waiting", "vllm:num_requests_waiting"),
        ("--grpc-port=http", "is not a port; give 1 .. 65535"),
        ("--grpc-port=70000", "is not a port; give 1 .. 65535"),
        ("--drain-timeout=30", "is not a duration; give one such as 50ms"),
        ("--grpc-max-recv-msg-size=big", "is not a size; give one such as 16MiB"),
        ("--secure-serving=perhaps", "is not a boolean; give true or false"),
        ("--pool-group=example.com", "give inference.networking.k8s.io or inference.networking.x-k8s.io"),
        ("--endpoint-selector=app=vllm", "is given beside --pool-name; keep one of them"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_a_remedy(argument, remedy):
    (problem,) = problems(*POOL, argument)
    assert problem.startswith(argument.partition("=")[0] + ": ")
    assert remedy in problem


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--config: is missing, so that there are no endpoints"),
        (("--pool-name=",), "--config: is missing, so that there are no endpoints"),
        (("-c", "f", "--pool-namespace=n"), "--pool-namespace: says nothing alone"),
        (("--endpoint-selector=app=vllm",), "--endpoint-target-ports: null: has to have 1 to 8 ports"),
        (("--endpoint-selector=", "--endpoint-target-ports=1"), '--endpoint-selector: "": selects everything'),
    ],
)
def test_what_is_missing(arguments, problem):
    assert any(found.startswith(problem) for found in problems(*arguments))


def test_every_problem_is_said_at_once():
    assert len(problems("--grpc-port=x", "--metrics-port=y", "--drain-timeout=z")) == 4


# In force


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_picker_starts_by_flags_alone_and_without_a_command():
    metrics = free_port()
    command = [sys.executable, "-m", "picker", "-grpc-port", str(free_port()), f"--grpc-health-port={free_port()}"]
    command += ["--metrics-port", str(metrics), "--config-text", "{}", "--drain-timeout=0s", "-v=4"]
    process = subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/health", timeout=1) as answer:
                    assert answer.status == 200
                break
            except OSError:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    assert "there are none, so every request is refused" in output
