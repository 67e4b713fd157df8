"""Sharing through a real Redis that refuses, or through a connection that is none any more."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

import pytest
import structlog
from msgspec.structs import replace

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.sharing.replicas import Replicas
from picker.io.kv_index.redis_connection import RedisSettings
from picker.io.sharing import picks as sharing
from picker.io.sharing.picks import SharedPicks

NOT_SHARED = "Redis is not available; picks are not shared"


def shared(settings, name, timer=time.monotonic_ns, **told):
    profile = PROFILES[ProfileName.TOKEN_COST]
    spec = SchedulerSpec(profile.filters, profile.scorers, profile.args, ("prefix-cache",))
    scheduler, _ = build_scheduler(spec, None, lambda _model, _blocks: None)
    director = Director(scheduler, EndpointTable(), fallbacks=0, rng=random.Random(1), timer=timer)
    director.replace_endpoints([Endpoint("p", "10.0.0.1:8000")])
    return SharedPicks(director, settings, "picks", name=name, batch_seconds=0.01, **told)


@pytest.mark.parametrize(
    ("rights", "refused"), [("-publish", "'publish'"), ("-subscribe", "'subscribe'"), ("resetchannels", "channel")]
)
async def test_a_user_that_may_not_is_told_so_and_heals_with_its_rights(
    redis_server, background, until, rights, refused
):
    async with redis_server.client() as client:
        allowed = ("ACL", "SETUSER", "picker", "on", ">secret", "+@all", "~*", "&*")
        await client.execute_command(*allowed)
        await client.execute_command("ACL", "SETUSER", "picker", rights)
        settings = replace(redis_server.settings, username="picker", password="secret")
        one = shared(settings, "one")
        with structlog.testing.capture_logs() as logs:
            background(one.run())
            await until(lambda: any(line["event"] == NOT_SHARED for line in logs))
            assert refused in next(line for line in logs if line["event"] == NOT_SHARED)["error"]
            assert one.failures["refused"] >= 1
            await client.execute_command(*allowed)
            await until(lambda: any(line["event"] == "Picks are shared" for line in logs))
        other = shared(redis_server.settings, "other")
        background(other.run())
        await until(lambda: one.replicas.peers == other.replicas.peers == 1)


async def test_a_connection_on_which_nothing_comes_any_more_is_replaced(redis_server, background, until, monkeypatch):
    monkeypatch.setattr(sharing, "_SILENT_SECONDS", 0.5)
    holes = []

    async def pipe(reader, writer, hole):
        with suppress(OSError):
            while data := await reader.read(65536):
                if not hole.is_set():
                    writer.write(data)
        writer.close()

    async def connect(reader, writer):
        hole = asyncio.Event()
        holes.append(hole)
        back, forth = await asyncio.open_connection("127.0.0.1", redis_server.port)
        background(pipe(reader, forth, hole))
        background(pipe(back, writer, hole))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        one, other = shared(replace(redis_server.settings, port=port), "one"), shared(redis_server.settings, "other")
        background(one.run())
        background(other.run())
        await until(lambda: one.replicas.peers == other.replicas.peers == 1)
        for hole in holes:
            hole.set()
        await until(lambda: one.connects == 2)
        heard = dict(other.replicas.heard)
        await until(lambda: other.replicas.heard["taken"] > heard["taken"] + 3)
        assert one.replicas.peers == 1


async def test_who_is_silent_is_forgotten_though_that_failed_before(background, until, unused_tcp_port):
    """Without Redis nothing else reads the clock."""
    clock, errors = {"ahead": 0, "broken": False}, []

    def timer():
        if clock["broken"]:
            raise ValueError("no clock")
        return time.monotonic_ns() + clock["ahead"]

    settings = RedisSettings("127.0.0.1", unused_tcp_port)
    one = shared(settings, "one", timer, failed=lambda *error: errors.append(error))
    other = Replicas(one._director, "other")
    background(one.run())
    for message in other.flush(time.monotonic()):
        one.replicas.receive(message, time.monotonic())
    assert one.replicas.peers == 1
    clock["broken"] = True
    await until(lambda: errors)
    assert {(where, str(error)) for where, error in errors} == {("sharing", "no clock")}
    assert one.replicas.peers == 1
    clock.update(broken=False, ahead=2_000_000_000)
    await until(lambda: one.replicas.peers == 0)


async def test_a_message_that_cannot_be_dealt_with_ends_no_connection(redis_server, background, until):
    errors = []

    class Broken:
        """Fails to hear one message."""

        def __init__(self, replicas) -> None:
            self._replicas = replicas

        def __getattr__(self, name):
            return getattr(self._replicas, name)

        def receive(self, data, now):
            if b"other" in data and not errors:
                raise ValueError("cannot be")
            return self._replicas.receive(data, now)

    one = shared(redis_server.settings, "one", failed=lambda *error: errors.append(error))
    one.replicas = Broken(one.replicas)
    other = shared(redis_server.settings, "other")
    background(one.run())
    background(other.run())
    await until(lambda: one.replicas.peers == other.replicas.peers == 1)
    assert [(where, str(error)) for where, error in errors] == [("sharing", "cannot be")]
    assert one.connects == 1
