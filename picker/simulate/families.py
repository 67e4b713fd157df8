"""Kinds of traffic, made from a seed: shared system prompts, conversations, agents, documents, bursts and mixtures.

They and their capacities are those of a simulation study of routing policies. F10 and F11 were never used there to
choose a policy. Capacity is the highest rate, in requests a second for eight engines, at which the best of six policies
kept the 90th percentile of the time to first token within 2 s (F3 6 s, F4 5 s, F7 4 s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.random import Generator

from picker.simulate.workload import Call, FreshTokens, Session, Workload

FLEET = 8
"""Engines that capacities are for."""
BURST = 64

_ANSWER_SIGMA = 0.6
_TURN_SIGMA = 0.7
_UNIQUE_SIGMA = 0.9
"""Of lognormal lengths. They are fitted: with them, times are near those that the study reports."""
_LONGEST_CONTEXT = 100_000


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of traffic. `sessions(maker, rate)` yields them in any order, at `rate` requests a second."""

    summary: str
    capacity: float | None
    """Requests a second for `FLEET` engines; None where all come at once."""
    sessions: Callable[[_Maker, float], Iterator[Session]]
    seconds: float = 240.0
    warm: float = 80.0
    """Seconds at the beginning that are not measured."""
    slow: tuple[tuple[int, float], ...] = ()


def generate(
    name: str, *, load: float | None, engines: int, seed: int, seconds: float | None = None, requests: int | None = None
) -> Workload:
    """Make a workload of a family at `load`, a share of the capacity of so many engines, for families that have one.

    It lasts `seconds`, or as long as `requests` take at its rate; a third of other lengths than the family's own is
    warming up. Raises KeyError for an unknown family.
    """
    family = FAMILIES[name]
    rate = (family.capacity or 0.0) * (load or 0.0) * engines / FLEET
    length, warm = family.seconds, family.warm
    if requests is not None and rate:
        length = requests / rate
        warm = length / 3
    elif seconds is not None and rate:
        length, warm = seconds, seconds * family.warm / family.seconds
    maker = _Maker(np.random.default_rng([seed, *name.encode()]), length)
    sessions = sorted(family.sessions(maker, rate), key=lambda session: session.start)
    slow = {engine: factor for engine, factor in family.slow if engine < engines}
    return Workload(name, sessions, warm, length, slow)


class _Maker:
    """Draws the parts of sessions."""

    def __init__(self, rng: Generator, seconds: float) -> None:
        self.rng = rng
        self.seconds = seconds
        self.fresh = FreshTokens().take

    def arrivals(self, rate: float) -> list[float]:
        """Times of a Poisson process up to the end."""
        count = self.rng.poisson(rate * self.seconds)
        times: list[float] = np.sort(self.rng.uniform(0.0, self.seconds, count)).tolist()
        return times

    def uniform(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high, endpoint=True))

    def lognormal(self, median: float, sigma: float, most: int = _LONGEST_CONTEXT) -> int:
        """A length of tokens, 1 .. `most`."""
        return min(max(round(float(self.rng.lognormal(log(median), sigma))), 1), most)

    def repeats(self, mean: float) -> int:
        """How often, geometric, at least once."""
        return int(self.rng.geometric(1 / mean))

    def pause(self, mean: float) -> float:
        return float(self.rng.exponential(mean))

    def single(self, start: float, prompt: tuple[range, ...], answer: int) -> Session:
        return Session(start, (Call(prompt, self.fresh(answer)),))


def _shared_prompts(groups: int, exponent: float, tokens: int = 6000) -> Callable[[_Maker, float], Iterator[Session]]:
    def sessions(maker: _Maker, rate: float) -> Iterator[Session]:
        prompts = [maker.fresh(tokens) for _ in range(groups)]
        weights: Any = np.arange(1, groups + 1) ** -exponent
        times = maker.arrivals(rate)
        chosen = maker.rng.choice(groups, len(times), p=weights / weights.sum()).tolist()
        for start, group in zip(times, chosen, strict=True):
            question = maker.fresh(maker.uniform(1100, 1300))
            yield maker.single(start, (prompts[group], question), maker.uniform(200, 1000))

    return sessions


def _conversation(
    maker: _Maker, start: float, opening: tuple[range, ...], turns: int, turn: Callable[[], tuple[int, int, float]]
) -> Session:
    """Calls that each repeat all that was said; `turn` gives new tokens, tokens of the answer, and the pause before."""
    said, length = opening, sum(map(len, opening))
    calls: list[Call] = []
    for number in range(turns):
        tokens, answer, pause = turn()
        length += tokens + answer
        if length > _LONGEST_CONTEXT and calls:
            break
        said = (*said, maker.fresh(tokens))
        calls.append(Call(said, maker.fresh(answer), pause if number else 0.0))
        said = (*said, calls[-1].answer)
    return Session(start, tuple(calls))


