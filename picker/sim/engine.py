"""The engine model: continuous batching over a paged prefix cache, with a latency for every step.

Pure: time is a parameter and nothing here waits, so the same engine runs behind a server in real time and in a
simulation as fast as it can compute. A caller alternates

    end = engine.next_step(now)      # schedules; None when there is nothing to do
    output = engine.finish_step(end)

and may `submit` and `abort` in between. What a request will generate is part of the request: the engine only decides
when. The scheduling rules are those of vLLM V1 with chunked prefill.

All requests that decode advance by one token in every step, so their positions are not touched each step: a decoding
request has `steps + offset` tokens, and is visited only in the steps in which it needs a block, fills one, or ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from picker.sim.block_cache import BlockCache, KeyedTokens
from picker.sim.events import KvEvent
from picker.sim.limits import EngineLimits, StepCost


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the answer it will get."""

    id: str
    content: KeyedTokens
    """Prompt and answer, one after the other."""
    prompt_tokens: int
    read_cache: bool = True
    """False: compute everything, as an engine must for `prompt_logprobs`."""
    transferred: bool = False
    """Another engine has computed the prompt: all but the last token come from there when the request is admitted."""


@dataclass(eq=False, slots=True)
class Running:
    """A request inside the engine. `cached_tokens` is fixed when it is first scheduled, as engines report it."""

    request: Request
    arrived: float
    total: int
    """Tokens when it ends."""
    length: int
    """Tokens that are known while it does not decode: the prompt, and after a preemption also what was generated."""
    cached_tokens: int | None = None
    order: int = 0
    """Admission number: the order of the running list."""
    table: list[int] = field(default_factory=list)
    computed: int = 0
    stored: int = 0
    """Blocks of the table that are readable in the cache."""
    offset: int | None = None
    """While it decodes: its tokens minus the engine's steps."""
    visit: int = 0
    """While it decodes: the next step in which it needs attention."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced. Every request that decodes got one token: see `Engine.generated`."""

    end: float
    first: tuple[Running, ...]
    """Requests that got their first token."""
    finished: tuple[Running, ...]
    tokens: int
    """Tokens generated, first ones included."""


