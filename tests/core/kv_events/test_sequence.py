"""The tracker against a model: a publisher with a bounded replay buffer, behind a link that loses, repeats and reorders.

The model knows which life of the engine published what. Whatever happens, the applied batches must be an unbroken run
of one life's batches, from the number that was announced; once all is quiet, the run must end with the last one
published.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.kv_events.decode import UndecodableBatchError
from picker.core.kv_events.events import EventBatch
from picker.core.kv_events.sequence import SequenceTracker
from picker.core.kv_events.sequence_actions import (
    AskReplay,
    Begin,
    Deliver,
    Drop,
    Dropped,
    EndReplay,
    Gap,
    Restarted,
    Resynchronised,
)
from picker.core.kv_events.sequence_limits import SequenceLimits

LIMITS = SequenceLimits()


def decode(payload: bytes) -> EventBatch:
    try:
        return EventBatch(float(payload), ())
    except ValueError:
        raise UndecodableBatchError("damaged") from None


class Publisher:
    """What an engine process does: batches are numbered from 0, the last ones are kept; time stamps are unique."""

    def __init__(self, buffer: int) -> None:
        self.published: list[bytes] = []
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.stamp = 0

    def publish(self) -> tuple[int, bytes]:
        self.stamp += 1
        frame = (len(self.published), b"%d" % self.stamp)
        self.published.append(frame[1])
        self.buffer.append(frame)
        return frame

    def restart(self) -> None:
        self.published = []
        self.buffer.clear()

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        return [frame for frame in self.buffer if frame[0] >= start]


class World:
    """A tracker, its publisher, and what is under way between them."""

    def __init__(self, *, buffer: int | None, limits: SequenceLimits = LIMITS) -> None:
        self.publisher = Publisher(buffer or 0)
        self.tracker = SequenceTracker(decode, replay=buffer is not None, limits=limits)
        self.now = 100.0
        self.live: list[tuple[int, bytes]] = []
        self.request: AskReplay | None = None
        self.reply: deque[tuple[int, int, bytes | None]] = deque()  # number, sequence, payload (None: end)
        self.since: int | None = None
        self.applied: list[float] = []
        self.counts: dict[Any, int] = {}
        self.linked = False

    def do(self, actions: Iterable[Any]) -> None:
        for action in actions:
            kind = action.reason if isinstance(action, Drop) else type(action)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            match action:
                case Deliver(sequence, batch):
                    assert sequence is not None
                    if self.since is None:
                        self.since = sequence
                    assert sequence == self.since + len(self.applied)
                    self.applied.append(batch.timestamp)
                case Restarted():
                    self.since, self.applied = 0, []
                case Begin(since):
                    self.since, self.applied = since, []
                case AskReplay():
                    self.request = action
                    self.reply.clear()
                case EndReplay():
                    self.request = None
                    self.reply.clear()
        self.check()

    def check(self) -> None:
        stamps = [float(payload) for payload in self.publisher.published]
        if self.tracker.first is not None and self.linked and self.tracker._trusted:
            assert self.applied == stamps[self.tracker.first : self.tracker.last + 1]
            assert self.tracker.first == (self.since or 0)
        assert self.tracker.complete == (self.tracker.first == 0)
        assert self.tracker._held.used_bytes <= self.tracker._limits.max_held

    def publish(self) -> None:
        frame = self.publisher.publish()
        if self.linked:
            self.live.append(frame)

    def arrive(self, index: int = 0) -> None:
        if self.live:
            sequence, payload = self.live.pop(index % len(self.live))
            self.do(self.tracker.received(sequence, payload, self.now))

    def connect(self) -> None:
        if not self.linked:
            self.linked = True
            self.do(self.tracker.connected(self.now))

    def disconnect(self) -> None:
        while self.live:
            self.arrive()
        self.linked = False
        self.tracker.disconnected()
        self.reply.clear()

    def serve(self) -> None:
        if self.request is not None:
            number = self.request.number
            self.reply += [(number, *frame) for frame in self.publisher.replay(self.request.start)]
            self.reply.append((number, -1, None))
            self.request = None

    def reply_arrives(self) -> None:
        if self.reply:
            number, sequence, payload = self.reply.popleft()
            if payload is None:
                self.do(self.tracker.replay_ended(number, self.now))
            else:
                self.do(self.tracker.replayed(number, sequence, payload, self.now))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, ticking whenever it is due."""
        end = self.now + seconds
        for _ in range(10_000):
            if (due := self.tracker.deadline) > end:
                break
            self.now = max(self.now, due)
            self.do(self.tracker.tick(self.now))
            assert self.tracker.deadline > self.now or self.tracker._is_next_held(), "a timer that does not move"
        else:
            raise AssertionError("timers never rest")
        self.now = end

    def quieten(self) -> None:
        """Let the world heal: a working link, every replay served, and time for all timers."""
        self.connect()
        for _ in range(150):
            while self.live or self.request or self.reply:
                while self.live:
                    self.arrive()
                self.serve()
                self.reply_arrives()
            self.pass_time(1.0)


