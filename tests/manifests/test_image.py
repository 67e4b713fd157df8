"""The image's build, without an engine that builds images: its steps are taken one by one in a directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.manifests.builds import ROOT, build
from tests.manifests.reading import pod_templates

COMPILER = shutil.which("cc")
OFFLINE = "--no-index --no-deps --no-build-isolation"


def instructions() -> list[list[tuple[str, str]]]:
    """Of each stage, the instructions with their arguments."""
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    stages: list[list[tuple[str, str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            stages.append([])
        if name:
            stages[-1].append((name, rest.strip()))
    return stages


def only(stage: list[tuple[str, str]], name: str) -> str:
    (found,) = [rest for each, rest in stage if each == name]
    return found


def context(directory: Path) -> Path:
    """What an engine would be sent: the repository's files that .dockerignore lets through."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    for rule in rules[1:]:
        if rule.startswith("!"):
            source = ROOT / rule[1:]
            if source.is_dir():
                ignore = shutil.ignore_patterns(*(each.removeprefix("**/") for each in rules if each.startswith("**/")))
                shutil.copytree(source, directory / rule[1:], ignore=ignore)
            else:
                shutil.copy(source, directory / rule[1:])
    return directory


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The file system of the build stage after its steps, below a directory."""
    root = tmp_path_factory.mktemp("root")
    sent = context(tmp_path_factory.mktemp("context"))
    stage = instructions()[0]
    workdir = root / only(stage, "WORKDIR").lstrip("/")
    workdir.mkdir(parents=True)
    for name, rest in stage:
        if name == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                if (sent / source).is_dir():
                    shutil.copytree(sent / source, workdir / target)
                else:
                    shutil.copy(sent / source, workdir / target)
        elif name == "RUN":
            for command in rest.split("&&"):
                run(command, workdir, root)
    return root


def run(command: str, workdir: Path, root: Path) -> None:
    """One command of a RUN step. Packages come from this environment in the place of an index."""
    words = [str(root) + word if word.startswith("/opt/") else word for word in shlex.split(command)]
    words = [
        match
        for word in words
        for match in (map(str, root.glob(word.removeprefix(f"{root}/"))) if "*" in word else [word])
    ]
    environment = dict(os.environ)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if "PICKER_COMPILE" in environment:
        # Optimising takes half a minute and changes nothing that is tested here.
        environment["PICKER_COMPILE"] = "0" if COMPILER else ""
    if words[0] == "python":
        words[0] = sys.executable
    if "install" in words:
        place = words.index("install") + 1
        words[place:place] = OFFLINE.split()
        give_dependencies(root)
    done = subprocess.run(words, cwd=workdir, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def give_dependencies(root: Path) -> None:
    """Let the new environments see the packages of this one, but not the picker that is installed in it."""
    (here,) = [path for path in site.getsitepackages() if path.endswith("site-packages")]
    for packages in root.glob("opt/*/lib/python3*/site-packages"):
        (packages / "dependencies.pth").write_text(f"import sys; sys.path.append({here!r})\n")


def picker(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    entry = json.loads(only(instructions()[-1], "ENTRYPOINT"))
    command = [str(root) + entry[0], *entry[1:], *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_the_entry_point_is_the_picker_of_the_image(image):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = picker(image, "--version")
    assert (done.returncode, done.stdout) == (0, f"picker {version}\n"), done.stderr
    (module,) = image.glob("opt/picker/lib/python3*/site-packages/picker/__init__.py")
    assert module.is_file()
    assert not list(image.glob("opt/picker/lib/python3*/site-packages/pip"))


@pytest.mark.skipif(not COMPILER, reason="there is no C compiler, as the image's build has one")
def test_the_request_path_of_the_image_is_compiled(image):
    (scheduler,) = image.glob("opt/picker/lib/python3*/site-packages/picker/core/scheduling/scheduler.*.so")
    assert (scheduler.parent / "scheduler.py").is_file(), "tracebacks show its lines"
    program = "from picker.core.scheduling import scheduler; print(scheduler.__file__)"
    command = [str(image / "opt/picker/bin/python"), "-I", "-c", program]
    done = subprocess.run(command, cwd=image, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(scheduler)


def test_the_image_checks_the_shipped_configuration(image, tmp_path):
    (config,) = [each for each in build("base") if each["kind"] == "ConfigMap"]
    path = tmp_path / "picker.yaml"
    path.write_text(config["data"]["picker.yaml"])
    done = picker(image, "check", "--config", str(path))
    assert done.returncode == 0, done.stderr
    effective = yaml.safe_load(done.stdout)
    assert effective["endpoints"]["kubernetes"]["selector"] == "inference-serving=true"
    command = json.loads(only(instructions()[-1], "CMD"))
    assert command == pod_templates(build("base"))["picker"]["spec"]["containers"][0]["args"]


def test_the_image_takes_the_flags_of_an_endpoint_picker(image):
    done = picker(image, "--pool-name=p", "--pool-group=nonsense")
    assert done.returncode == 2
    assert '--pool-group: "nonsense": is not a group of InferencePools' in done.stderr


def test_the_image_holds_the_demo_s_envoy_configurations(image):
    names = {path.name for path in image.glob("opt/picker/lib/python3*/site-packages/picker/app/_envoy/*.yaml")}
    assert {"buffered.yaml", "full-duplex.yaml"} <= names


def test_everything_that_the_picker_needs_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.split(";")[0].strip() for line in (ROOT / "requirements.lock").read_text().splitlines()]
    pinned = dict(line.split("==") for line in lines if re.match(r"[A-Za-z0-9]", line))
    for text in project["dependencies"]:
        requirement = Requirement(text)
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text
    installs = [command for command in only(instructions()[0], "RUN").split("&&") if " install " in command]
    assert len(installs) == 2
    assert all("--constraint requirements.lock" in command for command in installs)


def test_the_context_has_no_secrets_and_nothing_for_tests(tmp_path):
    names = {path.name for path in context(tmp_path).iterdir()}
    assert names == {"LICENSE", "README.md", "pyproject.toml", "requirements.lock", "envoy", "picker", "scripts"}
    assert not list(tmp_path.rglob("__pycache__"))
    copied = [word for name, rest in instructions()[0] if name == "COPY" for word in shlex.split(rest)[:-1]]
    assert set(copied) == names


def test_the_image_is_not_root_and_small():
    *builders, last = instructions()
    assert len(builders) == 1
    user = only(last, "USER").split(":")
    assert all(part.isdecimal() and int(part) > 0 for part in user)
    pod = pod_templates(build("base"))["picker"]["spec"]["securityContext"]
    assert [int(part) for part in user] == [pod["runAsUser"], pod["runAsGroup"]]
    assert [rest for name, rest in last if name in {"RUN", "ADD"}] == []
    assert only(last, "COPY") == "--from=build /opt/picker /opt/picker"
    builder, base = [only(stage, "FROM").split()[0] for stage in instructions()]
    assert fnmatch(base, "python:3.1[1-9]-slim-*")
    assert builder == base.replace("-slim", ""), "what is compiled for one Python fits no other"


def test_the_ports_are_those_of_the_pod():
    (container,) = pod_templates(build("base"))["picker"]["spec"]["containers"]
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert set(only(instructions()[-1], "EXPOSE").split()) == ports
