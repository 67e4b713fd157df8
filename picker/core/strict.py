"""Read plain data into frozen structs, and say everything that is wrong with it at once.

Plain data is what a YAML or JSON document holds: mappings with text keys, lists, text, numbers, booleans, null.
Strict means: no unknown keys, no conversions but from whole numbers to `float`. Every field that a struct leaves
out of a document has its default; a section, list or mapping that is null counts as left out.

Field types may be structs, `tuple[X, ...]`, `Mapping[str, X]`, `bool`, `int`, `float`, `str`, `Any`, a `StrEnum`,
and a union of structs with one field each, of which a document has to name exactly one. `msgspec.Meta` bounds
numbers and text, and its `extra` may hold
- `read`: a function that takes the data in the place of the type check, and raises ValueError with what is wrong;
- `remedy`: what to do about a value out of bounds.

A struct that needs more than its fields say has a class method `read(data, path, findings)` that takes over.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import UNSET, Struct
from msgspec.inspect import AnyType, BoolType, EnumType, FloatType, IntType, Metadata, StrType, Type, type_info
from msgspec.structs import FieldInfo

T = TypeVar("T")

_SHOWN = 60
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INTEGERS = range(-(2**63), 2**63)
_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("gt", operator.gt, "greater than"),
    ("ge", operator.ge, "at least"),
    ("lt", operator.lt, "less than"),
    ("le", operator.le, "at most"),
)


class Problem(Struct, frozen=True):
    """One thing that is wrong: where, with which value (as JSON, cut short; may be empty), what, and what to do."""

    path: str
    problem: str
    value: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.path, self.value, self.problem) if part)
        return f"{text}; {self.remedy}" if self.remedy else text


class ConfigError(ValueError):
    """A document that cannot be used. Its text has one line for each of `problems`."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class Findings:
    """What was found in one document: problems, which refuse it, and warnings, which do not."""

    MOST = 100
    """Problems after which reading ends; the rest of such a document helps nobody."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def add(self, path: str, problem: str, value: object = UNSET, remedy: str = "") -> None:
        """Note a problem. Raises ConfigError when it is one too many."""
        self.problems.append(Problem(path, problem, "" if value is UNSET else show(value), remedy))
        if len(self.problems) >= self.MOST:
            raise ConfigError([*self.problems, Problem("", "too many problems; the rest is not shown")])

    def warn(self, path: str, text: str) -> None:
        self.warnings.append(f"{path}: {text}")

    def check(self) -> None:
        """Raise ConfigError if there were problems."""
        if self.problems:
            raise ConfigError(self.problems)


def show(value: object) -> str:
    """A value as people wrote it, on one line of printable ASCII, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def child(path: str, key: str | int) -> str:
    """The path of a key or index below a path."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    name = key if _PLAIN_KEY.fullmatch(key) else show(key)
    return f"{path}.{name}" if path else name


def suggest(name: str, known: Iterable[str]) -> str:
    """The remedy for a name that is not among the known ones."""
    names = sorted(known)
    if not names:
        return "remove it"
    return _nearest(name, names) or f"known: {', '.join(names)}"


def _nearest(name: str, names: Iterable[str]) -> str:
    by_lower = {other.lower(): other for other in names}
    near = get_close_matches(name[:_SHOWN].lower(), by_lower, 1)
    return f'did you mean "{by_lower[near[0]]}"?' if near else ""


def decode(kind: Any, data: object, path: str, findings: Findings, *, unknown: str = "unknown key") -> Any:
    """Read data as a type; None when there was a problem, which `findings` then has.

    A field that has a problem gets its default, so that what depends on other fields can be looked at nevertheless.
    `unknown` is how a key that the struct does not have is called.
    """
    if isinstance(kind, type) and issubclass(kind, Struct):
        if hasattr(kind, "read"):
            return kind.read(data, path, findings)
        return _struct(kind, data, path, findings, unknown)
    origin = get_origin(kind)
    if origin is UnionType:
        kinds = tuple(one for one in get_args(kind) if one is not NoneType)
        return decode(kinds[0], data, path, findings) if len(kinds) == 1 else _one_of(kinds, data, path, findings)
    if origin is tuple:
        return _sequence(get_args(kind)[0], data, path, findings)
    if origin is Mapping:
        return _mapping(get_args(kind)[1], data, path, findings)
    return _scalar(kind, data, path, findings)


def _struct(kind: type[Struct], data: object, path: str, findings: Findings, unknown: str) -> Any:
    fields = _fields(kind)
    if not isinstance(data, dict):
        return _wrong(path, "a mapping", data, findings)
    _refuse_unknown(data, fields, path, findings, unknown)
    values: dict[str, Any] = {}
    complete = True
    for key, field in fields.items():
        if key in data and not (data[key] is None and _is_container(field.type) and not field.required):
            value = decode(field.type, data[key], child(path, key), findings)
            if value is not None:
                values[field.name] = value
                continue
        elif field.required:
            findings.add(child(path, key), "is missing", remedy="add it")
        complete = complete and not field.required
    return kind(**values) if complete else None


def _is_container(kind: Any) -> bool:
    return (isinstance(kind, type) and issubclass(kind, Struct)) or get_origin(kind) in (UnionType, tuple, Mapping)


def _one_of(kinds: tuple[Any, ...], data: object, path: str, findings: Findings) -> Any:
    by_key = {next(iter(_fields(kind))): kind for kind in kinds}
    if not isinstance(data, dict):
        return _wrong(path, "a mapping", data, findings)
    _refuse_unknown(data, by_key, path, findings, "unknown key")
    named = [key for key in by_key if key in data]
    if len(named) > 1:
        findings.add(path, f"has both {' and '.join(named)}", remedy="keep exactly one of them")
        return None
    chosen = by_key[named[0]] if named else kinds[0]
    return _struct(chosen, {key: data[key] for key in named}, path, findings, "unknown key")


def _sequence(kind: Any, data: object, path: str, findings: Findings) -> Any:
    if not isinstance(data, list):
        return _wrong(path, "a list", data, findings)
    values = (decode(kind, item, child(path, index), findings) for index, item in enumerate(data))
    return tuple(value for value in values if value is not None)


def _mapping(kind: Any, data: object, path: str, findings: Findings) -> Any:
    if not isinstance(data, dict):
        return _wrong(path, "a mapping", data, findings)
    if kind is Any:
        return dict(data)
    values = {key: decode(kind, item, child(path, key), findings) for key, item in data.items()}
    return {key: value for key, value in values.items() if value is not None}


def _scalar(kind: Any, data: object, path: str, findings: Findings) -> Any:
    info, extra = _inspect(kind)
    if "read" in extra:
        try:
            return extra["read"](data)
        except ValueError as error:
            findings.add(path, str(error), data)
            return None
    remedy = extra.get("remedy", "")
    match info:
        case BoolType():
            return data if isinstance(data, bool) else _wrong(path, "true or false", data, findings)
        case IntType():
            if type(data) is not int:
                return _wrong(path, "int", data, findings)
            if data not in _INTEGERS:
                findings.add(path, "does not fit into 64 bits", data, remedy)
                return None
            return _bounded(info, data, path, findings, remedy)
        case FloatType():
            if type(data) not in (int, float):
                return _wrong(path, "a number", data, findings)
            if not math.isfinite(data):  # type: ignore[arg-type]
                findings.add(path, "is not finite", data, "write a plain number")
                return None
            return _bounded(info, float(data), path, findings, remedy)  # type: ignore[arg-type]
        case StrType():
            return _text(info, data, path, findings, remedy)
        case EnumType():
            return _member(info.cls, data, path, findings)
        case AnyType():
            return data
    raise TypeError(f"{path}: {kind} is not a type of configuration")


def _bounded(info: IntType | FloatType, value: float, path: str, findings: Findings, remedy: str) -> float | None:
    for name, holds, words in _BOUNDS:
        bound = getattr(info, name)
        if bound is not None and not holds(value, bound):
            shown = int(value) if value == int(value) else value
            findings.add(path, f"must be {words} {bound:,}".replace(",", ""), shown, remedy)
            return None
    return value


def _text(info: StrType, data: object, path: str, findings: Findings, remedy: str) -> Any:
    if not isinstance(data, str):
        return _wrong(path, "text", data, findings)
    if info.min_length is not None and len(data) < info.min_length:
        findings.add(path, "is empty" if not data else f"must have at least {info.min_length} characters", data, remedy)
        return None
    if info.max_length is not None and len(data) > info.max_length:
        findings.add(path, f"must have at most {info.max_length} characters, and has {len(data)}", data, remedy)
        return None
    if info.pattern is not None and not re.search(info.pattern, data):
        findings.add(path, f"does not match {info.pattern}", data, remedy)
        return None
    return data


def _member(kind: type[Any], data: object, path: str, findings: Findings) -> Any:
    members: dict[str, StrEnum] = {str(member): member for member in kind}
    if not isinstance(data, str):
        return _wrong(path, f"one of {', '.join(members)}", data, findings)
    if data not in members:
        findings.add(path, f"is none of {', '.join(members)}", data, _nearest(data, members))
    return members.get(data)


def _refuse_unknown(
    data: Mapping[str, object], known: Mapping[str, object], path: str, findings: Findings, unknown: str
) -> None:
    for key in data:
        if key not in known:
            findings.add(child(path, key), unknown, data[key], suggest(key, known))


def _wrong(path: str, wanted: str, data: object, findings: Findings) -> Any:
    findings.add(path, f"expected {wanted}, got {_kind(data)}", data, _retyped(wanted, data))
    return None


def _retyped(wanted: str, data: object) -> str:
    if wanted == "text" and isinstance(data, int | float):
        return "put it in quotes"
    if wanted in {"int", "a number"} and isinstance(data, str) and re.fullmatch(r"[-+]?[0-9._eE+-]+", data):
        return "write plain decimal digits, without quotes, exponent or underscores"
    return ""


def _kind(data: object) -> str:
    match data:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "int"
        case float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "a mapping"
    return type(data).__name__


@cache
def _fields(kind: type[Struct]) -> Mapping[str, FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


@cache
def _inspect(kind: Any) -> tuple[Type, Mapping[str, Any]]:
    """What msgspec knows of a type, and the `extra` of its `Meta`."""
    info = type_info(kind)
    return (info.type, info.extra or {}) if isinstance(info, Metadata) else (info, {})
