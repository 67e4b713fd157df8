"""`kubectl` itself against the fake API server: what it takes for a cluster is good enough for a client."""

from __future__ import annotations

import asyncio
import json

import yaml

DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "model", "namespace": "models", "labels": {"app": "model"}},
    "spec": {
        "selector": {"matchLabels": {"app": "model"}},
        "template": {
            "metadata": {"labels": {"app": "model"}},
            "spec": {
                "containers": [
                    {"name": "engine", "image": "engine:1", "env": [{"name": "A", "value": "1"}]},
                    {"name": "runtime", "image": "runtime:1"},
                ]
            },
        },
    },
}
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "models"}}
POOL = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "pool", "namespace": "models"},
    "spec": {"selector": {"matchLabels": {"app": "model"}}, "targetPorts": [{"number": 8000}]},
}
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "rockets.example.com"},
    "spec": {
        "group": "example.com",
        "scope": "Cluster",
        "names": {"plural": "rockets", "singular": "rocket", "kind": "Rocket"},
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
        ],
    },
}


def documents(*objects):
    return yaml.safe_dump_all(objects)


async def test_apply_creates_then_leaves_alone_then_changes(kubectl):
    apply = ("apply", "--validate=false", "-f", "-")
    objects = documents(NAMESPACE, DEPLOYMENT, POOL)
    out = await kubectl(*apply, stdin=objects)
    assert out.splitlines() == [
        "namespace/models created",
        "deployment.apps/model created",
        "inferencepool.inference.networking.k8s.io/pool created",
    ]
    assert {line.split()[-1] for line in (await kubectl(*apply, stdin=objects)).splitlines()} == {"unchanged"}

    changed = json.loads(json.dumps(DEPLOYMENT))
    containers = changed["spec"]["template"]["spec"]["containers"]
    containers[0]["image"] = "engine:2"
    containers[0]["env"].append({"name": "B", "value": "2"})
    pool = json.loads(json.dumps(POOL))
    pool["spec"]["targetPorts"] = [{"number": 8000}, {"number": 8001}]
    await kubectl(*apply, stdin=documents(changed, pool))
    for wanted in (changed, pool):
        kind = wanted["kind"].lower()
        stored = json.loads(await kubectl("get", kind, wanted["metadata"]["name"], "-n", "models", "-o", "json"))
        assert stored["spec"] == wanted["spec"]


async def test_server_side_apply_and_replace_and_delete(kubectl):
    await kubectl("apply", "--validate=false", "--server-side", "-f", "-", stdin=documents(NAMESPACE, POOL))
    await kubectl("replace", "--validate=false", "-f", "-", stdin=documents(POOL))
    assert await kubectl("get", "inferencepools", "-n", "models", "-o", "name") == (
        "inferencepool.inference.networking.k8s.io/pool\n"
    )
    await kubectl("delete", "inferencepool", "pool", "-n", "models")
    assert "NotFound" in await kubectl("get", "inferencepool", "pool", "-n", "models", fails=True)


async def test_a_definition_makes_a_new_kind(kubectl):
    rocket = {"apiVersion": "example.com/v1", "kind": "Rocket", "metadata": {"name": "r"}, "spec": {"stages": 3}}
    await kubectl("apply", "--validate=false", "-f", "-", stdin=documents(DEFINITION))
    await kubectl("apply", "--validate=false", "-f", "-", stdin=documents(rocket))
    assert (await kubectl("get", "rockets", "-o", "jsonpath={.items[*].spec.stages}")) == "3"


async def test_what_a_cluster_refuses(cluster, kubectl):
    apply = ("apply", "--validate=false", "-f", "-")
    assert "NotFound" in await kubectl(*apply, stdin=documents(POOL), fails=True)  # its namespace
    wrong = {**POOL, "apiVersion": "inference.networking.k8s.io/v7"}
    assert "no matches for kind" in await kubectl(*apply, stdin=documents(wrong), fails=True)
    cluster.faults.forbidden.add(("create", "namespaces"))
    assert "Forbidden" in await kubectl(*apply, stdin=documents(NAMESPACE), fails=True)
    cluster.faults.tokens = {"secret"}
    assert "logged in" in await kubectl("get", "namespaces", fails=True)


async def test_watching_by_label(cluster, kubectl, until):
    await kubectl("apply", "--validate=false", "-f", "-", stdin=documents(NAMESPACE))
    watching = asyncio.create_task(
        kubectl(
            "get",
            "deployments",
            "-n",
            "models",
            "-l",
            "app in (model)",
            "--watch-only",
            "-o",
            "name",
            "--request-timeout=3s",
        )
    )
    await until(lambda: cluster.streams)
    cluster.apply(DEPLOYMENT)
    cluster.apply({**DEPLOYMENT, "metadata": {**DEPLOYMENT["metadata"], "name": "other", "labels": {"app": "other"}}})
    await asyncio.sleep(0.2)
    await cluster.stop()
    assert (await watching).split() == ["deployment.apps/model"]
