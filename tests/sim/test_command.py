"""The command in a process of its own: it says when it is ready, serves, and ends on SIGTERM."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from urllib.request import Request, urlopen

import pytest

SCRIPT = """
import argparse, sys
from picker.sim.command import add_arguments, run
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(run(parser.parse_args()))
"""


def test_it_publishes_kv_events_where_it_is_told() -> None:
    command = [sys.executable, "-c", SCRIPT, "--port", "0", "--data-parallel-size", "2", "--kv-events-port", "0"]
    command += ["--kv-events-replay-port", "0", "--kv-events-topic", "kv@pod-a", "--kv-events-format", "array"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with urlopen(url + "/kv_event_sources") as answer:
                sources = json.load(answer)
            assert sources.keys() == {"0", "1"}
            assert {source["topic"] for source in sources.values()} == {"kv@pod-a"}
            assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", sources["1"]["replay_endpoint"])
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_it_serves_until_sigterm() -> None:
    command = [sys.executable, "-c", SCRIPT, "--port", "0", "--name", "pod-a", "--lora", "x,y", "--speed", "100"]
    command += ["--num-gpu-blocks", "100", "--fault", "error", "--fault-status", "503", "--fault-share", "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.fullmatch(r"engine-sim pod-a listening on (http://127\.0\.0\.1:\d+)\n", ready)
            assert found, ready
            body = json.dumps({"model": "y", "prompt": "hello", "max_tokens": 3}).encode()
            with urlopen(Request(found[1] + "/v1/completions", body, {"Content-Type": "application/json"})) as answer:
                assert answer.headers["x-engine"] == "pod-a"
                assert json.load(answer)["usage"]["completion_tokens"] == 3
            with urlopen(found[1] + "/sim/stats") as answer:
                assert json.load(answer)["usable_blocks"] == 99
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speed", "0"], "speed is 0.0"),
        (["--num-gpu-blocks", "1"], "num_gpu_blocks is 1"),
        (["--fault", "error", "--fault-status", "200"], "the --fault options: Expected `int` >= 400 - at `$.status`"),
        (["--lora", "a,a"], "give each its own"),
        (["--data-parallel-size", "0"], "data_parallel_size is 0"),
        (["--kv-events-replay-port", "5558"], "give --kv-events-port too"),
        (["--kv-events-port", "70000"], "kv events port is 70000"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--port", "0", *options], capture_output=True, text=True, timeout=20, check=False
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
