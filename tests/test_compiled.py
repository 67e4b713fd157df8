"""What the compiler asks of the modules that it compiles, and that tests run with those that they are meant for."""

from __future__ import annotations

import ast
import os
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["picker"]["compiled"]


def test_all_of_the_request_path_is_compiled_or_nothing():
    suffixes = {Path(import_module(path[:-3].replace("/", ".")).__file__).suffix for path in COMPILED}
    assert suffixes == {".so" if os.environ.get("REQUEST_PATH") == "compiled" else ".py"}


@pytest.mark.parametrize("path", COMPILED)
def test_a_compiled_module_defines_no_structs(path):
    tree = list(ast.walk(ast.parse((ROOT / path).read_text())))
    imports = [node for node in tree if isinstance(node, ast.ImportFrom) and node.module == "msgspec"]
    structs = {each.asname or each.name for node in imports for each in node.names if each.name == "Struct"}
    for node in tree:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            assert not bases & {*structs, "msgspec.Struct"}, (
                f"{node.name}: options of a class are lost when it is compiled"
            )


@pytest.mark.parametrize("path", COMPILED)
def test_errors_of_different_types_have_names_of_their_own(path):
    """The compiler gives a name the type of the first error that is bound to it, and a TypeError to the next."""
    for function in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            types: dict[str, str] = {}
            for handler in ast.walk(function):
                if isinstance(handler, ast.ExceptHandler) and handler.name is not None and handler.type is not None:
                    kind = ast.unparse(handler.type)
                    assert types.setdefault(handler.name, kind) == kind, f"{function.name}: {handler.name}"


def test_no_other_class_derives_from_a_compiled_one():
    compiled = {path[:-3].replace("/", ".") for path in COMPILED}
    for path in (ROOT / "picker").rglob("*.py"):
        if str(path.relative_to(ROOT)) in COMPILED:
            continue
        tree = list(ast.walk(ast.parse(path.read_text())))
        imports = [node for node in tree if isinstance(node, ast.ImportFrom) and node.module in compiled]
        names = {each.asname or each.name for node in imports for each in node.names}
        for node in tree:
            if isinstance(node, ast.ClassDef):
                assert names.isdisjoint(map(ast.unparse, node.bases)), f"{path}: {node.name}"
