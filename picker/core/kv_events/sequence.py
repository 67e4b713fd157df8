"""Keeps the event batches of one publisher in order and whole: a state machine without I/O.

Theory of operation
-------------------
An engine numbers its batches from 0, anew in every process, and keeps the last ones for replay. What was delivered is
always an unbroken run `first .. last` of one such life: whoever applies it knows all that the engine holds when `first`
is 0, and a part of it otherwise. Whenever the run must begin anew, `Restarted` or `Begin` says so first, and what was
applied before must be forgotten: a batch that was missed may have removed any block.

    nothing known    the position in the sequence is unknown; the next frame or replay gives it
    following        a frame is delivered when it is `last + 1`; the position is trusted
    filling          frames are held back, either behind a gap or because the position is not trusted: the connection
                     broke, and the engine may have restarted meanwhile

While filling, a replay is under way, or without one a moment passes for frames that overtook each other. A replay is
asked from `last`, not from the batch after it: that the publisher still has the very same batch proves that it is the
same life. Digests of the recent frames tell also a repeated frame (drop it) from a lower number of another life.

What a replay cannot bring is lost: the run begins anew behind it. What a replay failed to bring, as nobody answered, is
asked again later, from 0. A publisher that has been silent for a while is asked too, because the loss of its last frame,
or a restart that no broken connection betrayed, shows only so.

A frame that cannot be decoded is a frame that did not arrive, until the replay has brought it damaged as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import inf

from picker.core.kv_events.decode import UndecodableBatchError
from picker.core.kv_events.events import EventBatch
from picker.core.kv_events.held_frames import HeldFrames
from picker.core.kv_events.sequence_actions import (
    Action,
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

_DIGESTS = 2048
"""Frames back from the last one that a repeated frame is known by."""

_SLICE = 32 << 10
"""Bytes of held frames that are delivered at once; `tick` is due at once for the rest."""


class _Replay:
    __slots__ = ("advanced", "damaged", "expected", "healing", "idle_at", "number", "started")

    def __init__(self, number: int, expected: frozenset[int], idle_at: float, *, healing: bool) -> None:
        self.number = number
        self.expected = expected
        """Frames that were held when it was asked: a whole reply contains them, if they are real."""
        self.idle_at = idle_at
        self.healing = healing
        """It is asked from 0, to begin anew if it reaches further back than `first`."""
        self.started = False
        self.advanced = False
        self.damaged = False


class SequenceTracker:
    """The batches of one publisher. Methods take in what happened and return what to do, in order; none raises.

    `decode` makes a batch of a payload and raises UndecodableBatchError; `replay` says whether there is a replay to ask.
    `now` is any monotonic time in seconds. `tick` is due at `deadline`.
    """

    def __init__(
        self, decode: Callable[[bytes], EventBatch], *, replay: bool, limits: SequenceLimits | None = None
    ) -> None:
        self.first: int | None = None
        """Number of the oldest batch of the run, None when the position is unknown."""
        self.last = -1
        """Number of the newest batch of the run; `first - 1` when the run is empty."""
        self._decode = decode
        self._replayable = replay
        self._limits = limits or SequenceLimits()
        self._trusted = False
        self._numbered = True
        self._fresh = True  # whoever applies the batches has nothing, and knows of no loss
        self._connected = self._broken = False
        self._heard = -inf
        self._digests = array("q", bytes(8 * _DIGESTS))
        self._held = HeldFrames(self._limits.max_held)
        self._was_filling = False
        self._replay: _Replay | None = None
        self._replays = 0
        self._give_up_at = inf
        self._retains: bool | None = None  # whether the publisher keeps batches for replay; None: not seen yet
        self._failed = False  # what is missing may still be had by a replay from 0
        self._retry_at = -inf
        self._retry = self._limits.retry
        self._out: list[Action] = []

    @property
    def complete(self) -> bool:
        """Whether all that this engine process ever published was delivered."""
        return self.first == 0 and self._numbered

    @property
    def filling(self) -> bool:
        """Whether frames are held back."""
        return not self._trusted or bool(self._held)

    @property
    def deadline(self) -> float:
        """When `tick` is due; infinity for never."""
        if self._is_next_held():
            return -inf
        if self._replay is not None:
            return min(self._replay.idle_at, self._give_up_at)
        if self._give_up_at < inf:
            return self._give_up_at
        if not (self._connected and self._replayable):
            return inf
        if self._failed:
            return self._retry_at
        return inf if self._retains is False else self._heard + self._limits.quiet

    def connected(self, now: float) -> Sequence[Action]:
        """Take in that frames can arrive from now on. That it is still the same engine has to be proven."""
        if self._connected:
            return ()
        self._connected = True
        self._heard = now
        self._held.clear()
        if self._replayable:
            self._trusted = False
            if self._is_empty():
                self.first = None
            self._retains = None
            self._retry_at = -inf
            self._give_up_at = inf
            self._ask(now)
        elif self._broken and self.first is not None:
            self._lose()
        self._broken = False
        return self._settle(now)

    def disconnected(self) -> None:
        """Take in that the connection broke."""
        self._connected = False
        self._broken = True

    def received(self, sequence: int | None, payload: bytes, now: float) -> Sequence[Action]:
        """Take in a live frame; `sequence` is None where the publisher does not number them."""
        self._heard = now
        if sequence is None:
            self._numbered = False
            if (batch := self._read(payload)) is not None:
                self._out.append(Deliver(None, batch))
                self._fresh = False
            return self._take_out()
        damaged = False
        if self._trusted:
            if sequence == self.last + 1 and not self._held:
                if (batch := self._read(payload)) is not None:
                    self._deliver(sequence, payload, batch)
                    return self._take_out()
                damaged = True
            elif sequence <= self.last:
                if self._is_known(sequence, payload):
                    return (Drop(Dropped.DUPLICATE),)
                self._restart(now)
            elif not self.filling:
                self._out.append(Gap(sequence - self.last - 1))
        self._hold(sequence, None if damaged else payload)
        return self._settle(now)

    def replayed(self, number: int, sequence: int, payload: bytes, now: float) -> Sequence[Action]:
        """Take in a frame of the replay `number`."""
        replay = self._replay
        if replay is None or replay.number != number:
            return ()
        replay.idle_at = now + self._limits.replay_idle
        if not replay.started:
            replay.started = self._retains = True
            if not self._place(replay, sequence, payload, now):
                return self._settle(now)
        if sequence > self.last + 1:
            if replay.advanced:  # the reply itself has a gap
                self._ask(now)
                return self._settle(now)
            self._begin(sequence)
        if sequence == self.last + 1:
            replay.advanced = True
            self._take(replay, sequence, payload)
        return self._settle(now)

    def replay_ended(self, number: int, now: float) -> Sequence[Action]:
        """Take in the end marker of the replay `number`."""
        replay = self._replay
        if replay is None or replay.number != number:
            return ()
        self._end_replay()
        if replay.started:
            if replay.damaged:
                self._back_off(now)
            else:
                self._retry = self._limits.retry
            self._drop_phantoms(replay)
        else:
            self._nothing_replayed(replay, now)
        return self._settle(now)

    def tick(self, now: float) -> Sequence[Action]:
        """Take in that the time has come to `deadline`."""
        if now < self.deadline:
            return ()
        if not self._is_next_held():
            replay = self._replay
            if now >= self._give_up_at or (replay is not None and not replay.advanced):
                self._give_up(now)
            else:  # a reply that lost its end, a replay that failed some time ago, or a silent publisher
                self._ask(now, healing=replay is None and self._failed and self.first is not None)
        return self._settle(now)

    # Where the run stands

    def _place(self, replay: _Replay, sequence: int, payload: bytes, now: float) -> bool:
        """Find the position by the first frame of a reply. Returns whether the rest of it is wanted."""
        if self.first is None:
            self._begin(sequence)
            self._failed = False
        elif replay.healing:
            self._failed = False
            if sequence >= self.first:
                self._end_replay()
                return False
            self._begin(sequence)
        elif sequence <= self.last:
            if not self._is_known(sequence, payload):
                self._restart(now)
                return False
            self._trust()
        elif sequence > self.last + 1 or not self._is_empty():
            self._begin(sequence)
            self._failed = False
        return True

    def _nothing_replayed(self, replay: _Replay, now: float) -> None:
        if replay.healing:
            self._failed = False
        elif self.first is None or self._is_empty():
            if self._retains:
                self._drop_phantoms(replay)
            elif self._held.numbers() & replay.expected:
                self._retains = False
                self._go_on()
                return
            self._failed = False
            if self.first is None:
                self._begin(0)
        elif self._retains or (self._retains is None and not self._trusted):
            self._restart(now)
        else:
            self._retains = False
            self._go_on()

    def _begin(self, sequence: int) -> None:
        """Let the run begin with `sequence`."""
        if sequence > 0 or not self._fresh:
            self._out.append(Begin(sequence))
        self._fresh = sequence == 0
        self.first = sequence
        self.last = sequence - 1
        self._trust()

    def _trust(self) -> None:
        self._trusted = True
        self._let_go(lambda sequence: sequence <= self.last, Dropped.DUPLICATE)

    def _restart(self, now: float) -> None:
        self._out.append(Restarted())
        self._fresh = True
        self._forget_position()
        self._held.clear()
        if self._replayable and now >= self._retry_at:
            self._ask(now)
        elif self._replay is not None:
            self._end_replay()

    def _lose(self) -> None:
        """Give the position up: whether what was applied is still true cannot be proven."""
        self._out.append(Begin(self.last + 1))
        self._fresh = False
        self._forget_position()

    def _forget_position(self) -> None:
        self.first = None
        self.last = -1
        self._trusted = False

    def _is_empty(self) -> bool:
        return self.first is not None and self.last < self.first

    # Frames

    def _read(self, payload: bytes) -> EventBatch | None:
        if len(payload) > self._limits.max_frame:
            self._out.append(Drop(Dropped.OVERSIZED))
            return None
        try:
            return self._decode(payload)
        except UndecodableBatchError:
            self._out.append(Drop(Dropped.UNDECODABLE))
            return None

    def _deliver(self, sequence: int, payload: bytes, batch: EventBatch) -> None:
        self._out.append(Deliver(sequence, batch))
        self._digests[sequence % _DIGESTS] = hash(payload)
        self.last = sequence
        self._fresh = False

    def _take(self, replay: _Replay, sequence: int, payload: bytes) -> None:
        """Deliver the next frame of a replay; where it is damaged, the live copy, or else begin anew behind it."""
        held = self._held.get(sequence)
        self._held.remove(sequence)
        batch = self._read(payload)
        if batch is None and held is not None and held != payload:
            payload, batch = held, self._read(held)
        if batch is not None:
            self._deliver(sequence, payload, batch)
        else:
            self._begin(sequence + 1)
            replay.damaged = True

    def _is_known(self, sequence: int, payload: bytes) -> bool:
        """Whether this very frame was delivered."""
        oldest = max(self.first or 0, self.last - _DIGESTS + 1)
        return oldest <= sequence and self._digests[sequence % _DIGESTS] == hash(payload)

    # Frames held back

    def _hold(self, sequence: int, payload: bytes | None) -> None:
        if (refused := self._held.put(sequence, payload)) is not None:
            self._out.append(Drop(refused))

    def _let_go(self, unwanted: Callable[[int], bool], reason: Dropped) -> None:
        self._out += [Drop(reason)] * self._held.remove_where(unwanted)

    def _is_next_held(self) -> bool:
        return self._trusted and self._held.get(self.last + 1) is not None

    def _drain(self) -> None:
        """Deliver a slice of what is held, up to the next gap or damaged frame."""
        size = 0
        while size < _SLICE and self._is_next_held():
            sequence = self.last + 1
            payload = self._held.get(sequence) or b""
            size += len(payload)
            self._held.remove(sequence)
            batch = self._read(payload)
            if batch is None:
                self._hold(sequence, None)
            else:
                self._deliver(sequence, payload, batch)

    def _drop_phantoms(self, replay: _Replay) -> None:
        """Drop what was held before a whole reply was asked and is not in it."""
        reached = self._held.run_after(self.last + 1) if self._trusted else 0
        self._let_go(lambda sequence: sequence >= reached and sequence in replay.expected, Dropped.PHANTOM)

    # Waiting for what is missing

    def _await_missing(self, now: float) -> None:
        if self._replayable and now >= self._retry_at and self._retains is not False:
            self._ask(now)
        elif not self._trusted:
            self._go_on()
            self._drain()
        elif self._give_up_at == inf:
            self._give_up_at = now + self._limits.reorder

    def _ask(self, now: float, *, healing: bool = False) -> None:
        self._replays += 1
        self._heard = now
        idle_at = now + self._limits.replay_idle
        self._replay = _Replay(self._replays, self._held.numbers(), idle_at, healing=healing)
        if self._give_up_at == inf:
            self._give_up_at = now + self._limits.replay_total
        start = 0 if self.first is None or healing else max(self.first, self.last)
        self._out.append(AskReplay(self._replays, start))

    def _end_replay(self) -> None:
        self._replay = None
        self._give_up_at = inf
        self._out.append(EndReplay())

    def _give_up(self, now: float) -> None:
        if self._replay is not None:
            self._end_replay()
            self._back_off(now)
        self._go_on()
        self._give_up_at = inf

    def _back_off(self, now: float) -> None:
        self._retry_at = now + self._retry
        self._retry = min(2 * self._retry, self._limits.retry_most)

    def _go_on(self) -> None:
        """Go on with the newest unbroken run of what is held; what comes before it would be forgotten anyway."""
        if not self._trusted and self.first is not None:
            self._lose()
        if self._held and not self._is_next_held():
            start = self._held.newest_run()
            self._held.remove_where(lambda sequence: sequence < start)
            self._begin(start)
        self._failed = self._replayable and self._retains is not False and self.first != 0

    def _settle(self, now: float) -> Sequence[Action]:
        """Deliver what can be, see whether something is missing or the waiting is over, and return what to do."""
        self._drain()
        if self._replay is None:
            if not self._held:
                self._give_up_at = inf
            elif not self._is_next_held():
                self._await_missing(now)
        if self._was_filling and not self.filling:
            self._out.append(Resynchronised())
        self._was_filling = self.filling
        return self._take_out()

    def _take_out(self) -> list[Action]:
        out, self._out = self._out, []
        return out
