"""Small readers of manifests, and what the picker of a build runs with."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from picker.app import flags
from picker.app.config import Config, load
from tests.manifests.builds import Document

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def of_kind(documents: list[Document], *kinds: str) -> Iterator[Document]:
    return (document for document in documents if document["kind"] in kinds)


def dig(document: Any, *path: str | int) -> Any:
    """What is at a path; None if something on the way is missing."""
    for key in path:
        if isinstance(document, dict):
            document = document.get(key)
        elif isinstance(document, list) and isinstance(key, int) and key < len(document):
            document = document[key]
        else:
            return None
    return document


def size(quantity: str) -> int:
    """A quantity of Kubernetes in bytes."""
    number, unit = re.fullmatch(r"(\d+)(\D*)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit]


def seconds(duration: str | None) -> float:
    """A duration of the Gateway API; NaN if there is none."""
    if duration is None:
        return float("nan")
    units = {"h": 3600, "m": 60, "s": 1, "ms": 0.001}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|h|m|s)", duration))


def pod_templates(documents: list[Document]) -> dict[str, Document]:
    """By the name of the Deployment."""
    return {each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(documents, "Deployment")}


def picker_config(documents: list[Document]) -> Config:
    """What the picker of a build runs with: its ConfigMap, and the flags of its Deployment, which go before it."""
    (config,) = [each for each in of_kind(documents, "ConfigMap") if "picker.yaml" in each["data"]]
    (container,) = pod_templates(documents)["picker"]["spec"]["containers"]
    command, *arguments = container["args"]
    assert command == "serve"
    parser = ArgumentParser()
    flags.add_arguments(parser)
    environment = {
        each["name"]: config["metadata"]["namespace"]
        for each in container.get("env", ())
        if dig(each, "valueFrom", "fieldRef", "fieldPath") == "metadata.namespace"
    }
    given = flags.read(parser.parse_args(arguments), environment)
    assert given.path is not None
    volume = config["metadata"]["name"]
    (mount,) = [
        mount["mountPath"]
        for mount in container["volumeMounts"]
        for each in pod_templates(documents)["picker"]["spec"]["volumes"]
        if each["name"] == mount["name"] and dig(each, "configMap", "name") == volume
    ]
    assert str(given.path) == f"{mount}/picker.yaml"
    return load(config["data"]["picker.yaml"], given.overrides).config