OPERATIONS = (
    *("publish", "arrive", "replay") * 3,
    *("serve", "reply", "connect") * 2,
    *("lose", "repeat", "damage", "swap", "restart", "blink", "disconnect", "wait", "lose reply", "damage reply"),
)


def run(world: World, operations: list[tuple[str, int]]) -> None:
    for name, number in operations:
        live, reply = world.live, world.reply
        match name:
            case "publish":
                for _ in range(number % 4 + 1):
                    world.publish()
            case "arrive":
                for _ in range(number % 4 + 1):
                    world.arrive()
            case "serve":
                world.serve()
            case "reply":
                for _ in range(number % 6 + 1):
                    world.reply_arrives()
            case "replay":
                world.serve()
                while world.reply:
                    world.reply_arrives()
            case "lose" if live:
                live.pop(number % len(live))
            case "repeat" if live:
                live.insert(number % 3, live[number % len(live)])
            case "damage" if live:
                index = number % len(live)
                live[index] = (live[index][0], b"x")
            case "swap":
                world.arrive(number)
            case "restart" | "blink":
                world.disconnect()
                if name == "restart":
                    world.publisher.restart()
                for _ in range(number % 8):
                    world.publish()
                if number % 3:
                    world.connect()
            case "disconnect":
                world.disconnect()
            case "connect":
                world.connect()
            case "wait":
                world.pass_time(0.05 * 3 ** (number % 7))
            case "lose reply" if reply:
                del reply[number % len(reply)]
            case "damage reply" if reply and reply[number % len(reply)][2] is not None:
                index = number % len(reply)
                reply[index] = (*reply[index][:2], b"x")


OPERATION_LISTS = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 40)), max_size=60)


@settings(deadline=None, max_examples=400)
@given(OPERATION_LISTS, st.sampled_from([1, 2, 5, 1000]))
def test_with_replay_it_ends_with_the_last_published_batch(operations: list[tuple[str, int]], buffer: int) -> None:
    world = World(buffer=buffer)
    run(world, operations)
    world.quieten()
    stamps = [float(payload) for payload in world.publisher.published]
    assert not world.tracker.filling
    assert world.tracker.last == len(stamps) - 1
    assert world.tracker.first is not None
    assert world.applied == stamps[world.tracker.first :]
    assert world.tracker.complete == (world.tracker.first == 0)
    # A reply that lost its first frame is like that of a buffer which begins later.
    if buffer == 1000 and not {"damage reply", "lose reply"} & {name for name, _ in operations}:
        assert world.tracker.complete


@settings(deadline=None, max_examples=400)
@given(OPERATION_LISTS, st.sampled_from([None, 0]))
def test_without_replay_it_goes_on_and_says_since_when(operations: list[tuple[str, int]], buffer: int | None) -> None:
    world = World(buffer=buffer)
    run(world, operations)
    world.quieten()
    world.publish()  # the loss of the last frame shows only with the next one
    world.quieten()
    stamps = [float(payload) for payload in world.publisher.published]
    assert world.tracker.first is not None
    assert world.applied == stamps[world.tracker.first :]
    assert world.applied


@settings(deadline=None, max_examples=100)
@given(OPERATION_LISTS)
def test_what_is_held_back_is_bounded(operations: list[tuple[str, int]]) -> None:
    world = World(buffer=1000, limits=SequenceLimits(max_held=400))
    run(world, operations)
    world.quieten()
    assert world.tracker.last == len(world.publisher.published) - 1


def synchronised(*, buffer: int | None = 1000, published: int = 0, limits: SequenceLimits = LIMITS) -> World:
    """A world where all is well, after so many batches."""
    world = World(buffer=buffer, limits=limits)
    for _ in range(published):
        world.publish()
    world.connect()
    run(world, [("replay", 0)])
    assert not world.tracker.filling
    return world


