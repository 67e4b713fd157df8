"""The reference of all settings as Markdown, made from the types that read them."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.inspect import EnumType, FloatType, IntType, Metadata, type_info
from msgspec.structs import FieldInfo

from picker.app.config_settings import Config
from picker.core.plugins.registry import PLUGINS, Plugin
from picker.core.strict import child

_HEAD = "| setting | type | default | meaning |\n|---|---|---|---|"
_Row = tuple[str, str, str, str]


def reference_markdown() -> str:
    """A table for each section of the configuration, and for the arguments of each plugin that has some."""
    docstrings = field_docstrings(Config)
    meanings = {field.encode_name: docstrings[field.name] for field in msgspec.structs.fields(Config)}
    sections = groupby(_rows(Config, ""), lambda row: row[0].partition(".")[0])
    parts = [_table(f"`{name}`", meanings[name], rows) for name, rows in sections]
    parts.append("### Plugins\n\n" + _plugins())
    for name, plugin in PLUGINS.items():
        if plugin.args.__struct_fields__:
            about = inspect.getdoc(plugin.args) or ""
            parts.append(_table(f"`{name}`", about, _rows(plugin.args, "")))
    return "\n\n".join(parts) + "\n"


def _table(title: str, about: str, rows: Iterable[_Row]) -> str:
    lines = (
        f"| `{path}` | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for path, *cells in rows
    )
    return "\n".join([f"### {title}", "", about, "", _HEAD, *lines])


def _rows(kind: type[Struct], path: str) -> Iterator[_Row]:
    """Path, type, default and meaning of each setting, with those of nested sections in their place."""
    meanings = field_docstrings(kind)
    for field in msgspec.structs.fields(kind):
        here = child(path, field.encode_name)
        nested = list(_structs(field.type))
        listed = tuple in (get_origin(field.type), *map(get_origin, get_args(field.type)))
        if not nested or listed:
            yield here, _type(field.type), _default(field), meanings.get(field.name, "")
        for inner in nested:
            yield from _rows(inner, here + "[]" if listed else here)


def _structs(kind: Any) -> Iterator[type[Struct]]:
    if isinstance(kind, type) and issubclass(kind, Struct):
        if kind is not Struct:
            yield kind
    elif get_origin(kind) in (UnionType, tuple):
        for inner in get_args(kind):
            yield from _structs(inner)


def _type(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if kind is Struct:
        return "mapping"
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return "list" if list(_structs(inner)) else f"list of {_type(inner)}"
    if get_origin(kind) is Mapping:
        return f"mapping to {_type(get_args(kind)[1])}"
    info = type_info(kind)
    if isinstance(info, Metadata):
        info = info.type
    match info:
        case EnumType():
            return ", ".join(f"`{member}`" for member in info.cls)
        case IntType() | FloatType():
            return " ".join(filter(None, ("int" if isinstance(info, IntType) else "number", _range(info))))
    return {"StrType": "text", "BoolType": "true or false"}[type(info).__name__]


def _range(info: IntType | FloatType) -> str:
    bounds = {"> ": info.gt, "≥ ": info.ge, "< ": info.lt, "≤ ": info.le}
    return ", ".join(f"{sign}{bound}" for sign, bound in bounds.items() if bound is not None)


def _default(field: FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    if value is None:
        return "of the profile"
    return f"`{json.dumps(msgspec.to_builtins(value))}`"


def _plugins() -> str:
    lines = (f"| `{name}` | {', '.join(_roles(plugin))} | {_summary(plugin)} |" for name, plugin in PLUGINS.items())
    return "\n".join(["| plugin | enabled under | what it does |", "|---|---|---|", *lines])


def _roles(plugin: Plugin) -> list[str]:
    return [role for role, part in (("Filter", plugin.filter), ("Score", plugin.scorer)) if part]


def _summary(plugin: Plugin) -> str:
    """The first line of the module that the plugin stands in, without its name."""
    part = plugin.filter or plugin.scorer
    module = inspect.getmodule(plugin.producer or part)
    assert module is not None  # noqa: S101
    assert module.__file__ is not None  # noqa: S101
    # A compiled module has no docstring; its source stands beside it.
    source = Path(module.__file__).parent / (module.__name__.rpartition(".")[2] + ".py")
    line = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
    return line.partition(": ")[2].replace("|", "\\|")


def field_docstrings(kind: type[Struct]) -> dict[str, str]:
    """The docstrings under the fields of a struct, each on one line."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)  # noqa: S101
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value)).replace("\n", " ")
    return found
