from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.fake_kubernetes.resources import CERTIFICATES, GATEWAYS, ISTIO, MONITORING
from tests.support.fake_kubernetes.server import FakeKubernetes


@pytest.fixture
async def cluster():
    server = FakeKubernetes(*CERTIFICATES, *GATEWAYS, *ISTIO, *MONITORING)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def kubectl(cluster, tmp_path):
    (tmp_path / "config").write_text(cluster.kubeconfig())

    async def run(*arguments, stdin="", fails=False):
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("kubectl"),
            *("--kubeconfig", tmp_path / "config", "--cache-dir", tmp_path / "cache", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 30)
        assert (process.returncode != 0) == fails, (out, err)
        return (err if fails else out).decode()

    return run
