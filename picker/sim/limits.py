"""The size and the speed of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long one step takes, in seconds. The defaults resemble a 32B model on one H100-class server.

    Raises ValueError for a cost that is negative, and for a scale or speed that is not positive.
    """

    base: float = 0.016
    """Of any step."""
    per_prefill_token: float = 83e-6
    """Of a prompt token without context."""
    context_scale: float = 40_000
    """Tokens of context that double the cost of a prompt token."""
    per_decode: float = 60e-6
    """Of a generated token."""
    per_context_token: float = 38e-9
    """Of reading one token's keys and values while decoding."""
    speed: float = 1.0
    """Divides everything: 10 is an engine ten times as fast."""

    def __post_init__(self) -> None:
        for name in ("context_scale", "speed"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number")
        for name in ("base", "per_prefill_token", "per_decode", "per_context_token"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number >= 0")

    def prefill(self, chunk: int, computed: int) -> float:
        """Return the cost of `chunk` prompt tokens after `computed` ones."""
        return self.per_prefill_token * chunk * (1 + (computed + chunk / 2) / self.context_scale)

    def step(self, prefill: float, decodes: int, context: int) -> float:
        """Return the length of a step with this prefill work, and `decodes` requests of `context` tokens together."""
        return (self.base + prefill + self.per_decode * decodes + self.per_context_token * context) / self.speed


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes of an engine. Raises ValueError for sizes that cannot work together."""

    block_size: int = 16
    num_gpu_blocks: int = 24_001
    """One of them is the null block."""
    max_num_batched_tokens: int = 8192
    """Tokens computed per step."""
    max_num_seqs: int = 256
    """Requests that run at once."""
    watermark: float = 0.01
    """Share of the blocks that must stay free when a request is admitted beside others."""
    max_model_len: int = 131_072
    """Tokens of prompt and answer together; never more than fit in the pool."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs}: give 1 .. max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}: give a share, 0 <= watermark < 1")

    @property
    def context_length(self) -> int:
        """The longest request, prompt and answer, in tokens."""
        return min(self.max_model_len, (self.num_gpu_blocks - 1) * self.block_size)
