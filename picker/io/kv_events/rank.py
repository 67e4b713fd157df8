"""Follows the KV events of one data-parallel rank: its SUB socket, its replays, its timers.

The sequence tracker decides; here is only what it cannot do itself. A replay has a DEALER socket of its own, so that no
late reply is taken for one to a later request. Nothing polls: an idle rank wakes up for its timers alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from picker.core.kv_events.events import EventBatch
from picker.core.kv_events.sequence import SequenceTracker
from picker.core.kv_events.sequence_actions import (
    Action,
    AskReplay,
    Begin,
    Deliver,
    Drop,
    EndReplay,
    Gap,
    Restarted,
    Resynchronised,
)
from picker.io.kv_events.frames import (
    MalformedFrameError,
    endpoint_of_rank,
    parse_live,
    parse_replay,
    replay_request,
)
from picker.io.kv_events.share import LoopShare
from picker.io.kv_events.sockets import Context, Socket, has_more, open_monitor, open_socket, read_one, readable
from picker.io.kv_events.source import KvEventHandler, KvEventSource, SubscriberSettings

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class RankSubscription:
    """One rank. Its public attributes say what was seen so far."""

    def __init__(
        self,
        source: KvEventSource,
        rank: int,
        handler: KvEventHandler,
        settings: SubscriberSettings,
        decode: Callable[[bytes], EventBatch],
        share: LoopShare,
    ) -> None:
        self.rank = rank
        self.endpoint = endpoint_of_rank(source.endpoint, rank)
        self.replay_endpoint = source.replay_endpoint and endpoint_of_rank(source.replay_endpoint, rank)
        self.connected = False
        self.lag: float | None = None
        """Seconds from the engine's time stamp of the last batch to its arrival here, by the clocks of both."""
        self.dropped: Counter[str] = Counter()
        """Frames that were not delivered, and events that could not be used, by reason."""
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        self._source = source
        self._topic = source.topic.encode()
        self._handler = handler
        self._settings = settings
        self._decode = decode
        self._share = share
        self._tracker = SequenceTracker(decode, replay=self.replay_endpoint is not None, limits=settings.limits)
        self._ready = False  # a new connection, whose predecessor's frames are still being read
        self._replay: AskReplay | None = None
        self._start_replay: Callable[[AskReplay], object] | None = None
        self._looked = asyncio.Event()
        """Set after anybody but its reader has looked at the socket of live frames."""
        self._timer: asyncio.Handle | None = None
        self._timer_due = inf
        self._log = structlog.get_logger("picker").bind(endpoint=self.endpoint, rank=rank)

    @property
    def last_seq(self) -> int | None:
        """Number of the last batch that was applied."""
        return None if self._tracker.first is None or self._tracker.last < 0 else self._tracker.last

    @property
    def complete(self) -> bool:
        """Whether all batches of this engine process were applied."""
        return self._tracker.complete

    @property
    def incomplete_since(self) -> int | None:
        """Number of the first batch of those that were applied, when there were others before it."""
        return self._tracker.first or None

    def stats(self) -> dict[str, Any]:
        """Return what was seen so far, for people."""
        return {
            "endpoint": self.endpoint,
            "connected": self.connected,
            "last_seq": self.last_seq,
            "complete": self.complete,
            "incomplete_since": self.incomplete_since,
            "lag_seconds": self.lag,
            **self.counts,
            "dropped": dict(self.dropped),
        }

    async def run(self, context: Context) -> None:
        """Follow the rank until cancelled."""
        live = open_socket(context, zmq.SUB, self._settings)
        monitor = open_monitor(context, live, _MONITORED)
        try:
            live.subscribe(self._topic)
            live.connect(self.endpoint)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_connection(monitor, live))
                group.create_task(self._follow_frames(live))
                self._start_replay = lambda ask: group.create_task(self._run_replay(context, live, ask))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._start_replay = self._replay = self._timer = None
            self.connected = False
            live.disable_monitor()
            monitor.close(0)
            live.close(0)

    async def _follow_frames(self, live: Socket) -> None:
        while True:
            some = await self._share.read(partial(read_one, live, self._take_live))
            self._confirm_connection()
            if not some:
                await readable(live, self._looked)

    async def _follow_connection(self, monitor: Socket, live: Socket) -> None:
        while True:
            await readable(monitor)
            await self._share.read(partial(read_one, monitor, self._take_monitored))
            if not has_more(live):
                self._confirm_connection()
            self._looked.set()

    def _take_monitored(self, parts: Sequence[bytes]) -> None:
        event = parse_monitor_message(list(parts))["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._ready = self.connected = True
            self.counts["connects"] += 1
        elif event == zmq.EVENT_DISCONNECTED:
            if self.connected:
                self.counts["disconnects"] += 1
            self._ready = self.connected = False
            self._tracker.disconnected()
        else:
            self.counts["handshakes_failed"] += 1

    def _confirm_connection(self) -> None:
        """Tell of a new connection, now that no frame of the one before is left."""
        if self._ready:
            self._ready = False
            self._do(self._tracker.connected(self._now()))

    def _take_live(self, parts: Sequence[bytes]) -> None:
        self.counts["frames"] += 1
        try:
            frame = parse_live(parts)
        except MalformedFrameError:
            self.dropped["malformed"] += 1
            return
        if self._source.exact_topic and frame.topic is not None and frame.topic != self._topic:
            self.dropped["topic"] += 1
            return
        if frame.sequence is None:
            self.counts["unnumbered"] += 1
        self._do(self._tracker.received(frame.sequence, frame.payload, self._now()))

    async def _run_replay(self, context: Context, live: Socket, ask: AskReplay) -> None:
        """Ask for a replay and take its replies, as long as they are wanted; a live frame goes before its replay."""

        def take(parts: Sequence[bytes]) -> None:
            try:
                frame = parse_replay(parts)
            except MalformedFrameError:
                self.dropped["malformed"] += 1
                return
            if frame is None:
                self._do(self._tracker.replay_ended(ask.number, self._now()))
            elif frame.sequence is not None:
                self.counts["replayed_frames"] += 1
                self._do(self._tracker.replayed(ask.number, frame.sequence, frame.payload, self._now()))

        assert self.replay_endpoint is not None  # noqa: S101  the tracker asks nothing otherwise
        try:
            with open_socket(context, zmq.DEALER, self._settings) as dealer:

                def read_next() -> bool:
                    if read_one(live, self._take_live):
                        return True
                    return self._replay is ask and read_one(dealer, take)

                dealer.connect(self.replay_endpoint)
                dealer.send_multipart(replay_request(ask.start), zmq.NOBLOCK)
                while self._replay is ask:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._settings.limits.replay_idle):
                            await readable(dealer)
                    await self._share.read(read_next)
                    self._looked.set()
        except zmq.ZMQError:
            self.counts["replay_errors"] += 1  # the tracker waits no longer than for a reply that does not come

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Deliver(_, batch):
                    self._deliver(batch)
                case Drop(reason):
                    self.dropped[reason] += 1
                case Gap(missing):
                    self.counts["gaps"] += 1
                    self.counts["missing_frames"] += missing
                case AskReplay():
                    self.counts["replays"] += 1
                    self._replay = action
                    if self._start_replay is not None:
                        self._start_replay(action)
                case EndReplay():
                    self._replay = None
                case Resynchronised():
                    self.counts["resynchronisations"] += 1
                case Restarted():
                    self.counts["restarts"] += 1
                    self._call(self._handler.on_restart, self.rank)
                case Begin(0):
                    self._call(self._handler.on_restart, self.rank)
                case Begin(since):
                    self.counts["losses"] += 1
                    self._call(self._handler.on_incomplete, self.rank, since)
        self._set_timer()

    def _deliver(self, batch: EventBatch) -> None:
        self.counts["batches"] += 1
        self.counts["events"] += len(batch.events)
        if batch.dropped:
            self.dropped.update(batch.dropped)
        self.lag = time.time() - batch.timestamp
        self._call(self._handler.on_batch, batch, self.rank)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception:  # noqa: BLE001  whatever applies events must not end following them
            self.counts["handler_errors"] += 1
            if self.counts["handler_errors"] == 1:
                self._log.exception("kv events could not be applied")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _set_timer(self) -> None:
        """See that `tick` comes when it is due; a timer that is early finds out when it fires."""
        due = self._tracker.deadline
        if due >= self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_at(max(due, 0.0), self._tick)

    def _tick(self) -> None:
        self._timer_due = inf
        self._do(self._tracker.tick(self._now()))


_COUNTS = (
    *("connects", "disconnects", "handshakes_failed", "frames", "batches", "events", "unnumbered", "gaps"),
    *(
        "missing_frames",
        "replays",
        "replayed_frames",
        "resynchronisations",
        "restarts",
        "losses",
        "replay_errors",
        "handler_errors",
    ),
)
