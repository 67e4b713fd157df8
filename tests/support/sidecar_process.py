"""The real sidecar as a process of its own: `python -m picker sidecar`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import aiohttp

from tests.support.picker_process import until


class Publisher(Protocol):
    @property
    def endpoint(self) -> str: ...

    @property
    def replay_endpoint(self) -> str | None: ...


class Followed(Protocol):
    """An engine, real or simulated."""

    @property
    def url(self) -> str: ...

    @property
    def publishers(self) -> Sequence[Publisher]: ...


class SidecarProcess:
    """A sidecar beside an engine, kept on its port over restarts. `pod` is `name.namespace`."""

    def __init__(self, engine: Followed, pod: str, model: str = "sim", **environment: str) -> None:
        (publisher,) = engine.publishers
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._directory = tempfile.TemporaryDirectory(prefix="sidecar-e2e-")
        self._log = Path(self._directory.name) / "log"
        self._environment = {
            **os.environ,
            "VLLM_ZMQ_ENDPOINT": publisher.endpoint,
            "VLLM_ZMQ_REPLAY_ENDPOINT": publisher.replay_endpoint,
            **environment,
        }
        names = ("--pod", pod, "--model", model, "--engine-base-url", engine.url)
        self._arguments = ("-E", "vllm", "-H", "127.0.0.1", "-P", str(self.port), *names)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def start(self) -> None:
        """Start, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "picker", "sidecar", *self._arguments),
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        async def up() -> bool:
            assert self._process is not None
            assert self._process.returncode is None, self.log()
            with suppress(aiohttp.ClientError, OSError):
                async with aiohttp.request("GET", f"http://{self.address}/health") as answer:
                    return answer.status == 200
            return False

        await until(up, 20)

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
            await self._process.wait()

    async def close(self) -> None:
        await self.kill()
        self._directory.cleanup()
