"""Another picker as it is known here, and its requests on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from picker.core.director import Director
from picker.core.scheduling.api import Learning
from picker.core.sharing.messages import Batch
from picker.core.tickets import Load


class RemotePick(Load):
    """A request that another picker sent."""

    __slots__ = ("_learnings",)

    def __init__(
        self, director: Director, slot: int, tokens: float, learnings: Sequence[tuple[str, Learning]], now: float
    ) -> None:
        super().__init__(director.table, slot, tokens, now)
        self._learnings = learnings

    def prefilled(self, now: float) -> None:
        """Its prompt is computed."""
        self._computed()
        if self._alive:
            self._sign(now)

    def end(self, served: int | None, now: float, told: Sequence[tuple[str, bytes]] = (), *, well: bool) -> None:
        """It is over: its prompt is held by the slot that served it. Producers were told more of it, by name."""
        self._leave(now, well=well)
        for name, learning in self._learnings:
            if not well:
                learning.undo()
                continue
            if told and (hear := getattr(learning, "hear", None)) is not None:
                for producer, shared in told:
                    if producer == name:
                        hear(shared)
            learning.confirm(served)


@dataclass
class Peer:
    """Another picker. `sequence` is that of its last batch that was taken."""

    sequence: int
    heard_at: float
    picks: dict[int, RemotePick | None] = field(default_factory=dict)
    asked_at: float | None = None
    """While an answer is missing."""
    warm: bool = False
    """Whether it is to tell all that it knows of prompts, and has not yet."""
    warmed_at: float = 0.0
    """When it told the last piece of that, or was asked for it."""
    pieces: int = 0
    """Number of the next piece."""
    missed: bool = False
    """Whether one before it was missing."""
    held: deque[Batch] = field(default_factory=deque)
