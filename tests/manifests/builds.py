"""The manifests as `kubectl` builds them, and the schemas that they have to satisfy."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.manifests.crds import SCHEMAS

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
VERSIONS = ("1.31", "1.34", "1.37")
"""Kubernetes versions: one that clouds have just given up, one that most run, and the newest."""

Document = dict[str, Any]


def kustomizations() -> list[Path]:
    """The directories that can be built; components are built as parts of overlays."""
    return sorted(path.parent for path in MANIFESTS.rglob("kustomization.yaml") if "components" not in path.parts)


@cache
def _built(directory: Path) -> str:
    command = [Path(sys.executable).with_name("kubectl"), "kustomize", directory]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return done.stdout


def build(name: str) -> list[Document]:
    """The objects of `base`, `engines` or an overlay."""
    directory = MANIFESTS / name if (MANIFESTS / name).is_dir() else MANIFESTS / "overlays" / name
    return [document for document in yaml.safe_load_all(_built(directory)) if document]


def one(documents: list[Document], kind: str, name: str) -> Document:
    """The object of that kind and name."""
    (found,) = [each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def identity(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def schema_problems(document: Document, version: str = VERSIONS[-1]) -> list[str]:
    """What a strict API server would say: of that Kubernetes version, or of the custom resource's owner."""
    api_version, kind = document.get("apiVersion", ""), document.get("kind", "")
    validator = _custom(api_version, kind) or _native(api_version, kind, version)
    if validator is None:
        return [f"there is no schema of {api_version!r} {kind!r}"]
    return [f"{identity(document)}: {error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@cache
def _custom(api_version: str, kind: str) -> Draft202012Validator | None:
    schema = SCHEMAS.get((api_version, kind))
    return None if schema is None else Draft202012Validator(schema)


@cache
def _native(api_version: str, kind: str, version: str) -> Draft202012Validator | None:
    group, _, name = api_version.rpartition("/")
    short = f"{group.partition('.')[0]}-{name}" if group else name
    directory = (
        importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    )
    path = directory / f"{kind.lower()}-{short}.json"
    if not path.is_file():
        return None
    schema = json.loads(path.read_text())
    return Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry:
    directory = (
        importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    )
    contents = json.loads((directory / "_definitions.json").read_text())
    return Resource.from_contents(contents) @ Registry()
