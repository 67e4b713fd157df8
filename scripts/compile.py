"""Compiles the request path to C with mypyc: the modules that `tool.picker.compiled` of pyproject.toml lists.

The sources stay plain typed Python and do the same without it, for a fifth more CPU. Two ways in: a hook of the wheel's build,
which compiles where PICKER_COMPILE says an optimisation level (0 to 3), and `python scripts/compile.py DIRECTORY`,
which makes a compiled copy of the project there, for benchmarks and tests. A compiled module is never put beside its
source in the work tree, where it would hide later changes.

What mypyc asks of a module: no msgspec structs are defined in it, nobody replaces its functions or attributes from
outside, no class of another module that is not compiled derives from one of its classes, no slice of bytes ends before it
begins, which is a SystemError, and a tuple of equal items is not written as a product, which makes a variable of each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from contextlib import chdir
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def modules(root: Path) -> list[str]:
    """The paths of the modules to compile, from the project's root."""
    return list(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["picker"]["compiled"])


def compile_modules(root: Path, into: Path, level: str) -> list[Path]:
    """Compile into a directory; returns the extension modules there, each at the place of its source."""
    # What only a build that compiles needs is not imported by one that does not.
    from mypyc.build import mypycify  # noqa: PLC0415
    from setuptools import Distribution  # noqa: PLC0415
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as scratch, chdir(root):
        options = ["--config-file", "pyproject.toml", *modules(root)]
        extensions = mypycify(options, opt_level=level, group_name="picker", target_dir=scratch)
        command = build_ext(Distribution({"name": "picker", "ext_modules": extensions}))
        command.build_lib, command.build_temp, command.parallel = str(into), scratch, os.cpu_count()
        command.ensure_finalized()
        command.run()
    return sorted(into.rglob("*.so"))


class CompileHook(BuildHookInterface[Any]):
    """Puts compiled modules into a wheel, beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        level = os.environ.get("PICKER_COMPILE", "")
        if not level or version == "editable":
            return
        into = Path(self.directory) / "compiled"
        shutil.rmtree(into, ignore_errors=True)
        for path in compile_modules(Path(self.root), into, level):
            build_data["force_include"][str(path)] = str(path.relative_to(into))
        build_data["pure_python"], build_data["infer_tag"] = False, True


def copy(root: Path, to: Path) -> None:
    """Copy the project's files, and compile them unless that was done since they changed."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, text=True)
    for name in listed.splitlines():
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    sources = [root / "pyproject.toml", *(root / name for name in modules(root))]
    compiled = [path.stat().st_mtime for path in (to / "picker").rglob("*.so")]
    if len(compiled) < len(modules(root)) or min(compiled) < max(path.stat().st_mtime for path in sources):
        for path in to.rglob("*.so"):
            path.unlink()
        compile_modules(to, to, "3")


if __name__ == "__main__":
    copy(Path(__file__).parents[1], Path(sys.argv[1]).absolute())
