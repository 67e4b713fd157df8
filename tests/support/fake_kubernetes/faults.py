"""What can go wrong with an API server, as switches and as things that happen to the next request or to open streams."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Refusal:
    """An answer in the place of the right one. `body` other than None is sent as it is, and is no Status."""

    code: int
    reason: str = "Refused"
    retry_after: int | None = None
    body: str | None = None


@dataclass
class Faults:
    """Nothing goes wrong by default.

    `refusals` are the answers to the next requests. `forbidden` are (verb, plural) that get 403, `tokens` the bearer
    tokens that are taken (None: all). `hangs`: requests get no answer. `mute`: streams are accepted and stay silent.
    `slow` is how many seconds each answer and each frame takes. `expired_as_status`: a watch from a version that is
    gone is answered with 410, and not with an ERROR frame.
    """

    refusals: deque[Refusal] = field(default_factory=deque)
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    tokens: set[str] | None = None
    hangs: bool = False
    mute: bool = False
    slow: float = 0.0
    expired_as_status: bool = False
    bookmarks: bool = True

    def clear(self) -> None:
        """Let all be well again."""
        for name, value in vars(Faults()).items():
            setattr(self, name, value)

    def refuse(self, code: int, times: int = 1, **more: Any) -> None:
        self.refusals.extend(Refusal(code, **more) for _ in range(times))
