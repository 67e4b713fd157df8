"""Endpoints and settings that change while requests come in."""

from __future__ import annotations

import asyncio
import copy
import json
import signal

import pytest
import yaml

from picker.app.envoy import Template, bootstrap
from tests.support.bodies import chat
from tests.support.http_client import send
from tests.support.load import load
from tests.support.picker_process import KTHENA, over, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

STICKY = [{"name": "least-request", "weight": 1}, {"name": "prefix-cache", "weight": 5}]


def scoring(enabled):
    return {"plugins": {"Score": {"enabled": enabled}}}


def prompt(number):
    return chat(f"prompt {number} " * 60)


def list_endpoints(path, engines):
    """Write the endpoint file, in one go as a careful writer does."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump([{"name": f"pod-{engine.port}", "address": engine.address} for engine in engines]))
    new.replace(path)


async def known(picker, count):
    async def has():
        return (await picker.metrics())("endpoints") == count

    await until(has)


async def held_by(picker, body):
    return {address for address, (matched, total) in (await picker.matched(body)).items() if matched == total}


async def test_endpoints_come_and_go_with_their_file(start_picker, start_envoy_here, start_engines, tmp_path):
    engines = await start_engines(4)
    path = tmp_path / "endpoints.yaml"
    list_endpoints(path, engines[:3])
    config = over(engines, scheduler=scoring(STICKY))
    picker = await start_picker({**config, "endpoints": {"file": {"path": str(path), "pollSeconds": 0.05}}})
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    await known(picker, 3)

    homes = {number: (await send(envoy.port, prompt(number))).headers["x-engine"] for number in range(36)}
    assert set(homes.values()) == {engine.address for engine in engines[:3]}
    entries = (await picker.settled())("prefix_cache_entries")

    # No two of these begin alike, so that an endpoint without any blocks is as good as the others.
    async with load(envoy.port, workers=6, body=lambda number: chat(f"{number} load " * 40)) as traffic:
        await traffic.more(20)
        list_endpoints(path, engines)
        await known(picker, 4)
        await traffic.more(60)
        list_endpoints(path, engines[1:])
        await known(picker, 3)
        await traffic.more(60)
    assert traffic.errors == {}
    assert engines[3].address in traffic.served_by
    served = engines[0].requests
    metrics = await picker.settled()
    assert metrics("discovery_updates_total", outcome="ok") == 3
    assert metrics("prefix_cache_entries") > entries / 2

    gone = engines[0].address
    for number, home in homes.items():
        answer = await send(envoy.port, prompt(number))
        assert answer.headers["x-engine"] == home if home != gone else answer.headers["x-engine"] != gone
    assert engines[0].requests == served

    list_endpoints(path, engines)
    await known(picker, 4)
    for number in homes:
        assert gone not in await held_by(picker, prompt(number))

    path.write_text("- {address: nowhere}\n")

    async def refused():
        return (await picker.metrics())("discovery_updates_total", outcome="invalid")

    assert await until(refused) == 1
    assert (await picker.metrics())("endpoints") == 4
    assert (await send(envoy.port, prompt(0))).status == 200


async def test_a_request_outlives_its_endpoint(start_picker, start_envoy_here, start_engines, tmp_path):
    engines = await start_engines(2)
    path = tmp_path / "endpoints.yaml"
    list_endpoints(path, engines[:1])
    picker = await start_picker({"endpoints": {"file": {"path": str(path), "pollSeconds": 0.05}}})
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    await known(picker, 1)
    slow = "/v1/chat/completions?bytes=2000&chunks=20&every=0.05"
    begun = [asyncio.create_task(send(envoy.port, prompt(number), path=slow)) for number in range(5)]

    async def in_flight():
        return (await picker.metrics())("in_flight_requests") == len(begun)

    await until(in_flight)
    list_endpoints(path, engines[1:])

    async def replaced():
        return (await send(envoy.port, prompt(7))).headers["x-engine"] == engines[1].address

    await until(replaced)
    answers = await asyncio.gather(*begun)
    assert {(answer.status, len(answer.body)) for answer in answers} == {(200, 2000)}
    await picker.settled()
    for number in range(5):
        assert await held_by(picker, prompt(number)) == set()


async def test_a_scheduler_changes_while_requests_come(start_picker, start_envoy_here, start_engines):
    engines = await start_engines(3)
    picker = await start_picker(over(engines, scheduler=scoring(STICKY)))
    addresses = [engine.address for engine in engines]
    envoy = await start_envoy_here(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))
    home = (await send(envoy.port, prompt(1))).headers["x-engine"]

    async def in_force(enabled):
        async def is_it():
            effective = await picker.get("/debug/config")
            return effective["scheduler"]["plugins"]["Score"]["enabled"] == enabled

        await until(is_it)

    async with load(envoy.port) as traffic:
        await traffic.more(30)
        loaded = [{"name": "least-request", "weight": 3.0}, {"name": "prefix-cache", "weight": 0.5}]
        picker.write({**picker.config, "scheduler": scoring(loaded)})
        await in_force(loaded)
        await traffic.more(30)
    assert traffic.errors == {}
    await picker.settled()

    # The index is as it was, and the weights of the next decision are the new ones.
    assert home in await held_by(picker, prompt(1))
    await send(envoy.port, prompt(1))
    (newest,) = await picker.decisions(1)
    weights = {
        plugin["plugin"]: plugin["weight"]
        for plugin in (await picker.decision(newest["number"]))["endpoints"][0]["plugins"]
    }
    assert weights == {"least-request": 3, "prefix-cache": 0.5}
    metrics = await picker.metrics()
    assert metrics("config_reloads_total", outcome="ok") == 2
    assert metrics("prefix_cache_entries") > 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda config: json.dumps({**config, "schedular": {}}),
        lambda config: json.dumps({**config, "scheduler": scoring([{"name": "prefix-cache", "weight": 0}])}),
        lambda _: "endpoints: {static: [",
        lambda _: "listen: 7",
    ],
    ids=["misspelt", "weight-0", "no-yaml", "wrong-type"],
)
async def test_a_bad_change_is_refused_and_counted(pickers, start_envoy_here, engines, damage):
    picker = await pickers(over(engines, scheduler=scoring(STICKY)))
    good = copy.deepcopy(picker.config)
    addresses = [engine.address for engine in engines]
    envoy = await start_envoy_here(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))
    before, effective = await picker.metrics(), await picker.get("/debug/config")

    async with load(envoy.port, workers=4) as traffic:
        await traffic.more(10)
        picker.write_text(damage(good))
        picker.send_signal(signal.SIGHUP)

        async def refused():
            metrics = await picker.metrics()
            return metrics("config_reloads_total", outcome="invalid") > before(
                "config_reloads_total", outcome="invalid"
            )

        await until(refused)
        await traffic.more(30)
    assert traffic.errors == {}
    assert await picker.get("/debug/config") == effective
    metrics = await picker.settled()
    assert metrics("config_reloads_total", outcome="invalid") - before("config_reloads_total", outcome="invalid") == 1
    assert picker.events("The file is refused")
    picker.write(good)
    picker.send_signal(signal.SIGHUP)


async def test_what_waits_for_a_restart_is_not_shown_as_in_force(start_picker, engines):
    picker = await start_picker(over(engines))
    before, listen = await picker.get("/debug/config"), picker.config["listen"]
    picker.write({**picker.config, "listen": {**listen, "maxConcurrentStreams": 7, "leaveSeconds": 1.5}})
    picker.send_signal(signal.SIGHUP)

    async def noticed():
        shown = await picker.get("/debug/config")
        return shown if "needs_restart" in shown else None

    shown = await until(noticed)
    assert shown.pop("needs_restart") == ["listen.maxConcurrentStreams"]
    assert shown == {**before, "listen": {**before["listen"], "leaveSeconds": 1.5}}
    assert picker.events("Some changes need a restart")


async def test_a_picker_whose_configuration_is_emptied_keeps_its_endpoints(start_picker, engines):
    picker = await start_picker(over(engines))
    path = picker.directory / "picker.yaml"
    path.write_text("")
    picker.send_signal(signal.SIGHUP)

    async def refused():
        return (await picker.metrics())("config_reloads_total", outcome="invalid")

    await until(refused)
    await known(picker, len(engines))
    path.unlink()

    async def said_again():
        picker.send_signal(signal.SIGHUP)
        return picker.events("The file is still refused")

    await until(said_again)
    await known(picker, len(engines))


async def test_endpoints_in_the_configuration_change_with_it(start_picker, start_envoy_here, start_engines):
    engines = await start_engines(2)
    picker = await start_picker(over(engines[:1], scheduler=KTHENA))
    envoy = await start_envoy_here(bootstrap(Template.FULL_DUPLEX, picker=picker.address))
    assert (await send(envoy.port, prompt(1))).headers["x-engine"] == engines[0].address
    picker.write({**picker.config, "endpoints": over(engines)["endpoints"]})
    picker.send_signal(signal.SIGHUP)
    await known(picker, 2)
    assert await held_by(picker, prompt(1)) == {engines[0].address}
    picker.write({**picker.config, "endpoints": {"static": []}})
    picker.send_signal(signal.SIGHUP)
    await known(picker, 0)
    assert (await send(envoy.port, prompt(1))).status == 503


async def test_a_picker_without_its_list_is_not_ready_and_not_asked(
    start_picker, start_envoy_here, start_engines, tmp_path
):
    engines = await start_engines(2)
    path = tmp_path / "endpoints.yaml"
    picker = await start_picker({"endpoints": {"file": {"path": str(path), "pollSeconds": 0.05}}})
    addresses = [engine.address for engine in engines]
    envoy = await start_envoy_here(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=addresses))

    async def told_why():
        health = await picker.get("/health")
        assert health["status"] == "not ready"
        return f"endpoints.file: {path} does not exist; " in health["reason"]

    await until(told_why)

    async def left_out():
        answer = await send(envoy.port, prompt(1))
        return answer.status == 200

    await until(left_out)
    list_endpoints(path, engines)
    await known(picker, 2)
    assert await picker.get("/health") == {"status": "ok"}

    async def asked():
        assert (await send(envoy.port, prompt(1))).status == 200
        return (await picker.metrics())("decisions_total", reason="routed")

    await until(asked)
