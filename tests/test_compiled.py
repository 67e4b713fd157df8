"""What the compiler asks of the modules that it compiles, and that tests run with those that they are meant for."""

from __future__ import annotations

import ast
import os
import tomllib
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["picker"]["compiled"]
# Before any test has run: Python 3.11 can fail to parse itself once in a process in which something was too deep.
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in (ROOT / "picker").rglob("*.py")}


def imported(tree: ast.Module, modules: Collection[str]) -> dict[str, str]:
    """What is imported from these modules: its name here, and its own."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in modules]
    return {each.asname or each.name: each.name for node in imports for each in node.names}


def bases(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, set(map(ast.unparse, node.bases))


def test_all_of_the_request_path_is_compiled_or_nothing():
    suffixes = {Path(import_module(path[:-3].replace("/", ".")).__file__).suffix for path in COMPILED}
    assert suffixes == {".so" if os.environ.get("REQUEST_PATH") == "compiled" else ".py"}


@pytest.mark.parametrize("path", COMPILED)
def test_a_compiled_module_defines_no_structs(path):
    structs = {name for name, own in imported(TREES[path], {"msgspec"}).items() if own == "Struct"}
    for name, above in bases(TREES[path]):
        assert not above & {*structs, "msgspec.Struct"}, f"{name}: options of a class are lost when it is compiled"


@pytest.mark.parametrize("path", COMPILED)
def test_errors_of_different_types_have_names_of_their_own(path):
    """The compiler gives a name the type of the first error that is bound to it, and a TypeError to the next."""
    for function in ast.walk(TREES[path]):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            types: dict[str, str] = {}
            for handler in ast.walk(function):
                if isinstance(handler, ast.ExceptHandler) and handler.name is not None and handler.type is not None:
                    kind = ast.unparse(handler.type)
                    assert types.setdefault(handler.name, kind) == kind, f"{function.name}: {handler.name}"


@pytest.mark.parametrize("path", sorted(TREES.keys() - set(COMPILED)))
def test_no_other_class_derives_from_a_compiled_one(path):
    names = imported(TREES[path], {each[:-3].replace("/", ".") for each in COMPILED})
    for name, above in bases(TREES[path]):
        assert names.keys().isdisjoint(above), name
