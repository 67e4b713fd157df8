"""Discovery over a real connection to an API server that fails in every way it can."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest
import yaml
from structlog.testing import capture_logs

from picker.core.kubernetes.pools import PoolGroup
from picker.core.kubernetes.watch import WatchSettings
from tests.support.pods import pod, pool


def address(number, port=8000):
    return f"10.0.{number // 256}.{number % 256}:{port}"


def ip(number):
    return address(number).partition(":")[0]


def fill(cluster, count, start=0):
    for number in range(start, start + count):
        cluster.apply(pod(f"pod-{number:04}", ip(number)))


def drop(cluster, number):
    cluster.storage.delete(cluster.resource("pods"), "default", f"pod-{number:04}")


async def test_pods_come_and_go(cluster, discover, until):
    fill(cluster, 3)
    cluster.apply(pod("other", "10.9.9.9", labels={"app": "other"}))
    cluster.apply(pod("elsewhere", "10.9.9.8", namespace="kube-system"))
    cluster.apply(pod("starting", "10.0.0.7", ready=False))
    discovery = discover()
    await until(lambda: discovery.addresses == [address(0), address(1), address(2)])
    assert len(discovery.told) == 1
    cluster.apply(pod("starting", "10.0.0.7"))
    await until(lambda: discovery.addresses == [address(0), address(1), address(2), "10.0.0.7:8000"])
    terminating = pod("pod-0001", ip(1))
    terminating["metadata"]["deletionTimestamp"] = "2026-08-14T12:00:00Z"
    cluster.apply(terminating)
    await until(lambda: discovery.addresses == [address(0), address(2), "10.0.0.7:8000"])
    drop(cluster, 0)
    await until(lambda: discovery.addresses == [address(2), "10.0.0.7:8000"])
    assert (discovery.problem, discovery.failures) == ("", {})
    assert cluster.requests["list", "pods"] == 1


async def test_an_empty_cluster_is_known_to_be_empty(discover, until):
    discovery = discover()
    await until(lambda: discovery.told)
    assert discovery.told == [[]]
    assert 0 <= discovery.staleness() < 5


async def test_changes_that_mean_nothing_are_not_passed_on(cluster, discover, until):
    fill(cluster, 1)
    discovery = discover()
    await until(lambda: discovery.told)
    for number in range(20):
        cluster.apply(pod("pod-0000", ip(0), annotations={"beat": str(number)}))
    fill(cluster, 1, start=1)
    await until(lambda: discovery.addresses == [address(0), address(1)])
    assert (len(discovery.told), discovery.updates) == (2, 2)


async def test_many_changes_at_once_are_few_for_those_who_are_told(cluster, discover, until):
    discovery = discover()
    await until(lambda: discovery.told)
    fill(cluster, 500)
    await until(lambda: len(discovery.addresses) == 500)
    assert len(discovery.told) < 30


async def test_long_lists_come_in_pages(cluster, discover, until):
    fill(cluster, 250)
    discovery = discover()
    await until(lambda: discovery.addresses)
    assert len(discovery.addresses) == 250
    assert cluster.requests["list", "pods"] == 3


async def test_a_pool_says_which_pods_and_ports(cluster, discover, until):
    fill(cluster, 2)
    cluster.apply(pod("other", "10.0.0.9", labels={"app": "other"}))
    discovery = discover(source="pool")
    await until(lambda: discovery.told)
    assert discovery.told == [[]]
    assert discovery.problem == (
        "there is no usable InferencePool pool of inference.networking.k8s.io; "
        "apply it, or correct its name, namespace or group"
    )
    cluster.apply(pool("another", labels={"app": "other"}))
    cluster.apply(pool("pool"))
    await until(lambda: discovery.addresses == [address(0), address(1)])
    lists = cluster.requests["list", "pods"]
    cluster.apply(pool("pool", ports=(8000, 8001)))
    await until(lambda: discovery.addresses == [address(0), address(0, 8001), address(1), address(1, 8001)])
    assert [endpoint.rank for endpoint in discovery.told[-1]] == [0, 1, 0, 1]
    assert cluster.requests["list", "pods"] == lists
    told = len(discovery.told)
    cluster.apply(pool("pool", labels={"app": "other"}))
    await until(lambda: discovery.addresses == ["10.0.0.9:8000"])
    assert len(discovery.told) == told + 1  # never nothing in between
    cluster.storage.delete(cluster.resource("inferencepools", "inference.networking.k8s.io"), "default", "pool")
    await until(lambda: discovery.addresses == [])


async def test_a_pool_of_the_older_version(cluster, discover, until):
    fill(cluster, 1)
    old = {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferencePool",
        "metadata": {"name": "pool", "namespace": "default"},
        "spec": {"selector": {"app": "model"}, "targetPortNumber": 8100, "extensionRef": {"name": "picker"}},
    }
    cluster.apply(old)
    discovery = discover(source="pool", group=PoolGroup.V1ALPHA2)
    await until(lambda: discovery.addresses == [address(0, 8100)])


async def test_another_namespace(cluster, discover, until):
    cluster.apply(pod("elsewhere", "10.9.9.8", namespace="kube-system"))
    discovery = discover(namespace="kube-system")
    await until(lambda: discovery.addresses == ["10.9.9.8:8000"])
    assert discovery.told[-1][0].namespace == "kube-system"


async def outage(cluster):
    await cluster.stop()
    fill(cluster, 1, start=100)
    await asyncio.sleep(0.3)
    await cluster.start()


async def cut(cluster):
    cluster.cut_streams()
    fill(cluster, 1, start=100)


async def ended(cluster):
    cluster.end_streams()
    fill(cluster, 1, start=100)


async def hung(cluster):
    cluster.mute_streams()
    fill(cluster, 1, start=100)


async def expired_frame(cluster):
    cluster.cut_streams()
    fill(cluster, 1, start=100)
    cluster.storage.compact()


async def expired_status(cluster):
    cluster.faults.expired_as_status = True
    await expired_frame(cluster)


async def error_frame(cluster):
    cluster.send_error_frame(410)
    fill(cluster, 1, start=100)


async def other_error_frame(cluster):
    cluster.send_error_frame(500, "InternalError")
    fill(cluster, 1, start=100)


async def half_a_frame(cluster):
    cluster.send_to_streams(b'{"type": "ADDED", "object": {"metadata"')
    cluster.end_streams()
    fill(cluster, 1, start=100)


async def garbage(cluster):
    cluster.send_to_streams(b"<html>502 Bad Gateway</html>\n")
    fill(cluster, 1, start=100)


async def throttled(cluster):
    cluster.faults.refuse(429, times=3, retry_after=1)
    cluster.end_streams()
    fill(cluster, 1, start=100)


async def unavailable(cluster):
    cluster.faults.refuse(503, times=4, body="<html>no healthy upstream</html>")
    cluster.end_streams()
    fill(cluster, 1, start=100)


async def hanging(cluster):
    cluster.faults.hangs = True
    cluster.cut_streams()
    fill(cluster, 1, start=100)
    await asyncio.sleep(0.8)
    cluster.faults.hangs = False


async def slow(cluster):
    cluster.faults.slow = 0.1
    cluster.cut_streams()
    fill(cluster, 1, start=100)


@pytest.mark.parametrize(
    ("fault", "failures"),
    [
        (outage, {"cut", "unreachable"}),
        (cut, {"cut"}),
        (ended, set()),
        (hung, {"silent"}),
        (expired_frame, {"cut", "expired"}),
        (expired_status, {"cut", "expired"}),
        (error_frame, {"expired"}),
        (other_error_frame, {"server_error"}),
        (half_a_frame, set()),
        (garbage, {"malformed"}),
        (throttled, {"throttled"}),
        (unavailable, {"server_error"}),
        (hanging, {"cut", "unreachable"}),
        (slow, {"cut"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_it_heals(cluster, discover, until, fault, failures):
    fill(cluster, 2)
    discovery = discover()
    await until(lambda: discovery.addresses and cluster.streams)
    await fault(cluster)
    await until(lambda: discovery.addresses == [address(0), address(1), address(100)])
    assert set(discovery.failures) == failures
    drop(cluster, 0)
    await until(lambda: discovery.addresses == [address(1), address(100)])
    assert [] not in discovery.told
    await until(lambda: not discovery.problem)


async def test_an_api_server_that_is_down_takes_nothing_away(cluster, discover, until):
    fill(cluster, 2)
    discovery = discover()
    await until(lambda: discovery.addresses and cluster.streams)
    await cluster.stop()
    await until(lambda: "cannot be reached" in discovery.problem)
    before = discovery.staleness()
    await until(lambda: discovery.staleness() > before + 0.1)
    assert len(discovery.told) == 1


async def test_a_token_is_read_again(cluster, discover, until, tmp_path):
    token = tmp_path / "token"
    token.write_text("first\n")
    cluster.faults.tokens = {"first"}
    fill(cluster, 1)
    discovery = discover(user={"tokenFile": str(token)})
    await until(lambda: discovery.addresses == [address(0)])
    cluster.faults.tokens = {"second"}
    cluster.end_streams()
    fill(cluster, 1, start=1)
    await until(lambda: discovery.failures["unauthorized"])
    assert discovery.problem == "401 Unauthorized: Unauthorized; let the token be one that the API server takes"
    token.unlink()
    await until(lambda: "token cannot be read" in discovery.problem)
    token.write_text("second\n")
    await until(lambda: discovery.addresses == [address(0), address(1)])
    await until(lambda: not discovery.problem)


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_what_is_not_allowed_is_said_with_its_remedy(cluster, discover, until, verb):
    cluster.faults.forbidden = {(verb, "pods")}
    with capture_logs() as logs:
        discovery = discover()
        await until(lambda: discovery.failures["forbidden"] > 2 and discovery.problem)
        assert discovery.problem == (
            f'403 Forbidden: pods is forbidden: User "me" cannot {verb} resource "pods"; '
            "let a Role of the picker's ServiceAccount get, list and watch pods"
        )
        if verb == "list":
            await until(lambda: any("cannot be asked" in line["event"] for line in logs))
    assert bool(discovery.told) == (verb == "watch")
    cluster.faults.clear()
    fill(cluster, 1)
    await until(lambda: discovery.addresses == [address(0)])


async def test_the_role_that_is_shipped_is_enough(cluster, discover, until):
    documents = yaml.safe_load_all((Path(__file__).parents[3] / "manifests/base/access.yaml").read_text())
    rules = next(document for document in documents if document["kind"] == "Role")["rules"]
    allowed = {(verb, plural) for rule in rules for plural in rule["resources"] for verb in rule["verbs"]}
    everything = itertools.product(("get", "list", "watch", "create"), ("pods", "inferencepools"))
    cluster.faults.forbidden = set(everything) - allowed
    fill(cluster, 1)
    cluster.apply(pool("pool"))
    discovery = discover(source="pool")
    await until(lambda: discovery.addresses == [address(0)] and len(cluster.streams) == 2)
    fill(cluster, 1, start=1)
    await until(lambda: discovery.addresses == [address(0), address(1)])
    assert (discovery.failures, set(cluster.requests) <= allowed) == ({}, True)


async def test_a_kind_that_is_not_there_is_said_with_its_remedy(cluster, discover, until):
    for key in [key for key in cluster.storage.resources if key[2] == "inferencepools"]:
        del cluster.storage.resources[key]
    discovery = discover(source="pool")
    await until(lambda: discovery.failures["not_found"])
    assert discovery.problem == (
        "404 NotFound: the server could not find the requested resource; apply the custom resource definitions of "
        "inference.networking.k8s.io, or name the group that is there"
    )
    assert discovery.told == []


async def test_a_server_that_fails_is_not_asked_all_the_time(cluster, discover):
    cluster.faults.refuse(500, times=10_000)
    discovery = discover(watch=WatchSettings(shortest_pause=0.05, longest_pause=10.0))
    await asyncio.sleep(1.5)
    assert 3 <= discovery.failures["server_error"] <= 7


async def test_redirects_are_not_followed(cluster, discover, until):
    cluster.faults.refuse(302, times=3, body="")
    fill(cluster, 1)
    discovery = discover()
    await until(lambda: discovery.addresses == [address(0)])
    assert discovery.failures == {"refused": 3}


async def test_odd_pods_are_counted(cluster, discover, until):
    cluster.apply(pod("a", "10.0.0.1", annotations={"picker/runtime": "nonsense"}))
    cluster.apply(pod("b", ""))
    discovery = discover()
    await until(lambda: discovery.addresses == ["10.0.0.1:8000"])
    assert discovery.odd == {"bad_annotation": 1, "no_address": 1}


@pytest.mark.parametrize("seed", range(6))
async def test_any_sequence_of_faults_ends_with_what_the_server_has(cluster, discover, until, seed):
    """The same as for the watch alone, over real connections, in which pieces arrive as they like."""
    dice = random.Random(seed)
    fill(cluster, 5)
    source = "pool" if seed % 2 else None
    cluster.apply(pool("pool"))
    discovery = discover(silence=0.2, request=0.2, **({"source": source} if source else {}))
    there = set(range(5))

    async def refuse(_):
        cluster.faults.refuse(dice.choice((401, 403, 404, 410, 429, 500, 503)), times=dice.randint(1, 4), retry_after=1)

    async def compact(_):
        cluster.storage.compact()

    faults = [outage, cut, ended, hung, expired_frame, error_frame, other_error_frame, half_a_frame, garbage]
    faults += [throttled, unavailable, slow, refuse, compact]
    for _ in range(12):
        await dice.choice(faults)(cluster)
        there.add(100) if "pod-0100" in names(cluster) else there.discard(100)
        for _ in range(dice.randint(0, 5)):
            number = dice.randrange(12)
            if number in there:
                drop(cluster, number)
                there.discard(number)
            else:
                fill(cluster, 1, start=number)
                there.add(number)
            await asyncio.sleep(dice.random() * 0.02)
        if dice.random() < 0.3:
            cluster.faults.clear()
    cluster.faults.clear()
    await until(lambda: discovery.addresses == [address(number) for number in sorted(there)])


def names(cluster):
    return {found["metadata"]["name"] for found in cluster.storage.all(cluster.resource("pods"))}
