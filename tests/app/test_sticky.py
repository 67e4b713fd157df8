"""Changes of `sessionSticky` while the picker runs: what is bound stays bound."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from picker.app.config_sticky import SessionSticky, StickyBackend
from picker.app.sticky import StickyPart
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide
from picker.core.plugins.kvcache_args import RedisArgs
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.scheduling.decision import First
from picker.core.sticky import Source, SourceType

HEADER = Source(SourceType.HEADER, "x-session-id")
QUERY = Source(SourceType.QUERY, "s")
ON = SessionSticky(sources=(HEADER,))


class Running:
    def __init__(self) -> None:
        scheduler, _ = build_scheduler(SchedulerSpec((), (("least-request", 1),), {}), None, lambda _: None)
        timer = time.perf_counter_ns
        self.director = Director(scheduler, EndpointTable(), fallbacks=0, rng=random.Random(1), timer=timer)
        self.director.replace_endpoints(Endpoint(f"pod-{number}", f"10.0.0.{number}:8000") for number in range(1, 9))
        self.kept: list[str] = []
        self.part = StickyPart(self.director, self._keep)

    def _keep(self, name, run):
        self.kept.append(name)
        return asyncio.create_task(run())

    async def send(self, session: str) -> tuple[str, First | None]:
        headers = {":path": f"/v1/completions?s={session}".encode(), "x-session-id": session.encode()}
        body = json.dumps({"model": "m", "prompt": "x"}).encode()
        asked = Decide(headers, body, BodyState.COMPLETE, None, None)
        request = self.director.read(asked)
        prepared = [await each for each in self.director.prepare(asked, request)]
        decision = self.director.decide(asked, request=request)
        self.director.route(decision)
        assert len(prepared) == (self.director.prepares and bool(request.session))
        return decision.destinations[0], decision.first


@pytest.fixture
async def running():
    made = Running()
    yield made
    await made.part.stop()


async def test_what_is_bound_stays_bound(running, redis_server, monkeypatch):
    monkeypatch.delenv("REDIS_PASSWORD", raising=False)
    running.part.configure(SessionSticky())
    assert running.director.sticky is None
    running.part.configure(ON)
    homes = {session: (await running.send(session))[0] for session in "abcdef"}
    shared = RedisArgs(address=f"127.0.0.1:{redis_server.port}")
    for changed in (
        SessionSticky(sources=(QUERY, HEADER), session_affinity_seconds=10),
        SessionSticky(sources=(HEADER,), backend=StickyBackend.REDIS, redis=shared),
        SessionSticky(sources=(HEADER,), backend=StickyBackend.REDIS, redis=shared, max_sessions=50),
        ON,
    ):
        running.part.configure(changed)
        for session, home in homes.items():
            assert await running.send(session) == (home, First.PINNED)
    assert running.kept == ["sticky"]
    assert running.director.sticky.outcomes == {"none": 0, "bound": 6, "pinned": 24, "moved": 0}
    running.part.configure(SessionSticky())
    assert (await running.send("a"))[1] is None
    running.part.configure(ON)
    assert (await running.send("a"))[1] is None


async def test_redis_is_told_before_the_picker_ends(running, redis_server, until):
    shared = RedisArgs(address=f"127.0.0.1:{redis_server.port}")
    running.part.configure(SessionSticky(sources=(HEADER,), backend=StickyBackend.REDIS, redis=shared))
    await until(lambda: running.director.sticky.store.client.connected)
    for number in range(20):
        await running.send(f"s-{number}")
    await running.part.stop()
    async with redis_server.client() as client:
        assert await client.dbsize() == 20
