"""Label selectors and field selectors, as a query has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Object = dict[str, Any]
Matches = Callable[[Object], bool]

_SETS = re.compile(r"\s*(\S+)\s+(in|notin)\s*\(([^)]*)\)\s*")


def selects(labels: str, fields: str) -> Matches:
    """Whether an object has these labels and fields. Raises ValueError for what an API server refuses."""
    tests = [_label_test(part) for part in re.split(r",(?![^(]*\))", labels) if part.strip()]
    tests += [_field_test(part) for part in fields.split(",") if part.strip()]
    return lambda found: all(test(found) for test in tests)


def _label_test(text: str) -> Matches:
    def labels(found: Object) -> dict[str, str]:
        return found["metadata"].get("labels") or {}

    if found := _SETS.fullmatch(text):
        name, operator, values = found[1], found[2], {value.strip() for value in found[3].split(",")}
        if operator == "in":
            return lambda one: labels(one).get(name) in values
        return lambda one: labels(one).get(name) not in values
    name, operator, value = (part.strip() for part in re.split(r"(==|!=|=|$)", text, maxsplit=1))
    if not re.fullmatch(r"!?[\w./-]+", name):
        raise ValueError(f"unable to parse requirement: {text!r}")
    if operator in {"=", "=="}:
        return lambda one: labels(one).get(name) == value
    if operator == "!=":
        return lambda one: labels(one).get(name) != value
    if name.startswith("!"):
        return lambda one: name[1:] not in labels(one)
    return lambda one: name in labels(one)


def _field_test(text: str) -> Matches:
    name, operator, value = re.split(r"(==|!=|=)", text, maxsplit=1)
    if name not in {"metadata.name", "metadata.namespace"}:
        raise ValueError(f"field label not supported: {name}")
    key = name.removeprefix("metadata.")
    return lambda one: (one["metadata"].get(key) == value) == (operator != "!=")
