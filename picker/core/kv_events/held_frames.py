"""Frames that wait for those before them."""

from __future__ import annotations

from collections.abc import Callable

from picker.core.kv_events.sequence_actions import Dropped

_OVERHEAD = 128
"""What holding a frame costs besides its payload, in bytes."""


class HeldFrames:
    """Payloads by sequence number, at most `most_bytes` of them; None stands for a frame that arrived damaged."""

    __slots__ = ("_frames", "most_bytes", "used_bytes")

    def __init__(self, most_bytes: int) -> None:
        self._frames: dict[int, bytes | None] = {}
        self.most_bytes = most_bytes
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._frames

    def get(self, sequence: int) -> bytes | None:
        """Return a payload; None when it is not here or damaged."""
        return self._frames.get(sequence)

    def numbers(self) -> frozenset[int]:
        """Return which frames are here."""
        return frozenset(self._frames)

    def put(self, sequence: int, payload: bytes | None) -> Dropped | None:
        """Hold a frame, in place of another one of this number. Returns why not, if it is not held."""
        if sequence in self._frames:
            if self._frames[sequence] == payload:
                return Dropped.DUPLICATE
            self.remove(sequence)
        size = len(payload or b"") + _OVERHEAD
        if self.used_bytes + size > self.most_bytes:
            return Dropped.HELD_FULL
        self._frames[sequence] = payload
        self.used_bytes += size
        return None

    def remove(self, sequence: int) -> None:
        """Let go of a frame, if it is here."""
        if sequence in self._frames:
            self.used_bytes -= len(self._frames.pop(sequence) or b"") + _OVERHEAD

    def remove_where(self, unwanted: Callable[[int], bool]) -> int:
        """Let go of the frames whose number is unwanted. Returns how many."""
        numbers = [sequence for sequence in self._frames if unwanted(sequence)]
        for sequence in numbers:
            self.remove(sequence)
        return len(numbers)

    def run_after(self, sequence: int) -> int:
        """Return the number after the unbroken run of sound frames that begins with `sequence`."""
        while self._frames.get(sequence) is not None:
            sequence += 1
        return sequence

    def newest_run(self) -> int:
        """Return the first number of the unbroken run of sound frames that ends with the newest one."""
        start = max(self._frames) + 1
        while self._frames.get(start - 1) is not None:
            start -= 1
        return start

    def clear(self) -> None:
        """Let go of all."""
        self._frames.clear()
        self.used_bytes = 0