@pytest.mark.parametrize("meanwhile", [0, 1, 2, 3, 4, 8])
def test_an_engine_that_restarted_behind_a_broken_connection_is_recognised(meanwhile: int) -> None:
    """The fifth batch of the new engine is not the fifth of the old one, although the number fits."""
    world = synchronised(published=3)
    world.disconnect()
    world.publisher.restart()
    for _ in range(meanwhile):
        world.publish()
    world.connect()
    assert world.request == AskReplay(2, 2)
    run(world, [("replay", 0), ("replay", 0)])
    assert world.counts[Restarted] == 1
    assert len(world.applied) == meanwhile
    assert world.tracker.complete


def test_an_engine_that_lived_through_a_broken_connection_keeps_its_blocks() -> None:
    world = synchronised(published=3)
    world.disconnect()
    world.publish()
    world.connect()
    assert world.request == AskReplay(2, 2)
    run(world, [("replay", 0)])
    assert world.counts == {AskReplay: 2, EndReplay: 2, Deliver: 4, Resynchronised: 2}


def test_a_gap_is_filled_from_the_last_batch_on_and_what_is_live_waits() -> None:
    world = synchronised(published=3)
    world.publisher.publish()
    world.publish()
    world.arrive()
    assert world.request == AskReplay(2, 2)
    assert len(world.applied) == 3
    run(world, [("replay", 0)])
    assert len(world.applied) == 5
    assert world.counts[Gap] == 1
    assert world.counts.get(Begin) is None


def test_the_same_frame_again_is_a_duplicate_and_another_one_of_that_number_a_restart() -> None:
    world = synchronised()
    for _ in range(3):
        world.publish()
        world.arrive()
    world.do(world.tracker.received(1, world.publisher.published[1], world.now))
    assert world.counts[Dropped.DUPLICATE] == 1
    world.publisher.restart()
    world.publish()
    world.arrive()
    assert world.counts[Restarted] == 1
    assert world.request is not None
    assert world.request.start == 0


def test_a_replay_nobody_waits_for_any_more_changes_nothing() -> None:
    world = synchronised(published=3)
    before = world.tracker.last
    assert world.tracker.replayed(1, 7, b"7", world.now) == ()
    assert world.tracker.replay_ended(1, world.now) == ()
    assert world.tracker.last == before


def test_a_silent_publisher_is_asked_and_a_lost_last_frame_comes_back() -> None:
    world = synchronised(published=1)
    world.publisher.publish()  # lost
    world.pass_time(LIMITS.quiet - 0.1)
    assert world.request is None
    world.pass_time(0.2)
    assert world.request == AskReplay(2, 0)
    run(world, [("replay", 0)])
    assert len(world.applied) == 2


def test_a_failing_replay_is_asked_less_and_less_often() -> None:
    world = World(buffer=1000)
    world.publish()
    world.connect()
    asked = []
    for _ in range(400):
        if world.request is not None:
            asked.append(world.now)
            world.request = None
        world.pass_time(1.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses == pytest.approx([7, 12, 22, 42, 62, 62, 62, 62, 62], abs=1.1)


def test_a_publisher_whose_frames_never_decode_is_not_asked_for_each_of_them() -> None:
    world = synchronised()
    for sequence in range(100):
        world.now += 0.01
        world.do(world.tracker.received(sequence, b"x", world.now))
        if world.request is not None:
            number = world.request.number
            for damaged in range(sequence + 1):
                world.do(world.tracker.replayed(number, damaged, b"x", world.now))
            world.do(world.tracker.replay_ended(number, world.now))
    assert world.counts[AskReplay] < 5
    assert world.applied == []
    assert not world.tracker.complete


def test_much_that_was_held_back_is_delivered_in_slices() -> None:
    world = synchronised(published=1)
    payloads = [b"%d" % number + b" " * 1000 for number in range(2, 502)]
    world.publisher.published += [b"1", *payloads]
    for sequence, payload in enumerate(payloads, 2):
        world.do(world.tracker.received(sequence, payload, world.now))
    assert world.request is not None
    number = world.request.number
    world.do(world.tracker.replayed(number, 0, world.publisher.published[0], world.now))
    world.do(world.tracker.replayed(number, 1, b"1", world.now))
    steps = 0
    while world.tracker.filling:
        before = len(world.applied)
        assert world.tracker.deadline <= world.now
        world.do(world.tracker.tick(world.now))
        assert len(world.applied) - before <= 33
        steps += 1
    assert steps >= 14
    assert len(world.applied) == 502


def test_frames_without_numbers_are_delivered_and_make_no_claim() -> None:
    world = synchronised()
    assert world.tracker.complete
    assert world.tracker.received(None, b"5", world.now) == [Deliver(None, EventBatch(5.0, ()))]
    assert not world.tracker.complete
