"""The whole of it: real clients, a real Envoy, the real picker as a process, and engines that obey the test."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

import grpc.aio
import pytest
import pytest_asyncio

from picker._proto.picker.v1 import scores_pb2, scores_pb2_grpc
from picker.app.envoy import EnvoyProcess, Template, bootstrap, start_envoy
from tests.support.engine import Engine
from tests.support.picker_process import PickerProcess, over


class Shipped(NamedTuple):
    template: Template
    picker: PickerProcess
    envoy: EnvoyProcess

    @property
    def port(self):
        return self.envoy.port


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines():
    """Three engines that stay up and healthy."""
    started = [Engine() for _ in range(3)]
    for engine in started:
        await engine.start()
    yield started
    for engine in started:
        await engine.kill()


@pytest_asyncio.fixture(loop_scope="session")
async def start_engines():
    """Starts engines of this test alone."""
    started = []

    async def start(count):
        new = [Engine() for _ in range(count)]
        for engine in new:
            await engine.start()
        started.extend(new)
        return new

    yield start
    for engine in started:
        await engine.kill()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pickers():
    """Starts pickers that live until the session ends; the same configuration gives the same picker."""
    running = {}

    async def start(config):
        key = json.dumps(config, sort_keys=True)
        if key not in running:
            running[key] = PickerProcess(config)
            await running[key].start()
        return running[key]

    yield start
    complaints = [line for picker in running.values() for line in picker.complaints()]
    for picker in running.values():
        await picker.close()
    assert complaints == []


@pytest_asyncio.fixture(loop_scope="session")
async def start_picker():
    """Starts pickers of this test alone, which it may stop, kill and start again."""
    started = []

    async def start(config):
        picker = PickerProcess(config)
        started.append(picker)
        await picker.start()
        return picker

    yield start
    complaints = [line for picker in started for line in picker.complaints()]
    for picker in started:
        await picker.close()
    assert complaints == []


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def envoys():
    """Starts Envoys that live until the session ends; the same bootstrap gives the same Envoy."""
    running = {}

    async def start(config):
        key = json.dumps(config, sort_keys=True)
        if key not in running:
            running[key] = await start_envoy(config)
        return running[key]

    yield start
    for envoy in running.values():
        await envoy.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def start_envoy_here():
    """Starts Envoys of this test alone."""
    async with AsyncExitStack() as stack:

        async def start(config):
            return await stack.enter_async_context(await start_envoy(config))

        yield start


@pytest.fixture
def watch():
    """Collects decisions from the admin port for as long as its context lasts."""

    @asynccontextmanager
    async def collect(picker):
        decisions = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.ports['admin']}") as channel:
            call = scores_pb2_grpc.ScoresStub(channel).Watch(scores_pb2.WatchRequest())

            async def read():
                async for decision in call:
                    decisions.append(decision)  # noqa: PERF401  they are looked at meanwhile

            task = asyncio.create_task(read())
            yield decisions
            call.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return collect


@pytest_asyncio.fixture(loop_scope="session", params=Template)
async def shipped(request, pickers, envoys, engines):
    """A picker behind an Envoy in each of the shipped configurations; trailers of HTTP/1.1 pass."""
    picker = await pickers(over(engines))
    addresses = [engine.address for engine in engines]
    config = bootstrap(request.param, picker=picker.address, endpoints=addresses, http1_trailers=True)
    return Shipped(request.param, picker, await envoys(config))


@pytest_asyncio.fixture(loop_scope="session")
async def wire():
    """Starts servers that handle the raw bytes of a connection; returns the port of each."""
    async with AsyncExitStack() as stack:

        async def start(handle):
            async def safely(reader, writer):
                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    await handle(reader, writer)
                writer.close()

            server = await asyncio.start_server(safely, "127.0.0.1", 0)
            await stack.enter_async_context(server)
            return server.sockets[0].getsockname()[1]

        yield start
