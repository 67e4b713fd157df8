"""Work that no answer waits for."""

from __future__ import annotations

from collections.abc import Callable

Later = Callable[[Callable[[], None]], object]
"""Runs a function some time after the current callback of the event loop, as its `call_soon` does."""


class Afterwards:
    """Does work in batches, in order, once the answers of the moment are on their way.

    `later` says when; without it, work is done at once. No more than `most` pieces of work wait. What is added must not
    raise.
    """

    __slots__ = ("_due", "_later", "_most", "_waiting")

    def __init__(self, later: Later | None = None, *, most: int = 1000) -> None:
        self._later = later
        self._most = most
        self._waiting: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._due = False

    def add(self, act: Callable[..., None], *args: object) -> None:
        """Call `act` with these arguments later."""
        if self._later is None:
            act(*args)
            return
        waiting = self._waiting
        waiting.append((act, args))
        if not self._due:
            self._due = True
            self._later(self._come)
        elif len(waiting) >= self._most:
            self.run()

    def run(self) -> None:
        """Do now what waits."""
        waiting, self._waiting = self._waiting, []
        for act, args in waiting:
            act(*args)

    def _come(self) -> None:
        self._due = False
        self.run()
