"""A cluster's pods as they live: they start, get ready, serve, end gracefully, or vanish with their node.

Each pod has a loopback address of its own, on which it serves for as long as it lives and not a moment longer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.support.fake_kubernetes.server import FakeKubernetes
from tests.support.pods import pod

METRICS = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0.1\n"
ANSWER_SECONDS = 0.05


@dataclass(eq=False)
class Living:
    """A pod with its server."""

    name: str
    pool: str
    node: str
    ip: str
    requests: int = 0
    server: asyncio.Server | None = None
    connections: set[asyncio.Transport] = field(default_factory=set)


class _Engine(asyncio.Protocol):
    """Answers one request after the other, as little as there can be."""

    def __init__(self, living: Living) -> None:
        self._living = living
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._living.connections.add(transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._living.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._data.startswith(b"GET") and self._data.endswith(b"\r\n\r\n"):
            self._data = b""
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(METRICS), METRICS))
        elif self._data.endswith(b"}") or self._data.endswith(b"\r\n0\r\n\r\n"):
            self._data = b""
            self._living.requests += 1
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._answer)

    def _answer(self) -> None:
        if not self._transport.is_closing():
            head = f"HTTP/1.1 200 OK\r\nx-engine: {self._living.ip}\r\ncontent-length: 2\r\n\r\nok"
            self._transport.write(head.encode())


class Fleet:
    """Pods in a fake cluster. Addresses of pods that are gone are given to new ones, whatever pool those are of.

    `lives` has, by pool and address, when pods with it were there, as `[begin, end]` in Unix seconds; the end of those
    that live is endless.
    """

    def __init__(self, cluster: FakeKubernetes) -> None:
        self.port = 0
        self.pods: dict[str, Living] = {}
        self.lives: dict[tuple[str, str], list[list[float]]] = {}
        self._cluster = cluster
        network = 100 + os.getpid() % 100  # test processes do not share addresses
        self._free = deque(f"127.{network}.{number // 200}.{number % 200 + 10}" for number in range(400))
        self._numbers = itertools.count()

    @property
    def addresses(self) -> list[str]:
        """All that pods have or may get."""
        return [f"{ip}:{self.port}" for ip in (*self._free, *(living.ip for living in self.pods.values()))]

    def of(self, pool: str) -> list[Living]:
        """The pods of a pool, oldest first."""
        return [living for living in self.pods.values() if living.pool == pool]

    async def start(self, pool: str, node: str, *, ready: bool = True) -> Living:
        """Create a pod that serves; it is in its pool once it is ready."""
        living = Living(f"{pool}-{next(self._numbers):04}", pool, node, self._free.popleft())
        loop = asyncio.get_running_loop()
        living.server = await loop.create_server(lambda: _Engine(living), living.ip, self.port)
        self.port = living.server.sockets[0].getsockname()[1]
        self.pods[living.name] = living
        self.lives.setdefault((pool, f"{living.ip}:{self.port}"), []).append([time.time(), float("inf")])
        self.report(living, ready=ready)
        return living

    def report(self, living: Living, *, ready: bool = True, terminating: bool = False) -> None:
        """What the kubelet says of a pod."""
        found = pod(living.name, living.ip, labels={"app": living.pool}, ready=ready, port=self.port)
        found["spec"]["nodeName"] = living.node
        if terminating:
            found["metadata"]["deletionTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._cluster.apply(found)

    async def end(self, living: Living, grace: float) -> None:
        """Delete a pod: it is said to terminate, serves on for `grace` seconds, and is gone."""
        self.report(living, terminating=True)
        await asyncio.sleep(grace)
        self.kill(living)
        self.forget(living)

    def kill(self, living: Living) -> None:
        """Let a pod be gone at once, without anybody being told."""
        assert living.server is not None
        living.server.close()
        for transport in list(living.connections):
            transport.abort()
        self.lives[living.pool, f"{living.ip}:{self.port}"][-1][1] = time.time()

    def forget(self, living: Living) -> None:
        """Remove a pod that is gone from the API server."""
        self._cluster.storage.delete(self._cluster.resource("pods"), "default", living.name)
        del self.pods[living.name]
        self._free.append(living.ip)

    def missed_by(self, pool: str, address: str, at: float) -> float:
        """How long the pod of this pool with this address had been gone at a time, in seconds; endless if never there."""
        lives = self.lives.get((pool, address), [])
        return min((max(0.0, at - end) for begin, end in lives if begin <= at), default=float("inf"))

    def stop(self) -> None:
        """End all pods."""
        for living in self.pods.values():
            self.kill(living)
