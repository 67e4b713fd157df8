"""Work that no answer waits for."""

from __future__ import annotations

from collections.abc import Callable


class Afterwards:
    """Does work in batches, in order, once the answers of the moment are on their way.

    `soon` runs a function after the current callback of the event loop, such as its `call_soon`; left out, work is done
    at once. What is added must not raise.
    """

    __slots__ = ("_soon", "_waiting")

    def __init__(self, soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._soon = soon
        self._waiting: list[tuple[Callable[..., None], tuple[object, ...]]] = []

    def add(self, act: Callable[..., None], *args: object) -> None:
        """Call `act` with these arguments, soon."""
        if self._soon is None:
            act(*args)
            return
        if not self._waiting:
            self._soon(self._run)
        self._waiting.append((act, args))

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for act, args in waiting:
            act(*args)
