"""What an engine remembers of its answers on /v1/responses, so that later requests can name them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from picker.sim.openai import ApiError, Turn

MOST_RESPONSES = 10_000


class ResponseStore:
    """Conversations up to and with an answer, by the answer's id. Those stored first go first."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[Turn, ...]] = OrderedDict()

    def turns(self, identity: str | None) -> tuple[Turn, ...]:
        """Return the turns before a request that names this answer. Raises ApiError where it is not here."""
        if identity is None:
            return ()
        found = self._turns.get(identity)
        if found is None:
            raise ApiError(404, "NotFoundError", f"Response with id '{identity}' not found.", "previous_response_id")
        return found

    def keep(self, identity: str, turns: Sequence[Turn], answer: str) -> None:
        """Remember an answer, and the turns that it answers."""
        self._turns[identity] = (*turns, ("assistant", answer))
        while len(self._turns) > MOST_RESPONSES:
            self._turns.popitem(last=False)

    def clear(self) -> None:
        """Forget all, as a new process has."""
        self._turns.clear()
