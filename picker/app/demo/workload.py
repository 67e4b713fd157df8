"""What the demo sends: conversations on shared system prompts, planned from a seed before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

BYTES_PER_TOKEN = 4
"""Of the simulated engine: a word of three letters and a space is one token."""
BLOCK_TOKENS = 16
"""Tokens in a KV block of the simulated engine."""

_WORDS = (  # noqa: SIM905  a list of them would be a page long
    "act air arm art bar bat bed bit bow bus cap cup cut dry due ear egg eye fan fit fix fog fox gap gas hat hen ice "
    "ink jam jar jet kit lab leg lip log mud net nut oak oil owl pan pen pet pie pin pot rib rod rug sea sky tap toe"
).split()


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the workload and of the caches it meets; counts and rates are for one engine.

    The defaults are the regime in which routing matters on real fleets: system prompts that are long beside what is
    asked, more of them than one engine's cache can hold but not more than all caches together, and arrivals that
    keep round robin near saturation. With one system prompt, or caches that hold everything, all policies are alike.
    """

    prompts: int = 6
    """System prompts. Some are asked for more than others: number k with weight 1 / sqrt(k)."""
    prompt_tokens: int = 4_000
    requests_per_second: float = 7.0
    mean_turns: float = 3.0
    """Of a conversation; the number of turns is geometric, at most `most_turns`."""
    most_turns: int = 10
    think_seconds: float = 2.0
    """Mean time between an answer and the next question, exponential."""
    question_tokens: int = 120
    """Median length of a question, lognormal with sigma 0.8, at most ten times as long."""
    answer_tokens: tuple[int, int] = (20, 60)
    """Shortest and longest answer, uniform."""
    cache_tokens: int = 40_000
    """KV cache of one engine."""
    speed: float = 2.0
    """How many times as fast as the simulated engine's defaults, a 32B model on one H100-class server."""

    @property
    def cache_blocks(self) -> int:
        """KV blocks of one engine, with the null block that it cannot use."""
        return self.cache_tokens // BLOCK_TOKENS + 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One question. It is asked `think` seconds after the answer before it has ended."""

    think: float
    question: str
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation: when it starts, in seconds, on which system prompt, and all that will be asked."""

    start: float
    prompt: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that is sent, the same for both arms."""

    prompts: tuple[str, ...]
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return sum(len(session.turns) for session in self.sessions)


def plan(shape: Shape, *, engines: int, seconds: float, seed: int) -> Workload:
    """Plan the workload of a fleet; equal arguments give equal workloads.

    Sessions arrive by a Poisson process. Questions that could not be asked within `seconds` even if every answer
    took no time are left out, so that both arms send exactly the same requests.
    """
    rng = random.Random(seed)
    prompts = [
        f"You are assistant {number}. {_text(rng, shape.prompt_tokens)}" for number in range(shape.prompts * engines)
    ]
    weights = list(accumulate((number + 1) ** -0.5 for number in range(len(prompts))))
    sessions = []
    arrivals = engines * shape.requests_per_second / shape.mean_turns
    start = rng.expovariate(arrivals)
    while start < seconds:
        (prompt,) = rng.choices(range(len(prompts)), cum_weights=weights)
        sessions.append(Session(start, prompt, _turns(shape, rng, seconds - start)))
        start += rng.expovariate(arrivals)
    return Workload(tuple(prompts), tuple(sessions))


def _turns(shape: Shape, rng: random.Random, remaining: float) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    think = 0.0
    while think < remaining and len(turns) < shape.most_turns:
        remaining -= think
        tokens = min(int(shape.question_tokens * rng.lognormvariate(0, 0.8)) + 1, 10 * shape.question_tokens)
        turns.append(Turn(think, _text(rng, tokens), rng.randint(*shape.answer_tokens)))
        if rng.random() < 1 / shape.mean_turns:
            break
        think = rng.expovariate(1 / shape.think_seconds)
    return tuple(turns)


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choices(_WORDS, k=tokens))
