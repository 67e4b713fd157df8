"""The real picker as a process of its own: `python -m picker serve`, seen through its ports and its log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine import Engine

UP = "The picker is up"
EXTPROC_HOST = "127.{}.{}.1".format(*divmod(os.getpid() % 60_000 + 256, 256))
"""One loopback address for each test process: an Envoy whose picker was killed goes on asking at the dead port, which
another process may get meanwhile."""
_START_SECONDS = 20


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = 8.0) -> Any:
    """Wait for something that another process does in its own time; returns what came true."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not (value := await condition()):
        assert asyncio.get_running_loop().time() < deadline, condition
        await asyncio.sleep(0.03)
    return value


def over(engines: Sequence[Engine], **more: Any) -> dict[str, Any]:
    """A configuration for these engines. They are scraped when the picker starts, and then once a second."""
    entries = [{"name": f"engine-{number}", "address": engine.address} for number, engine in enumerate(engines)]
    return {"endpoints": {"static": entries}, "scrape": {"intervalSeconds": 1, "staleSeconds": 10}, **more}


KTHENA = {"profile": "kthena"}
"""The scheduler for tests that look at matched blocks, or at engines that say they are full."""
OFTEN = {"intervalSeconds": 0.05}
"""Scraping for tests that change what engines say."""


class Samples:
    """One reading of `/metrics`."""

    def __init__(self, page: str) -> None:
        self._samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        ]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over the series of `picker_<name>` that have these labels."""
        wanted = labels.items()
        return sum(value for found, own, value in self._samples if found == f"picker_{name}" and wanted <= own.items())

    def series(self, name: str, label: str) -> dict[str, float]:
        """What `picker_<name>` says for each value of one label; zeros are left out."""
        found: defaultdict[str, float] = defaultdict(float)
        for own_name, labels, value in self._samples:
            if own_name == f"picker_{name}":
                found[labels[label]] += value
        return {value: count for value, count in found.items() if count}

    @property
    def memory(self) -> float:
        """Resident bytes of the process."""
        return next(value for name, _, value in self._samples if name == "process_resident_memory_bytes")


class PickerProcess:
    """A picker with a configuration of its own on loopback ports that the system chooses, kept over restarts."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="picker-e2e-")
        self.directory = Path(self._directory.name)
        self.config: dict[str, Any] = {}
        self.ports: dict[str, int] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        listen: dict[str, Any] = {"extproc": f"{EXTPROC_HOST}:0", "admin": "127.0.0.1:0", "http": "127.0.0.1:0"}
        listen |= {"leaveSeconds": 0, "drainSeconds": 5, **config.get("listen", {})}
        self.write({**config, "listen": listen})

    @property
    def address(self) -> str:
        """Of ext_proc."""
        return f"{EXTPROC_HOST}:{self.ports['extproc']}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def write(self, config: dict[str, Any]) -> None:
        """Change the configuration file."""
        self.config = config
        self.write_text(yaml.safe_dump(config))

    def write_text(self, text: str) -> None:
        new = self.directory / "picker.yaml.new"
        new.write_text(text)
        new.replace(self.directory / "picker.yaml")

    async def start(self) -> None:
        """Start, or start again on the same ports."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10))
        if self.ports:
            listen = self.config["listen"]
            ports = {name: listen[name].rpartition(":")[0] + f":{port}" for name, port in self.ports.items()}
            self.write({**self.config, "listen": {**listen, **ports}})
        before = len(self.log())
        with (self.directory / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "picker", "serve", "-c", str(self.directory / "picker.yaml")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        async def up() -> dict[str, Any] | None:
            assert self._process is not None
            assert self._process.returncode is None, self.log()
            return next((line for line in self.log()[before:] if line["event"] == UP), None)

        line = await until(up, _START_SECONDS)
        self.ports = {name: line[name] for name in ("extproc", "admin", "http")}

    def log(self) -> list[dict[str, Any]]:
        """The lines logged so far; one that is no JSON is an event of its own."""
        lines = []
        path = self.directory / "log"
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            try:
                lines.append(json.loads(line))
            except ValueError:
                lines.append({"event": line, "level": "unreadable"})
        return lines

    def events(self, event: str) -> list[dict[str, Any]]:
        """The log lines whose event starts so."""
        return [line for line in self.log() if line["event"].startswith(event)]

    def complaints(self) -> list[dict[str, Any]]:
        """Log lines that should never be: errors, and whatever else ends up in the log, such as tracebacks."""
        return [line for line in self.log() if line.get("level") not in ("debug", "info", "warning")]

    async def get(self, path: str) -> Any:
        assert self._session is not None
        async with self._session.get(f"http://127.0.0.1:{self.ports['http']}{path}") as answer:
            return await answer.json()

    async def metrics(self) -> Samples:
        assert self._session is not None
        async with self._session.get(f"http://127.0.0.1:{self.ports['http']}/metrics") as answer:
            return Samples(await answer.text())

    async def decisions(self, limit: int = 256) -> list[dict[str, Any]]:
        """The most recent decisions in short, newest first."""
        found: list[dict[str, Any]] = (await self.get(f"/debug/scores.json?limit={limit}"))["decisions"]
        return found

    async def decision(self, number: int) -> dict[str, Any]:
        """One decision in full."""
        found: dict[str, Any] = await self.get(f"/debug/scores.json?decision={number}")
        return found

    async def matched(
        self, body: bytes, plugin: str = "prefix-cache", path: str = "/v1/chat/completions"
    ) -> dict[str, tuple[int, int]]:
        """How much of this request each endpoint is thought to hold, in blocks of its total, by address."""
        assert self._session is not None
        url = f"http://127.0.0.1:{self.ports['http']}/debug/explain"
        async with self._session.post(url, json={"body": body.decode(), "path": path}) as answer:
            decision = await answer.json()
        return {
            endpoint["address"]: (found["matched"], found["total"])
            for endpoint in decision["endpoints"]
            for found in endpoint["plugins"]
            if found["plugin"] == plugin
        }

    async def settled(self) -> Samples:
        """Wait until nothing of any request is left, then read the metrics."""

        async def idle() -> bool:
            samples = await self.metrics()
            left = ("in_flight_requests", "endpoint_in_flight_requests", "open_streams", "buffered_body_bytes")
            return not any(samples(name) for name in (*left, "prefix_cache_held"))

        await until(idle)
        # Metrics are not all read at one moment: what is counted at the end of a request may be on the next page only.
        samples = await self.metrics()
        assert samples.series("errors_total", "where") == {}, self.events("unexpected error")
        return samples

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal that ends the process; returns its exit code. Does nothing when it has ended."""
        assert self._process is not None
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self.send_signal(number)
            try:
                await asyncio.wait_for(self._process.wait(), 15)
            except TimeoutError:
                self._process.kill()
                raise
        code = self._process.returncode
        assert code is not None
        return code

    async def close(self) -> None:
        """End the process if it still runs, and remove its files."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
            await self._process.wait()
        if self._session is not None:
            await self._session.close()
        self._directory.cleanup()