class Engine:
    """One engine. `publish` gets the cache events of a step together when the step ends, with the time.

    A reset of the cache is published with the next step, as real engines do.
    """

    def __init__(
        self,
        limits: EngineLimits | None = None,
        cost: StepCost | None = None,
        publish: Callable[[list[KvEvent], float], None] | None = None,
    ) -> None:
        self.limits = limits or EngineLimits()
        self.cost = cost or StepCost()
        self.slow = 1.0
        """Multiplies the length of every step from now on."""
        self.steps = 0
        self.preemptions = 0
        self.prefix_queries = 0
        """Prompt tokens looked up in the cache."""
        self.prefix_hits = 0
        """Prompt tokens found there."""
        self.transferred = 0
        """Prompt tokens that came from another engine."""
        self._publish = publish
        self._events: list[KvEvent] = []
        self.cache = BlockCache(
            self.limits.num_gpu_blocks, self.limits.block_size, None if publish is None else self._events.append
        )
        self._reserve = self.limits.watermark * self.cache.usable
        self._waiting: OrderedDict[str, Running] = OrderedDict()
        self._running: dict[str, Running] = {}  # in admission order
        self._prefilling: dict[str, Running] = {}
        self._visits: dict[int, dict[str, Running]] = {}  # step -> decoding requests that need attention in it
        self._decoding = 0
        self._offsets = 0  # sum over the decoding requests
        self._admitted = 0
        self._stepping = False
        self._chunks: list[tuple[Running, int]] = []
        self._ending: list[Running] = []

    @property
    def running(self) -> int:
        """Requests being computed."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests not yet admitted, or preempted."""
        return len(self._waiting)

    def adapters(self) -> tuple[set[str], set[str]]:
        """Return the LoRA adapters of the running and of the waiting requests."""

        def names(group: Iterable[Running]) -> set[str]:
            return {member.request.content.lora_name for member in group} - {None}  # type: ignore[return-value]

        return names(self._running.values()), names(self._waiting.values())

    def generated(self, member: Running) -> int:
        """Return how many tokens of its answer a request has by now."""
        length = member.length if member.offset is None else self.steps + member.offset
        return length - member.request.prompt_tokens

    def submit(self, request: Request, now: float) -> Running:
        """Queue a request. Raises ValueError when it could never run, or its id is in use."""
        total = len(request.content.tokens)
        if request.content.block_size != self.limits.block_size:
            raise ValueError(f"block_size is {request.content.block_size}: this engine has {self.limits.block_size}")
        if not 1 <= request.prompt_tokens < total:
            raise ValueError(
                f"prompt_tokens is {request.prompt_tokens} of {total}: prompt and answer need one token each"
            )
        if total > self.limits.context_length:
            raise ValueError(
                f"prompt and answer have {total} tokens: the longest request is {self.limits.context_length}"
            )
        if request.id in self._running or request.id in self._waiting:
            raise ValueError(f"id is {request.id!r}: it is in use, give every request its own")
        member = Running(request, now, total, request.prompt_tokens)
        self._waiting[request.id] = member
        return member

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks. Returns False when there is no such request any more."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        member = self._running.get(request_id)
        if member is None:
            return False
        self._leave(member)
        return True

    def reset_prefix_cache(self) -> bool:
        """Empty the cache. Does nothing and returns False while requests hold blocks."""
        return self.cache.reset()

    def next_step(self, now: float) -> float | None:
        """Schedule the next step and return when it ends; None when no request is here."""
        if self._stepping:
            raise RuntimeError("the last step is not finished: call finish_step first")
        if not self._running and not self._waiting:
            return None
        preempted = self._decode()
        budget = self.limits.max_num_batched_tokens - self._decoding
        for member in self._prefilling.values():
            budget -= self._prefill(member, budget)
        while not preempted and budget > 0 and len(self._running) < self.limits.max_num_seqs:
            admitted = self._admit()
            if admitted is None:
                break
            budget -= self._prefill(admitted, budget)
        self._stepping = True
        prefill = sum(self.cost.prefill(chunk, member.computed) for member, chunk in self._chunks)
        context = self._decoding * self.steps + self._offsets
        return now + self.slow * self.cost.step(prefill, self._decoding, context)

    def finish_step(self, now: float) -> StepOutput:
        """End the step that `next_step` scheduled and return what it produced."""
        if not self._stepping:
            raise RuntimeError("no step is under way: call next_step first")
        self._stepping = False
        self.steps += 1
        tokens = self._decoding
        finished = [member for member in self._ending if member.offset is not None]
        for member in finished:
            self._leave(member)
        first = []
        for member, chunk in self._chunks:
            if member.request.id not in self._prefilling:
                continue  # aborted meanwhile
            member.computed += chunk
            if member.computed < member.length:
                continue
            del self._prefilling[member.request.id]
            tokens += 1
            if member.length == member.request.prompt_tokens:
                first.append(member)
            member.length += 1
            if member.length == member.total:
                self._leave(member)
                finished.append(member)
            else:
                self._start_decoding(member)
        self._chunks.clear()
        self._ending.clear()
        if self._publish is not None and self._events:
            batch = self._events.copy()
            self._events.clear()
            self._publish(batch, now)
        return StepOutput(now, tuple(first), tuple(finished), tokens)

    def _admit(self) -> Running | None:
        """Admit the head of the queue if there is room for all it knows; nobody overtakes it."""
        if not self._waiting:
            return None
        member = next(iter(self._waiting.values()))
        keys = member.request.content.keys
        hit = self.cache.match(keys, member.length) if member.request.read_cache else []
        missing = -(-member.length // self.limits.block_size) - len(hit)
        left = self.cache.free - missing - self.cache.unreferenced(hit)
        if left < (self._reserve if self._running else 0):
            return None
        del self._waiting[member.request.id]
        self.cache.reference(hit)
        member.table = hit + self.cache.allocate(missing)
        member.stored = len(hit)
        member.computed = len(hit) * self.limits.block_size
        if member.cached_tokens is None:
            member.cached_tokens = member.computed
            self.prefix_queries += member.length
            self.prefix_hits += member.computed
            self._receive(member)
        self._admitted += 1
        member.order = self._admitted
        self._running[member.request.id] = member
        self._prefilling[member.request.id] = member
        return member

    def _receive(self, member: Running) -> None:
        """Take over what another engine has computed; a request that is preempted loses it like its own."""
        most = member.request.prompt_tokens - 1
        if member.request.transferred and member.computed < most:
            self.transferred += most - member.computed
            member.computed = most
            self._store(member, most)

    def _prefill(self, member: Running, budget: int) -> int:
        """Schedule a chunk of a prompt; its full blocks can be hit from now on. Returns the tokens it has."""
        chunk = min(budget, member.length - member.computed)
        self._chunks.append((member, chunk))
        self._store(member, member.computed + chunk)
        return chunk

    def _decode(self) -> bool:
        """Give the decoding requests the blocks they need in this step. Returns whether one had to be preempted."""
        before = self.preemptions
        for member in sorted(self._visits.pop(self.steps, {}).values(), key=lambda member: member.order):
            if member.offset is None:
                continue  # preempted for a request before it
            length = self.steps + member.offset
            missing = -(-length // self.limits.block_size) - len(member.table)
            while missing > self.cache.free and member.offset is not None:
                self._preempt(next(reversed(self._running.values())))
            if member.offset is None:
                continue
            member.table += self.cache.allocate(missing)
            self._store(member, length)
            if length == member.total - 1:
                self._ending.append(member)
            else:
                self._plan_visit(member, self.steps + 1)
        return self.preemptions > before

    def _store(self, member: Running, length: int) -> None:
        full = length // self.limits.block_size
        if full > member.stored:
            self.cache.store(member.table, member.request.content, member.stored, full)
            member.stored = full

    def _start_decoding(self, member: Running) -> None:
        member.offset = member.length - self.steps
        self._decoding += 1
        self._offsets += member.offset
        self._plan_visit(member, self.steps)

    def _plan_visit(self, member: Running, step: int) -> None:
        """Plan the first visit in `step` or later: where a block begins or gets full, and at the last token."""
        assert member.offset is not None  # noqa: S101 - only decoding requests are visited
        beyond = (step + member.offset) % self.limits.block_size
        if beyond > 1:
            step += self.limits.block_size - beyond
        member.visit = min(step, member.total - 1 - member.offset)
        self._visits.setdefault(member.visit, {})[member.request.id] = member

    def _preempt(self, member: Running) -> None:
        """Take a request's blocks away; it starts over at the head of the queue, with what it has generated."""
        self._leave(member)
        member.computed = member.stored = 0
        self._waiting[member.request.id] = member
        self._waiting.move_to_end(member.request.id, last=False)
        self.preemptions += 1

    def _leave(self, member: Running) -> None:
        """Take a request off the running list and free its blocks."""
        del self._running[member.request.id]
        self._prefilling.pop(member.request.id, None)
        if member.offset is not None:
            member.length = self.steps + member.offset
            self._decoding -= 1
            self._offsets -= member.offset
            visits = self._visits.get(member.visit)
            if visits is not None:
                visits.pop(member.request.id, None)
            member.offset = None
        self.cache.release(member.table)
        member.table = []
