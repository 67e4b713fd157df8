"""Which pods become endpoints. The pods are in the form of the API reference of `v1` Pod."""

from __future__ import annotations

import gc
import json
import random
import sys

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.endpoints import KvEvents
from picker.core.kubernetes.endpoints import EndpointFinder
from picker.core.kubernetes.objects import MalformedError
from picker.core.kubernetes.pods import read_pod
from picker.core.kubernetes.watch import Watch, WatchSettings

ENGINES = ("vllm", "sglang")
STARTED = "2026-08-14T10:00:00Z"
STARTED_UNIX = 1786701600.0  # date -d 2026-08-14T10:00:00Z +%s


def pod(name="model-0", ip="10.0.0.1", **changes):
    found = {
        "metadata": {
            "name": name,
            "namespace": "models",
            "uid": "0b1c",
            "resourceVersion": "17",
            "creationTimestamp": "2026-08-14T09:59:00Z",
            "labels": {"app": "model", "llm-d.ai/role": "decode"},
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}" * 1000},
        },
        "spec": {
            "nodeName": "node-a",
            "containers": [{"name": "engine", "image": "vllm", "ports": [{"containerPort": 8000, "protocol": "TCP"}]}],
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "ContainersReady", "status": "True"},
                {"type": "Ready", "status": "True"},
            ],
            "containerStatuses": [
                {
                    "name": "engine",
                    "image": "vllm",
                    "imageID": "vllm",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": STARTED}},
                }
            ],
        },
    }
    for path, value in changes.items():
        *way, last = path.split("__")
        holder = found
        for part in way:
            holder = holder[part]
        holder[last] = value
    return found


def facts(found):
    return read_pod(json.dumps(found).encode())


def endpoints(*pods, ports=(8000,)):
    return EndpointFinder(ports, "vllm", ENGINES).find(by_name(pods))


def by_name(pods):
    return {one["metadata"]["name"]: facts(one) for one in pods}


def one(found, **more):
    (endpoint,) = endpoints(found, **more).endpoints
    return endpoint


def condition(kind, status):
    return {"type": kind, "status": status}


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.36"])
def test_the_pods_of_these_tests_are_pods(version):
    """Their fields are checked against the published schemas, so that no misspelt one is read here."""
    gates = [{"conditionType": "example.com/warm"}]
    found = pod(spec__hostNetwork=True, spec__readinessGates=gates)
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **found}, version, strict=True)


def test_a_ready_pod_is_an_endpoint():
    endpoint = one(pod())
    assert endpoint.identity == ("models", "model-0", "10.0.0.1:8000")
    assert endpoint.engine == "vllm"
    assert endpoint.labels == {"app": "model", "llm-d.ai/role": "decode"}
    assert endpoint.started_at == STARTED_UNIX
    assert (endpoint.runtime, endpoint.kv_events, endpoint.rank) == ("", KvEvents(), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata__deletionTimestamp": "2026-08-14T11:00:00Z"},
        {"status__phase": "Pending"},
        {"status__phase": "Failed"},
        {"status__phase": "Succeeded"},
        {"status__conditions": [condition("Ready", "False")]},
        {"status__conditions": [condition("Ready", "Unknown")]},  # its node does not answer
        {"status__conditions": [condition("ContainersReady", "True")]},
        {"status__conditions": None},
        {"status": {}},
        {"spec__readinessGates": [{"conditionType": "example.com/warm"}]},
        {
            "spec__readinessGates": [{"conditionType": "example.com/warm"}],
            "status__conditions": [condition("Ready", "True"), condition("example.com/warm", "False")],
        },
    ],
)
def test_a_pod_that_takes_no_requests_is_none(changes):
    assert endpoints(pod(**changes)).endpoints == ()


def test_a_readiness_gate_that_is_fulfilled_lets_requests_in():
    gates = [{"conditionType": "example.com/warm"}]
    conditions = [condition("Ready", "True"), condition("example.com/warm", "True")]
    assert one(pod(spec__readinessGates=gates, status__conditions=conditions))


@pytest.mark.parametrize("ip", ["", "0.0.0.0", "nowhere", "10.0.0.1:80", "224.0.0.1", "fe80::1%eth0"])
def test_a_pod_without_an_address_is_odd(ip):
    found = endpoints(pod(ip=ip))
    assert (found.endpoints, found.odd) == ((), {"no_address": 1})


def test_addresses_are_spelt_as_envoy_spells_them():
    assert one(pod(ip="fd00:0::0a")).address == "[fd00::a]:8000"
    dual = [{"ip": "10.0.0.9"}, {"ip": "fd00::9"}]
    assert one(pod(status__podIPs=dual)).address == "10.0.0.9:8000"
    assert one(pod(status__podIPs=None)).address == "10.0.0.1:8000"


