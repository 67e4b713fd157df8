"""The engines of a simulation, and what can be seen of them from outside."""

from __future__ import annotations

from collections.abc import Callable

from picker.core.endpoints import EngineMetrics
from picker.core.kv_events import events as wire
from picker.sim import events as sim
from picker.sim.engine import Engine, Request, Running, StepOutput
from picker.sim.limits import EngineLimits

LIMITS = EngineLimits(block_size=64, num_gpu_blocks=6001)
"""384,000 tokens of KV cache. Blocks are larger than engines' usual 16 tokens, which costs little and saves much time."""

Publish = Callable[[int, wire.EventBatch, float], None]


class SimulatedEngine:
    """One engine with its number, which is also its slot. From `stuck_at` on it accepts requests and does nothing."""

    def __init__(
        self, number: int, limits: EngineLimits, *, slow: float, stuck_at: float, publish: Publish | None = None
    ) -> None:
        def published(batch: list[sim.KvEvent], now: float) -> None:
            if publish is not None:
                publish(number, wire.EventBatch(now, tuple(map(_as_picker_sees_it, batch))), now)

        self.number = number
        self._stuck_at = stuck_at
        self._engine = Engine(limits, publish=published if publish else None)
        self._engine.slow = slow
        self._since = 0.0
        self._first_tokens = self._first_seconds = 0.0
        self._further_tokens = self._further_seconds = 0.0

    @property
    def idle(self) -> bool:
        """Nothing to do."""
        return not self._engine.running and not self._engine.waiting

    @property
    def waiting(self) -> int:
        """Requests that are not being computed."""
        return self._engine.waiting

    @property
    def requests(self) -> int:
        """Requests here."""
        return self._engine.running + self._engine.waiting

    def stuck(self, now: float) -> bool:
        """Whether it does nothing any more."""
        return now >= self._stuck_at

    def submit(self, request: Request, now: float) -> Running:
        """Queue a request. Raises ValueError when it could never run."""
        return self._engine.submit(request, now)

    def begin(self, now: float) -> float | None:
        """Begin a step; returns when it ends, or None when there is nothing to do."""
        if self.stuck(now):
            return None
        self._since = now
        return self._engine.next_step(now)

    def end(self, now: float) -> StepOutput:
        """End the step and return what it produced."""
        output = self._engine.finish_step(now)
        further = output.tokens - len(output.first)
        self._further_tokens += further
        self._further_seconds += further * (now - self._since)
        for member in output.first:
            self._first_tokens += 1
            self._first_seconds += now - member.arrived
        return output

    def scrape(self) -> EngineMetrics:
        """What its metrics say; the times are means since the scrape before."""
        engine = self._engine
        metrics = EngineMetrics(
            waiting=engine.waiting,
            running=engine.running,
            kv_usage=engine.cache.used / engine.cache.usable,
            ttft=self._first_seconds / self._first_tokens if self._first_tokens else 0.0,
            tpot=self._further_seconds / self._further_tokens if self._further_tokens else 0.0,
            cache_tokens=engine.cache.usable * engine.cache.block_size,
        )
        self._first_tokens = self._first_seconds = self._further_tokens = self._further_seconds = 0.0
        return metrics


def _as_picker_sees_it(event: sim.KvEvent) -> wire.KvEvent:
    if isinstance(event, sim.BlockStored):
        return wire.BlockStored(
            event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, medium=event.medium
        )
    if isinstance(event, sim.BlockRemoved):
        return wire.BlockRemoved(event.block_hashes, medium=event.medium)
    return wire.AllBlocksCleared()
