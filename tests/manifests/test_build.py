"""Everything builds, is what an API server stores, and agrees with itself."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.manifests.builds import MANIFESTS, ROOT, VERSIONS, build, identity, kustomizations, schema_problems
from tests.manifests.reading import pod_templates
from tests.manifests.rules import problems

NAMES = [path.relative_to(MANIFESTS).as_posix().removeprefix("overlays/") for path in kustomizations()]
INSTALL = MANIFESTS / "install.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_it_builds_and_agrees_with_itself(name):
    assert problems(build(name)) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_an_api_server_takes_every_object(name, version):
    documents = build(name)
    assert [problem for document in documents for problem in schema_problems(document, version)] == []
    identities = [identity(document) for document in documents]
    assert len(identities) == len(set(identities))


def test_what_is_made_of_other_files_is_as_they_are_now():
    """If not: make manifests."""
    made = runpy.run_path(str(ROOT / "scripts/build_manifests.py"))
    assert INSTALL.read_text() == made["install"]()
    assert (MANIFESTS / "components/envoy/envoy.yaml").read_text() == made["envoy"]()


def test_kubectl_apply_reads_the_directory_as_it_is():
    """Without a cluster, by a command that reads files as `apply` does."""
    command = [Path(sys.executable).with_name("kubectl"), "label", "--local", "-f", MANIFESTS, "-o", "name", "a=b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(build("base"))
    assert done.stdout.split()[0] == "namespace/inference"


def test_every_component_is_in_an_overlay():
    used = {
        Path(component).name
        for path in (MANIFESTS / "overlays").rglob("kustomization.yaml")
        for component in yaml.safe_load(path.read_text()).get("components", ())
    }
    assert used == {path.name for path in (MANIFESTS / "components").iterdir()}


def test_every_file_is_part_of_a_build():
    """No file is left over; what generators and patches read counts."""
    used: set[Path] = set()
    for path in MANIFESTS.rglob("kustomization.yaml"):
        directory = path.parent
        content = yaml.safe_load(path.read_text())
        names = [*content.get("resources", ()), *(patch.get("path") for patch in content.get("patches", ()))]
        names += [name for generator in content.get("configMapGenerator", ()) for name in generator["files"]]
        used |= {directory / name for name in names if name and (directory / name).is_file()}
    present = {path for path in MANIFESTS.rglob("*") if path.is_file()}
    others = {MANIFESTS / "README.md", INSTALL, *MANIFESTS.rglob("kustomization.yaml")}
    assert present - others == used


def test_images_have_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in NAMES:
        for template in pod_templates(build(name)).values():
            for container in template["spec"]["containers"]:
                repository, _, tag = container["image"].rpartition(":")
                assert repository, container["image"]
                assert tag not in {"", "latest"}
                if repository.rpartition("/")[2] == "picker":
                    assert tag == version


def test_everything_that_has_to_be_changed_says_so():
    """Where a build has a model, a namespace of others, or an image, a comment says CHANGE."""
    text = INSTALL.read_text()
    for line in (
        "image: picker:",
        "selector: inference-serving=true",
        "values: [envoy-gateway-system",
        "values: [monitoring]",
    ):
        before = text[: text.index(line)].splitlines()
        assert any("CHANGE" in comment for comment in before[-5:]), line