def test_each_port_is_a_rank():
    found = endpoints(pod(), ports=(8000, 8001, 8002)).endpoints
    assert [(endpoint.address, endpoint.rank) for endpoint in found] == [
        ("10.0.0.1:8000", 0),
        ("10.0.0.1:8001", 1),
        ("10.0.0.1:8002", 2),
    ]


def containers(**ports):
    return [{"name": name, "ports": [{"containerPort": port} for port in own]} for name, own in ports.items()]


def test_more_endpoints_than_can_be_are_counted():
    pods = {str(number): facts(pod(str(number), f"10.0.{number // 200}.{number % 200}")) for number in range(1300)}
    found = EndpointFinder(range(8000, 8008), "vllm", ENGINES).find(pods)
    assert (len(found.endpoints), found.odd) == (10_000, {"too_many": 400})


def test_pods_on_one_node_network_have_the_ports_that_they_say():
    a = pod("a", spec__hostNetwork=True, spec__containers=containers(engine=[8000]))
    b = pod("b", spec__hostNetwork=True, spec__containers=containers(engine=[8001]))
    found = endpoints(a, b, ports=(8000, 8001))
    assert {(endpoint.name, endpoint.address) for endpoint in found.endpoints} == {
        ("a", "10.0.0.1:8000"),
        ("b", "10.0.0.1:8001"),
    }
    assert found.odd == {"duplicate_address": 2}
    assert endpoints(b, a, ports=(8000, 8001)).endpoints == found.endpoints


def test_of_two_pods_that_say_the_same_port_the_younger_has_it():
    old = pod("z", metadata__creationTimestamp="2026-08-14T08:00:00Z")
    new = pod("a", metadata__creationTimestamp="2026-08-14T09:00:00Z")
    assert [endpoint.name for endpoint in endpoints(old, new).endpoints] == ["a"]
    assert [endpoint.name for endpoint in endpoints(new, old).endpoints] == ["a"]


@pytest.mark.parametrize(
    ("labels", "engine", "odd"),
    [
        ({}, "vllm", {}),
        ({"llm-d.ai/engine-type": "sglang"}, "sglang", {}),
        ({"inference.networking.k8s.io/engine-type": "SGLang"}, "sglang", {}),
        ({"llm-d.ai/engine-type": "trtllm-serve"}, "vllm", {"unknown_engine": 1}),
    ],
)
def test_engines(labels, engine, odd):
    found = endpoints(pod(metadata__labels=labels))
    assert (found.endpoints[0].engine, found.odd) == (engine, odd)


@pytest.mark.parametrize(
    ("annotations", "runtime", "events", "odd"),
    [
        ({"picker/runtime": ":9000"}, "10.0.0.1:9000", KvEvents(), {}),
        ({"picker/runtime": "10.0.0.7:9000"}, "10.0.0.7:9000", KvEvents(), {}),
        ({"picker/runtime": "9000"}, "", KvEvents(), {"bad_annotation": 1}),
        ({"picker/runtime": ":99999"}, "", KvEvents(), {"bad_annotation": 1}),
        ({"picker/kv-events": "tcp://*:5557"}, "", KvEvents("tcp://10.0.0.1:5557"), {}),
        ({"picker/kv-events": "tcp://0.0.0.0:5557"}, "", KvEvents("tcp://10.0.0.1:5557"), {}),
        ({"picker/kv-events": "tcp://[::]:5557"}, "", KvEvents("tcp://10.0.0.1:5557"), {}),
        ({"picker/kv-events": "tcp://:5557"}, "", KvEvents("tcp://10.0.0.1:5557"), {}),
        ({"picker/kv-events": "tcp://events:5557"}, "", KvEvents("tcp://events:5557"), {}),
        ({"picker/kv-events": "ipc:///etc/passwd"}, "", KvEvents(), {"bad_annotation": 1}),
        ({"picker/kv-events": "tcp://*:5557/x"}, "", KvEvents(), {"bad_annotation": 1}),
        ({"picker/kv-events": ":5557"}, "", KvEvents(), {"bad_annotation": 1}),
        (
            {
                "picker/kv-events": "tcp://*:5557",
                "picker/kv-events-replay": "tcp://*:6557",
                "picker/kv-events-topic": "kv-events",
            },
            "",
            KvEvents("tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557", "kv-events"),
            {},
        ),
    ],
)
def test_annotations(annotations, runtime, events, odd):
    found = endpoints(pod(metadata__annotations=annotations))
    endpoint = found.endpoints[0]
    assert (endpoint.runtime, endpoint.kv_events, found.odd) == (runtime, events, odd)


def test_annotations_whose_last_rank_would_have_no_port_are_bad():
    found = endpoints(pod(metadata__annotations={"picker/kv-events": "tcp://*:65535"}), ports=(8000, 8001))
    assert [endpoint.kv_events for endpoint in found.endpoints] == [KvEvents(), KvEvents()]
    assert found.odd == {"bad_annotation": 1}


def running(**started):
    return [{"name": name, "state": {"running": {"startedAt": at}}} for name, at in started.items()]


