"""Where an engine's KV events come from, how to follow them, and who applies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from picker.core.kv_events.events import EventBatch
from picker.core.kv_events.sequence_limits import SequenceLimits
from picker.io.kv_events.frames import endpoint_of_rank


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where one engine publishes. Raises ValueError when a rank cannot have an endpoint."""

    endpoint: str
    """Of rank 0, `tcp://host:port`."""
    replay_endpoint: str | None = None
    """Of rank 0. Without it every lost frame, and every lost connection, leaves the engine's blocks unknown."""
    topic: str = ""
    """What topics must begin with."""
    exact_topic: bool = False
    """Whether topics must be `topic`, not only begin with it."""
    ranks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 1024:
            raise ValueError(f"ranks is {self.ranks}: give 1 .. 1024")
        for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
            for rank in {0, self.ranks - 1}:
                endpoint_of_rank(endpoint, rank)


class KvEventHandler(Protocol):
    """Applies events. Methods are called in order on the event loop, and should take less than a millisecond."""

    def on_batch(self, batch: EventBatch, rank: int) -> None:
        """Apply a batch."""

    def on_restart(self, rank: int) -> None:
        """Forget all blocks of the rank. All it holds follows: its engine restarted, or is replayed from the first."""

    def on_incomplete(self, rank: int, since: int) -> None:
        """Forget all blocks of the rank. Batches from number `since` on follow, and what was before stays unknown."""


@dataclass(frozen=True, slots=True)
class SubscriberSettings:
    """How to subscribe. Times in seconds."""

    limits: SequenceLimits = field(default_factory=SequenceLimits)
    reconnect: float = 0.1
    """First pause before connecting again, with jitter; it doubles up to `reconnect_most`."""
    reconnect_most: float = 5.0
    high_water_mark: int = 100_000
    """Frames that wait in the socket."""
