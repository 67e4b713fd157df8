"""The small protocols that plugins implement, and the values that pass between them and the scheduler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from picker.core.arrays import Flags, Floats, Integers, Slots
from picker.core.endpoint_table import EndpointTable
from picker.core.exchange.effects import Decide
from picker.core.prompts import Prompt
from picker.core.usage import Usage


class Rng(Protocol):
    """The part of `random.Random` that decisions use."""

    def random(self) -> float: ...


def sample(population: list[int], count: int, rng: Rng) -> list[int]:
    """Take `count` of the population by chance, in random order. Uses up the list; a third of `random.sample`'s cost."""
    size = len(population)
    for at in range(count):
        other = at + int(rng.random() * (size - at))
        population[at], population[other] = population[other], population[at]
    return population[:count]


class Request(Struct, frozen=True, gc=False):
    """What a decision knows about a request.

    `prepared` is what was found out for producers before the decision, by the names that they know it by. `started` and
    `parsed` are what the timer said before and after the request was read, in nanoseconds. `body_bytes` over
    `bytes_per_token` is how many tokens it has where nobody knows better.
    """

    request_id: str
    path: str
    prompt: Prompt
    prepared: Mapping[str, Any] = {}
    started: int = 0
    parsed: int = 0
    body_bytes: int = 0
    bytes_per_token: float = 4.0
    session: str = ""
    """The key that its sticky session is bound under; "" when it has none, or sessions do not stick."""

    @property
    def now(self) -> float:
        """When it came, in seconds of the same monotonic clock."""
        return self.started / 1e9


class Work(NamedTuple):
    """How much prefill a request means to each candidate, on one scale, in tokens.

    `prompt` is the length of the prompt, `uncached` what each candidate lacks of it (at least 1), `source` the producer
    whose match says so, or "length" when none does.
    """

    prompt: float
    uncached: Floats
    source: str


class Candidates(Struct, frozen=True, gc=False):
    """The endpoints still in the race. Arrays that plugins return have one entry for each of `slots`.

    `work` is there for scorers of a scheduler that counts it, `costs`, in tokens, where one of them has a formula for it.
    """

    table: EndpointTable
    slots: Slots
    mask: int
    work: Work | None = None
    costs: Floats | None = None


class MatchInfo(NamedTuple):
    """How much of the prompt each candidate holds: leading `matched` of `total` units, by candidate.

    `tokens_per_unit` and `prompt_tokens`, the length of the whole prompt, measure the same on the scale of tokens.
    """

    matched: Integers
    total: int
    unit: str
    tokens_per_unit: float = 1.0
    prompt_tokens: float = 0.0


class Filter(Protocol):
    """Removes candidates that must not be picked."""

    name: str

    def keep(self, request: Request, candidates: Candidates) -> Flags | None:
        """True for candidates that stay; None when all do."""


class MatchFilter(Protocol):
    """A filter that goes by what a producer matched. It never refuses a request: when it keeps nobody, all stay."""

    name: str
    producer: str | None
    """The producer whose match it goes by; None for the one that knows most."""

    def keep_matched(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Flags | None:
        """True for candidates that stay; None when all do."""


class Prober(Protocol):
    """A filter that wants a request sent to a certain candidate now and then, to see whether it can be kept again."""

    def probe(self, request: Request, candidates: Candidates) -> int | None:
        """The slot of a candidate that this request is to try first, if there is one."""


class Preparation(Protocol):
    """Finds out what producers need to know of a request, where that takes waiting: its tokens, for example."""

    def begin(self, asked: Decide, request: Request, seconds: float) -> Awaitable[Mapping[str, Any]] | None:
        """Return what will give `Request.prepared`; None when there is nothing to find out.

        It gives what is there after `seconds` at the latest, never raises, and may be cancelled.
        """


class Producer(Protocol):
    """Knows which endpoint holds which prompt, and learns from picks."""

    name: str

    def match(self, request: Request, candidates: Candidates, rng: Rng) -> Match | None:
        """Match the prompt against every candidate; None when there is no prompt to match."""

    def reconfigure(self, args: Any) -> bool:
        """Take new arguments over; False when what was known had to go."""

    def forget(self, slot: int) -> None:
        """The slot's endpoint is gone."""

    def restarted(self, slot: int) -> None:
        """Metrics say that the slot's engine restarted with an empty cache."""

    def adopt(self, slot: int, shared: bytes, now: float) -> Learning | None:
        """Make a pick visible that another picker made, by its `Match.shared`; None when there is nothing in it.

        The bytes come over a network: what is wrong with them must not do more harm than a wrong match.
        """


class Match(Protocol):
    """One prompt's match, kept so that the pick can be recorded without matching again."""

    @property
    def info(self) -> MatchInfo: ...

    def picked(self, slot: int) -> Learning:
        """Make the pick visible to the next decision, until it is confirmed or undone."""

    def shared(self, slot: int) -> bytes:
        """What `Producer.adopt` of another picker needs to make a pick of this slot visible there; empty for nothing."""


class Learning(Protocol):
    """A pick on its way. Exactly one of the two is called, once.

    What other pickers are to know of its end, a learning may tell by `told() -> (producer, bytes) | None` once it is
    confirmed; theirs, from `Producer.adopt`, then is given these bytes by `hear(bytes)` before it is confirmed.
    """

    def confirm(self, slot: int | None, usage: Usage | None = None) -> None:
        """The request succeeded on this slot; None: on an endpoint that is gone or was never ours.

        `usage` is what the engine said of it, where its response was read.
        """

    def undo(self) -> None:
        """The request failed."""


class Scorer(Protocol):
    """Rates candidates 0..100."""

    name: str
    producer: str | None
    """The producer whose match it rates, if it rates one."""

    def score(self, request: Request, candidates: Candidates, match: MatchInfo | None, rng: Rng) -> Floats | None:
        """One score a candidate; None for no opinion, which counts 0 for all."""


class Remembering(Protocol):
    """A scorer that goes by where requests went before."""

    def routed(self, address: str, work: Work) -> None:
        """A request goes to this endpoint, and means so much prefill to its candidates."""


class Costing(Protocol):
    """Turns work and load into the cost of each candidate, in tokens; lowest is best. The `formula` of a scorer."""

    def costs(self, uncached: Floats, queued: Floats, in_flight: Integers) -> Floats: ...

    def slowness(self, rates: Floats) -> Floats | None:
        """What costs are multiplied with, by rates of prefill; None for nothing."""


Timer = Callable[[], int]
"""A monotonic clock in nanoseconds, for measuring the steps of a decision."""
