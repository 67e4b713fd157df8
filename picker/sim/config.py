"""Settings of a served engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from picker.sim.faults import HEALTHY, Fault
from picker.sim.limits import EngineLimits, StepCost
from picker.sim.publisher import KvEventSettings

Flavour = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class EngineSimConfig:
    """One engine and its HTTP face. Raises ValueError when two models have the same name."""

    name: str = "engine-0"
    """Sent as `x-engine` with every response."""
    model: str = "sim"
    loras: tuple[str, ...] = ()
    """Names of LoRA adapters: models of their own, with caches of their own."""
    any_model: bool = False
    """Serve unknown model names as if they were the base model, instead of 404."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    flavour: Flavour = "vllm"
    """Whose metric names are used."""
    limits: EngineLimits = field(default_factory=EngineLimits)
    cost: StepCost = field(default_factory=StepCost)
    max_waiting: int = 1024
    """Requests that may queue; 503 beyond."""
    fault: Fault = HEALTHY
    """What goes wrong from the start."""
    data_parallel_size: int = 1
    """Engines behind this face, each with a cache of its own."""
    kv_events: KvEventSettings | None = None
    """None: nothing is published."""
    grace: float = 5.0
    """Seconds that running requests get when the engine is told to stop."""

    def __post_init__(self) -> None:
        names = (self.model, *self.loras)
        if len(set(names)) < len(names):
            raise ValueError(f"model and LoRA names are {', '.join(names)}: give each its own")
        if not 1 <= self.data_parallel_size <= 1024:
            raise ValueError(f"data_parallel_size is {self.data_parallel_size}: give 1 .. 1024")
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting is {self.max_waiting}: give at least 1")
