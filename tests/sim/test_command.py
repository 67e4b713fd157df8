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
    ],
)
def test_settings_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--port", "0", *options], capture_output=True, text=True, timeout=20, check=False
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
