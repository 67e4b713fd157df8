"""Pods of a fake cluster, found by the real picker, behind a real Envoy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from datetime import datetime

import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.app.envoy import Template, bootstrap
from tests.support.bodies import chat
from tests.support.fake_kubernetes.server import FakeKubernetes
from tests.support.fleet import Fleet
from tests.support.http_client import send
from tests.support.load import load
from tests.support.picker_process import until
from tests.support.pods import pool

pytestmark = pytest.mark.asyncio(loop_scope="session")

OUTAGE_SECONDS = float(os.environ.get("OUTAGE_SECONDS", "4"))
"""How long the API server is down in the scripted cluster; 60 takes as long as it says."""
POOLS = {"alpha": Template.BUFFERED, "beta": Template.FULL_DUPLEX, "gamma": Template.FULL_DUPLEX}
GRACE = 1.5
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest_asyncio.fixture(loop_scope="session")
async def cluster():
    server = FakeKubernetes(bookmark_seconds=1.0)
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(cluster):
    made = Fleet(cluster)
    yield made
    made.stop()


@pytest.fixture
def following(cluster, tmp_path):
    """The configuration of a picker for an InferencePool."""

    def configuration(name, **more):
        path = tmp_path / "kubeconfig"
        path.write_text(cluster.kubeconfig())
        source = {"pool": {"name": name}, "kubeconfig": str(path), "silenceSeconds": 5, **more}
        scrape = {"intervalSeconds": 1, "timeoutSeconds": 1, "staleSeconds": 10}
        return {"endpoints": {"kubernetes": source}, "scrape": scrape}

    return configuration


async def health(picker, service):
    async with grpc.aio.insecure_channel(picker.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return answer.status


async def endpoints(picker):
    return (await picker.metrics())("endpoints")


async def test_ready_when_pods_are_known_and_from_then_on(cluster, fleet, following, start_picker, start_envoy_here):
    await fleet.start("alpha", "node-0")
    cluster.apply(pool("alpha", labels={"app": "alpha"}, ports=(fleet.port,)))
    await cluster.stop()
    picker = await start_picker(following("alpha", longestRetrySeconds=0.2))

    async def says_why():
        return "cannot be reached" in (await picker.get("/health")).get("reason", "")

    await until(says_why)
    assert (await health(picker, "readiness"), await health(picker, "liveness")) == (NOT_SERVING, SERVING)
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    assert (await send(envoy.port, chat("hello"))).status == 503
    await cluster.start()

    async def ready():
        return await health(picker, "readiness") == SERVING

    await until(ready)
    assert (await send(envoy.port, chat("hello"))).status == 200
    await cluster.stop()
    assert (await send(envoy.port, chat("hello"))).status == 200

    async def unreachable():
        return (await picker.metrics())("discovery_updates_total", outcome="unreachable") > 2

    await until(unreachable)
    assert await ready()
    assert (await send(envoy.port, chat("hello"))).status == 200
    assert (await picker.metrics())("discovery_staleness_seconds") > 0


async def test_a_change_of_endpoints_does_not_end_a_drain(cluster, fleet, following, start_picker):
    await fleet.start("alpha", "node-0")
    cluster.apply(pool("alpha", labels={"app": "alpha"}, ports=(fleet.port,)))
    picker = await start_picker({**following("alpha"), "listen": {"leaveSeconds": 2}})

    async def known(count):
        async def is_known():
            return await endpoints(picker) == count

        await until(is_known)

    await known(1)
    picker.send_signal(signal.SIGTERM)

    async def leaving():
        return await health(picker, "readiness") == NOT_SERVING

    await until(leaving)
    await fleet.start("alpha", "node-0")
    await known(2)
    assert await health(picker, "readiness") == NOT_SERVING
    assert (await picker.get("/health"))["reason"] == "draining"


async def test_what_is_followed_can_change(cluster, fleet, following, start_picker, start_envoy_here):
    first, second = await fleet.start("alpha", "node-0"), await fleet.start("beta", "node-0")
    cluster.apply(pool("alpha", labels={"app": "alpha"}, ports=(fleet.port,)))
    by_pool = following("alpha")
    kubeconfig = by_pool["endpoints"]["kubernetes"]["kubeconfig"]
    by_label = {"selector": "app in (beta)", "ports": [fleet.port], "kubeconfig": kubeconfig}
    static = [{"address": f"{first.ip}:{fleet.port}"}, {"address": f"{second.ip}:{fleet.port}"}]
    picker = await start_picker(by_pool)
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))

    async def serves():
        answers = [await send(envoy.port, chat(f"{number} hello")) for number in range(8)]
        return {answer.headers.get("x-engine", answer.status) for answer in answers}

    async def follow(endpoints, expected):
        picker.write({**picker.config, "endpoints": endpoints})
        picker.send_signal(signal.SIGHUP)

        async def followed():
            return await serves() == expected

        await until(followed)

    async def watched(plurals):
        async def are_watched():
            return {stream.resource.plural for stream in cluster.streams} == plurals

        await until(are_watched)

    await follow(by_pool["endpoints"], {first.ip})
    await watched({"pods", "inferencepools"})
    await follow({"kubernetes": by_label}, {second.ip})
    await watched({"pods"})
    await follow({"static": static}, {first.ip, second.ip})
    await watched(set())
    await follow(by_pool["endpoints"], {first.ip})
    samples = await picker.settled()
    assert samples("endpoints") == 1


async def test_a_cluster_in_which_everything_happens(cluster, fleet, following, start_picker, start_envoy_here):
    """Three pools of 200 pods: a rolling restart, the loss of a node, an outage of the API server; all under load."""
    for number in range(201):
        await fleet.start(list(POOLS)[number % 3], f"node-{number % 10}")
    for name in POOLS:
        cluster.apply(pool(name, labels={"app": name}, ports=(fleet.port,)))
    pickers = {name: await start_picker(following(name)) for name in POOLS}
    envoys = {}
    for name, template in POOLS.items():
        places = fleet.addresses if template is Template.BUFFERED else ()
        config = bootstrap(template, picker=pickers[name].address, endpoints=places, access_log=True)
        envoys[name] = await start_envoy_here(config)

    async def known(name):
        return await endpoints(pickers[name]) == len(fleet.of(name))

    for name in POOLS:
        await until(lambda name=name: known(name))

    async def restart(living):
        new = await fleet.start(living.pool, living.node, ready=False)
        await asyncio.sleep(0.2)
        fleet.report(new)
        await fleet.end(living, GRACE)

    async def rolling_restart(name, at_once=17):
        pods = fleet.of(name)
        for start in range(0, len(pods), at_once):
            await asyncio.gather(*(restart(living) for living in pods[start : start + at_once]))

    async def lose(node):
        """All of a node goes at once; the node controller says so a moment later, and its pods are replaced."""
        lost = [living for living in fleet.pods.values() if living.node == node]
        for living in lost:
            fleet.kill(living)
        await asyncio.sleep(0.3)
        for living in lost:
            fleet.report(living, ready=False)
        for living in lost:
            fleet.forget(living)
            await fleet.start(living.pool, "node-0")
        return lost

    async with AsyncExitStack() as loads:
        traffic = {name: await loads.enter_async_context(load(envoys[name].port, workers=3)) for name in POOLS}
        for one in traffic.values():
            await one.more(50)
        before = {name: (await picker.metrics()).memory for name, picker in pickers.items()}
        await asyncio.gather(rolling_restart("alpha"), rolling_restart("beta"))
        assert {name: one.errors for name, one in traffic.items()} == {name: {} for name in POOLS}

        lost_at = asyncio.get_running_loop().time()
        lost = await lose("node-3")
        assert len(lost) > 10
        await asyncio.sleep(1.0 - min(1.0, asyncio.get_running_loop().time() - lost_at))
        # What was under way on the node may have failed; a second later nothing does.
        failed = {name: len(one.errors) for name, one in traffic.items()}

        await cluster.stop()
        await asyncio.sleep(OUTAGE_SECONDS)
        cluster.storage.compact()
        await cluster.start()
        await asyncio.gather(rolling_restart("gamma"), rolling_restart("beta"))
        for one in traffic.values():
            await one.more(20)
        assert {name: len(one.errors) for name, one in traffic.items()} == failed, traffic

    for name, picker in pickers.items():
        metrics = await picker.settled()
        assert metrics("endpoints") == len(fleet.of(name))
        assert metrics("decisions_total", reason="routed") == metrics("decisions_total")
        assert metrics("discovery_updates_total", outcome="unreachable") > 0
        assert metrics("discovery_staleness_seconds") < 5
        assert metrics.memory < before[name] + 24e6
    for name, envoy in envoys.items():
        os.kill(envoy.pid, signal.SIGTERM)  # then it writes the rest of its log

        async def all_picks(envoy=envoy, total=traffic[name].total):
            found = list(picks(envoy))
            return found if len(found) >= total else None

        missed = [fleet.missed_by(name, address, at) for at, picked in await until(all_picks) for address in picked]
        assert max(missed) <= 1.0


def picks(envoy):
    """When each request began, as Envoy saw it, and the endpoints that the picker named for it."""
    complete, _, _ = envoy.log().rpartition("\n")
    for line in complete.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            yield datetime.fromisoformat(entry["time"]).timestamp(), (entry["picked"] or "").split(",")
