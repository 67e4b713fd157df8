"""`kubectl apply` of everything that is shipped: what is stored is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "manifests"
OVERLAYS = sorted(path.parent for path in MANIFESTS.glob("overlays/*/kustomization.yaml"))


def stored(cluster, wanted):
    """The object as the API server has it."""
    group, _, version = wanted["apiVersion"].rpartition("/")
    resource = next(
        one
        for one in cluster.storage.resources.values()
        if (one.group, one.version, one.kind) == (group, version, wanted["kind"])
    )
    metadata = wanted["metadata"]
    namespace = metadata.get("namespace", "default") if resource.namespaced else ""
    return cluster.storage.get(resource, namespace, metadata["name"])


def check(cluster, text):
    documents = [document for document in yaml.safe_load_all(text) if document]
    assert documents
    for wanted in documents:
        found = stored(cluster, wanted)
        for field in wanted.keys() - {"metadata"}:
            assert found[field] == wanted[field], (wanted["kind"], wanted["metadata"]["name"], field)
        assert wanted["metadata"].get("labels", {}) == found["metadata"].get("labels", {})


async def test_the_directory_as_it_is(cluster, kubectl):
    for _ in range(2):
        await kubectl("apply", "--validate=false", "-f", MANIFESTS)
        check(cluster, "---\n".join(path.read_text() for path in sorted(MANIFESTS.glob("*.yaml"))))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
async def test_overlays(cluster, kubectl, overlay):
    await kubectl("apply", "--validate=false", "-k", overlay)
    check(cluster, await kubectl("kustomize", overlay))