@pytest.mark.parametrize(
    ("spec", "statuses", "expected"),
    [
        # The one that listens on the port counts, though a sidecar is younger.
        (containers(engine=[8000], proxy=[15001]), running(engine=STARTED, proxy="2026-08-14T12:00:00Z"), STARTED_UNIX),
        # Nobody says it listens there: Kthena's rule, any but the container named runtime, the youngest of them.
        (
            containers(engine=[], runtime=[]),
            running(engine=STARTED, runtime="2026-08-14T12:00:00Z"),
            STARTED_UNIX,
        ),
        (containers(a=[], b=[]), running(a="2026-08-14T09:00:00Z", b=STARTED), STARTED_UNIX),
        (containers(runtime=[]), running(runtime=STARTED), STARTED_UNIX),
        (containers(engine=[8000]), [{"name": "engine", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}], None),
        (containers(engine=[8000]), None, None),
    ],
)
def test_when_the_engine_started(spec, statuses, expected):
    assert one(pod(spec__containers=spec, status__containerStatuses=statuses)).started_at == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": None},
        {"metadata__name": 7},
        {"metadata__labels": {"a": 1}},
        {"metadata__labels": ["a"]},
        {"spec__containers": {}},
        {"spec__containers": [{"name": "a", "ports": [{"containerPort": 0}]}]},
        {"status__conditions": [{"type": "Ready"}]},
        {"status__containerStatuses": running(engine="yesterday")},
        {"status": []},
    ],
)
def test_what_no_api_server_sends_is_malformed(changes):
    with pytest.raises(MalformedError):
        facts(pod(**changes))


def test_changes_that_mean_nothing_here_change_no_facts():
    heartbeat = [condition("Ready", "True"), {**condition("PodScheduled", "True"), "lastProbeTime": "later"}]
    changed = pod(metadata__resourceVersion="18", metadata__annotations={"other": "x"}, status__conditions=heartbeat)
    assert facts(changed) == facts(pod())


def test_found_again_is_what_is_found_afresh():
    finder = EndpointFinder((8000,), "vllm", ENGINES)
    pods = by_name([pod("a", "10.0.0.1"), pod("b", "10.0.0.2"), pod("c", "10.0.0.2", metadata__annotations=None)])
    first = finder.find(pods)
    assert finder.find(pods) == first
    pods["a"] = facts(pod("a", "10.0.0.3"))
    pods["b"] = facts(pod("b", "10.0.0.2", status__phase="Failed"))
    again = finder.find(pods)
    assert [(endpoint.name, endpoint.address) for endpoint in again.endpoints] == [
        ("a", "10.0.0.3:8000"),
        ("c", "10.0.0.2:8000"),
    ]
    assert (first.odd, again.odd) == ({"duplicate_address": 1}, {})
    del pods["c"]
    assert len(finder.find(pods).endpoints) == 1
    assert finder.find({}).endpoints == ()


def test_memory_is_flat_however_much_pods_change():
    """Counted in blocks that the interpreter has allocated, which knows no noise of the system."""
    watch = Watch(read_pod, {}, WatchSettings(), random.Random(1))
    finder = EndpointFinder((8000,), "vllm", ENGINES)
    pods = [pod(f"pod-{number}", f"10.0.0.{number}") for number in range(1, 51)]
    watch.page(json.dumps({"metadata": {"resourceVersion": "1"}, "items": pods}).encode(), 0.0)
    frames = [
        json.dumps({"type": "MODIFIED", "object": {**one, "status": {**one["status"], "phase": phase}}}).encode()
        for phase in ("Failed", "Running")
        for one in pods
    ]

    def churn(rounds):
        for _ in range(rounds):
            for line in frames:
                watch.frame(line, 0.0)
            assert len(finder.find(watch.objects).endpoints) == 50
        gc.collect()
        return sys.getallocatedblocks()

    before = churn(10)
    assert churn(100) - before < 200
    assert watch.frames == 11_000


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["10.0.0.1", "10.0.0.2"]),
            st.sampled_from(["2026-08-14T08:00:00Z", "2026-08-14T09:00:00Z"]),
            st.booleans(),
        ),
        max_size=6,
        unique_by=lambda chosen: chosen[0],
    ),
    st.randoms(use_true_random=False),
)
def test_no_address_is_there_twice_and_order_does_not_matter(chosen, rng):
    pods = [
        pod(name, ip, metadata__creationTimestamp=made, spec__containers=containers(engine=[8000] if says else []))
        for name, ip, made, says in chosen
    ]
    found = endpoints(*pods, ports=(8000, 8001)).endpoints
    addresses = [endpoint.address for endpoint in found]
    assert sorted(addresses) == sorted(f"{ip}:{port}" for ip in {ip for _, ip, *_ in chosen} for port in (8000, 8001))
    rng.shuffle(pods)
    assert endpoints(*pods, ports=(8000, 8001)).endpoints == found
