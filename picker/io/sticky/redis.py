"""Bindings of sticky sessions in Redis, where every picker and Kthena's routers see them.

The layout is Kthena's: for each session a hash with `modelServer`, `pod` and `prefillPod`, which expires. `address` beside
them is ours, and tells data-parallel ranks of one pod apart. The first writer wins; the others adopt what it wrote.

What Redis says is kept in memory, too. That is what counts while Redis is away, and what Redis is told again when it
comes back empty.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from math import ceil
from typing import Any, Final

from picker.core.exchange.effects import Decide
from picker.core.scheduling.api import Request
from picker.core.sticky import SHARED, Binding, Bindings
from picker.io.kv_index.redis_client import Lookup, RedisClient
from picker.io.kv_index.redis_connection import Command

MOST_PENDING: Final = 1024
"""Bindings that are on their way to Redis."""

BACKLOG: Final = "backlog"
"""The outcome of a binding that Redis is not told, since too many are on their way."""

_IS = """
local function is(bound, pod, address)
  return bound[1] == pod and (not bound[2] or bound[2] == '' or address == '' or bound[2] == address)
end
local bound = redis.call('HMGET', KEYS[1], 'pod', 'address')
"""

_BIND: Final = (
    _IS
    + """
if not bound[1] or (ARGV[3] ~= '' and is(bound, ARGV[3], ARGV[4])) then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'pod', ARGV[1], 'address', ARGV[2], 'modelServer', ARGV[6], 'prefillPod', '')
  bound = {ARGV[1], ARGV[2]}
end
if is(bound, ARGV[1], ARGV[2]) then
  redis.call('EXPIRE', KEYS[1], ARGV[5])
end
return bound
"""
)

_RELEASE: Final = (
    _IS
    + """
if bound[1] and is(bound, ARGV[1], ARGV[2]) then
  redis.call('DEL', KEYS[1])
end
return bound
"""
)


class RedisBindings:
    """See `Store`, and the `Preparation` that finds the bindings of others.

    `lookups` and `writes` count questions and bindings by how they ended, `adopted` those that another picker was first
    to bind elsewhere. `model_server` is the short name that goes into the hash.
    """

    def __init__(self, client: RedisClient, memory: Bindings, model_server: str, now: Callable[[], float]) -> None:
        self.client = client
        self.memory = memory
        self.model_server = model_server
        self.lookups: Counter[str] = Counter(dict.fromkeys(Lookup, 0))
        self.writes: Counter[str] = Counter(dict.fromkeys((*Lookup, BACKLOG), 0))
        self.adopted = 0
        self._now = now
        self._pending: set[asyncio.Task[None]] = set()

    def begin(self, asked: Decide, request: Request, seconds: float) -> Awaitable[Mapping[str, Any]] | None:  # noqa: ARG002  the client's budget is shorter
        """See `Preparation`."""
        return self._look_up(request.session)

    def find(self, session: str, now: float) -> Binding | None:
        """See `Store`."""
        return self.memory.find(session, now)

    def bind(self, session: str, binding: Binding, instead_of: Binding | None, now: float) -> None:
        """See `Store`."""
        self.memory.bind(session, binding, instead_of, now)
        before = instead_of or Binding("", "")
        seconds = max(ceil(self.memory.seconds), 1)
        command = ("EVAL", _BIND, 1, session, *binding, *before, seconds, self.model_server)
        self._soon(command, session, binding)

    def release(self, session: str, binding: Binding) -> None:
        """See `Store`."""
        self.memory.release(session, binding)
        self._soon(("EVAL", _RELEASE, 1, session, *binding), session, None)

    async def settle(self) -> None:
        """Wait until Redis knows everything, or will not."""
        while self._pending:
            await asyncio.wait(self._pending)

    async def _look_up(self, session: str) -> Mapping[str, Any]:
        outcome, replies = await self.client.ask([("HMGET", session, "pod", "address")])
        self.lookups[outcome] += 1
        bound = _binding(replies[0]) if outcome is Lookup.OK else None
        return {} if bound is None else {SHARED: bound}

    def _soon(self, command: Command, session: str, binding: Binding | None) -> None:
        if len(self._pending) >= MOST_PENDING:
            self.writes[BACKLOG] += 1
            return
        task = asyncio.get_running_loop().create_task(self._write(command, session, binding))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _write(self, command: Command, session: str, binding: Binding | None) -> None:
        outcome, replies = await self.client.ask([command])
        self.writes[outcome] += 1
        bound = _binding(replies[0]) if outcome is Lookup.OK and binding is not None else None
        if bound is not None and binding is not None and not bound.same(binding):
            self.adopted += 1
            self.memory.bind(session, bound, None, self._now())


def _binding(reply: object) -> Binding | None:
    """Read the reply to HMGET pod address; None when there is no binding, or none that anybody of us wrote."""
    match reply:
        case [bytes() as pod, bytes() | None as address] if pod:
            try:
                return Binding(pod.decode(), (address or b"").decode())
            except UnicodeDecodeError:
                return None
    return None