def _chat(maker: _Maker, rate: float) -> Iterator[Session]:
    systems = [maker.fresh(1000) for _ in range(4)]

    def turn() -> tuple[int, int, float]:
        long = maker.rng.random() < 0.1
        return maker.lognormal(2500 if long else 150, _TURN_SIGMA), maker.lognormal(250, _ANSWER_SIGMA), maker.pause(15)

    for start in maker.arrivals(rate / 6):
        yield _conversation(maker, start, (systems[maker.uniform(0, 3)],), maker.repeats(6), turn)


def _agents(maker: _Maker, rate: float) -> Iterator[Session]:
    tools = [maker.fresh(8000) for _ in range(5)]

    def turn() -> tuple[int, int, float]:
        return maker.lognormal(1500, _TURN_SIGMA), maker.lognormal(120, _ANSWER_SIGMA), maker.pause(3)

    for start in maker.arrivals(rate / 20):
        opening = (tools[maker.uniform(0, 4)], maker.fresh(maker.uniform(6000, 24_000)))
        yield _conversation(maker, start, opening, maker.repeats(20), turn)


def _documents(maker: _Maker, rate: float) -> Iterator[Session]:
    instructions = maker.fresh(500)
    for start in maker.arrivals(rate / 4):
        document = maker.fresh(maker.uniform(8000, 20_000))
        due = start
        for _ in range(maker.repeats(4)):
            question = maker.fresh(maker.uniform(50, 350))
            yield maker.single(due, (instructions, document, question), maker.uniform(100, 400))
            due += maker.pause(15)


def _unique(maker: _Maker, rate: float) -> Iterator[Session]:
    for start in maker.arrivals(rate):
        prompt = maker.fresh(maker.lognormal(1500, _UNIQUE_SIGMA, 16_000))
        yield maker.single(start, (prompt,), maker.lognormal(250, _ANSWER_SIGMA))


def _one_prefix(maker: _Maker, rate: float) -> Iterator[Session]:
    prefix = maker.fresh(10_000)
    for start in maker.arrivals(rate):
        yield maker.single(start, (prefix, maker.fresh(maker.uniform(200, 400))), maker.uniform(200, 600))


def _fan_outs(maker: _Maker, rate: float) -> Iterator[Session]:
    for start in maker.arrivals(rate * 0.75 / 40):
        prefix = maker.fresh(maker.uniform(6000, 12_000))
        for _ in range(maker.uniform(16, 64)):
            due = start + float(maker.rng.uniform(0, 0.02))
            yield maker.single(due, (prefix, maker.fresh(maker.uniform(200, 400))), maker.uniform(100, 300))
    yield from _unique(maker, rate * 0.25)


def _mixture(maker: _Maker, rate: float) -> Iterator[Session]:
    yield from _shared_prompts(60, 0.8)(maker, rate * 0.35)
    yield from _chat(maker, rate * 0.25)
    yield from _agents(maker, rate * 0.15)
    yield from _unique(maker, rate * 0.25)


def _burst(maker: _Maker, rate: float) -> Iterator[Session]:  # noqa: ARG001  all at once, at any rate
    prefix = maker.fresh(10_000)
    for _ in range(BURST):
        yield maker.single(0.0, (prefix, maker.fresh(maker.uniform(200, 400))), maker.uniform(200, 600))


FAMILIES = {
    "F1": Family("150 system prompts of 6,000 tokens, some more popular", 19.7, _shared_prompts(150, 0.8)),
    "F2": Family("chats of 6 turns", 71.3, _chat),
    "F3": Family("agents, 20 calls of up to 100,000 tokens", 5.9, _agents, 420.0, 150.0),
    "F4": Family("questions about documents of 8,000 to 20,000 tokens", 11.4, _documents),
    "F5": Family("unique prompts", 29.1, _unique),
    "F6": Family("one prefix of 10,000 tokens for all", 35.2, _one_prefix),
    "F7": Family("fan-outs of 16 to 64 requests with one new prefix, and unique prompts", 42.9, _fan_outs),
    "F8": Family("a mixture of F1, F2, F3 and F5", 19.7, _mixture, 300.0, 100.0),
    "F9": Family("F1, with one engine half as fast", 18.8, _shared_prompts(150, 0.8), slow=((0, 2.0),)),
    "F10": Family("F1 with 40 system prompts, which fit into every engine", 22.2, _shared_prompts(40, 0.8)),
    "F11": Family("F1 with 600 system prompts, more than fit into all engines", 13.1, _shared_prompts(600, 0.6)),
    "burst": Family("64 requests at once with one new prefix of 10,000 tokens", None, _burst, 30.0, 0.0),
}
