"""Work that no answer waits for."""

from __future__ import annotations

from collections.abc import Callable

Failed = Callable[[BaseException], object]
"""Told what a piece of work has raised."""

Later = Callable[[Callable[[], None]], object]
"""Runs a function some time after the current callback of the event loop, as its `call_soon` does."""


class Afterwards:
    """Does work in batches, in order, once the answers of the moment are on their way.

    `later` says when; without it, work is done at once. No more than `most` pieces of work wait. A piece that raises
    stops no other: `failed` is told.
    """

    __slots__ = ("_due", "_failed", "_later", "_most", "_waiting")

    def __init__(self, failed: Failed, later: Later | None = None, *, most: int = 1000) -> None:
        self._failed = failed
        self._later = later
        self._most = most
        self._waiting: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._due = False

    def add(self, act: Callable[..., None], *args: object) -> None:
        """Call `act` with these arguments later."""
        if self._later is None:
            self._do(act, args)
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
            self._do(act, args)

    def _do(self, act: Callable[..., None], args: tuple[object, ...]) -> None:
        try:
            act(*args)
        except Exception as error:  # noqa: BLE001  it may stand for other requests than those that come after it
            self._failed(error)

    def _come(self) -> None:
        self._due = False
        self.run()
