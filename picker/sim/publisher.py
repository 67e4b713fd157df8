"""Publishes an engine's KV events over ZMQ as vLLM does: live on a PUB socket, and again on request on a ROUTER socket.

Batches are numbered from 0 for as long as the engine lives, and the last ones are kept for replay. With data
parallelism each rank has a publisher of its own, at the ports of rank 0 plus its number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio

from picker.sim.event_wire import EventFormat, encode_batch
from picker.sim.events import KvEvent

_END = (1 << 64) - 1
_BIND_TRIES = 50
_BURST = 256
"""Frames of a replay that are sent before others get the loop."""

_Every = Annotated[int, msgspec.Meta(ge=0)]


class EventFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong with live frames, on every n-th of them; 0 for never. Replays are sound, but may be slow."""

    drop_every: _Every = 0
    repeat_every: _Every = 0
    swap_every: _Every = 0
    """Sends a frame after the next one."""
    corrupt_every: _Every = 0
    replay_pause: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds before each frame of a replay."""


SOUND = EventFaults()


@dataclass(frozen=True, slots=True)
class KvEventSettings:
    """How an engine publishes. Ports are those of rank 0; 0 takes free ones."""

    port: int = 0
    replay_port: int | None = 0
    """None: no replay."""
    topic: str = "kv-events"
    form: EventFormat = "map"
    """`array` is vLLM 0.20 throughout: its replays have no topic."""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    faults: EventFaults = SOUND

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("replay_port", self.replay_port or 0)):
            if not 0 <= port <= 65_535:
                raise ValueError(f"kv events {name} is {port}: give 0 .. 65535")
        if self.buffer_steps < 0:
            raise ValueError(f"kv events buffer_steps is {self.buffer_steps}: give a number >= 0")


class KvEventPublisher:
    """The publisher of one rank. `open` it before use; what is published while it is closed only gets a number."""

    def __init__(
        self, settings: KvEventSettings, host: str, rank: int, loras: Sequence[str], context: zmq.asyncio.Context
    ) -> None:
        self.settings = settings
        self.rank = rank
        self.faults = settings.faults
        self.endpoint = self.replay_endpoint = ""
        self._host = f"[{host}]" if ":" in host else host
        self._lora_ids = {name: number for number, name in enumerate(loras, 1)}
        self._context = context
        self._publisher: zmq.asyncio.Socket | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._replays: asyncio.Task[None] | None = None
        self._topic = settings.topic.encode()
        self._begin()

    def _begin(self) -> None:
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self.settings.buffer_steps)
        self._late: list[bytes] | None = None

    def open(self, port: int, replay_port: int | None) -> None:
        """Listen. Raises OSError."""
        try:
            self._publisher, self.endpoint = self._bind(zmq.PUB, port)
            if replay_port is not None:
                self._router, self.replay_endpoint = self._bind(zmq.ROUTER, replay_port)
                self._replays = asyncio.create_task(self._serve_replays(self._router), name="kv event replays")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening."""
        if self._replays is not None:
            self._replays.cancel()
        for socket in (self._publisher, self._router):
            if socket is not None:
                socket.close(0)
        self._publisher = self._router = self._replays = None

    async def restart(self) -> None:
        """Do what a new process does: drop all connections, know no batches, count from 0. Raises OSError."""
        self._begin()
        await self._reopen()

    async def _reopen(self) -> None:
        self.close()
        ports = port_of(self.endpoint), port_of(self.replay_endpoint) if self.replay_endpoint else None
        for tries in range(_BIND_TRIES):
            try:
                return self.open(*ports)
            except OSError:
                if tries == _BIND_TRIES - 1:
                    raise
                await asyncio.sleep(0.02)  # ZMQ closes sockets in a thread of its own
        return None

    def source(self) -> dict[str, Any]:
        """Return what vLLM says of a publisher at /kv_event_sources."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint or None,
            "buffer_steps": self.settings.buffer_steps,
            "topic": self.settings.topic,
        }

    def publish(self, events: list[KvEvent], _: float) -> None:
        """Send what one step changed. The batch is stamped with the time of day."""
        payload = encode_batch(events, time.time(), self.rank, lora_ids=self._lora_ids, form=self.settings.form)
        sequence = self._sequence
        self._sequence += 1
        self._buffer.append((sequence, payload))
        faults = self.faults
        if _hits(faults.drop_every, sequence):
            return
        if _hits(faults.corrupt_every, sequence):
            payload = payload[: len(payload) // 2]
        frame = [self._topic, sequence.to_bytes(8, "big"), payload]
        if _hits(faults.swap_every, sequence) and self._late is None:
            self._late = frame
            return
        self._send(frame)
        if _hits(faults.repeat_every, sequence):
            self._send(frame)
        if self._late is not None:
            self._send(self._late)
            self._late = None

    def _send(self, frame: list[bytes]) -> None:
        if self._publisher is not None:
            _plain(self._publisher).send_multipart(frame, zmq.NOBLOCK)

    def _bind(self, kind: int, port: int) -> tuple[zmq.asyncio.Socket, str]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, int(self._host.startswith("[")))
        socket.setsockopt(zmq.SNDHWM, max(100_000, 2 * (self.settings.buffer_steps + 1)))
        try:
            socket.bind(f"tcp://{self._host}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(error.errno, f"cannot listen for kv events on {self._host}:{port}: {error}") from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            request = await router.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                continue
            await self._replay(router, request[0], int.from_bytes(request[2], "big"))

    async def _replay(self, router: zmq.asyncio.Socket, peer: bytes, start: int) -> None:
        map_form = self.settings.form == "map"
        plain = _plain(router)
        frames = [frame for frame in self._buffer if frame[0] >= start]
        for count, (sequence, payload) in enumerate([*frames, (_END, b"")]):
            if self.faults.replay_pause or not count % _BURST:
                await asyncio.sleep(self.faults.replay_pause)
            topic = ([b""] if sequence == _END else [self._topic]) if map_form else []
            plain.send_multipart([peer, b"", *topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)


def open_publishers(
    settings: KvEventSettings, host: str, ranks: int, loras: Sequence[str], context: zmq.asyncio.Context
) -> list[KvEventPublisher]:
    """Let all ranks listen, each at the ports of rank 0 plus its number. Raises OSError."""
    for tries in range(_BIND_TRIES):
        publishers = [KvEventPublisher(settings, host, rank, loras, context) for rank in range(ranks)]
        port, replay_port = settings.port, settings.replay_port
        try:
            for publisher in publishers:
                publisher.open(port, replay_port)
                port = port_of(publisher.endpoint) + 1
                replay_port = port_of(publisher.replay_endpoint) + 1 if publisher.replay_endpoint else None
        except OSError:
            for publisher in publishers:
                publisher.close()
            if tries == _BIND_TRIES - 1 or (settings.port and settings.replay_port != 0):
                raise
        else:
            return publishers
    raise AssertionError("unreachable: the last try raises")


def port_of(endpoint: str) -> int:
    """Return the port of `tcp://host:port`."""
    return int(endpoint.rpartition(":")[2])


def _hits(every: int, sequence: int) -> bool:
    return every > 0 and sequence % every == every - 1


def _plain(socket: zmq.asyncio.Socket) -> zmq.Socket[bytes]:
    """Return the same socket, to be used without waiting: neither PUB nor ROUTER ever lets a sender wait."""
    return zmq.Socket.shadow(socket.underlying)
