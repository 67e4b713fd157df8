"""YAML text to plain data, without what makes YAML surprising.

Of YAML 1.1 it takes mappings, lists and scalars in one document. Duplicate keys, anchors and aliases, tags, deep
nesting and oversized documents are refused. `true` and `false` are the only booleans (so `off` is text), numbers are
decimal, keys are text. What `yaml.dump` writes for plain data reads back as the same. JSON is YAML, but for characters
that are escaped as surrogate pairs, which are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)

from picker.core.strict import ConfigError, Findings, Problem, show

_MOST_NESTED = 32
_LONGEST_NUMBER = 40
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?|\.[0-9]+([eE][-+][0-9]+)?")
_WORDS: dict[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


def parse(document: str | bytes, *, most_bytes: int) -> Any:
    """The data of a document; None if it is empty.

    Raises ConfigError with line and column.
    """
    text = _text(document, most_bytes)
    reader = _Reader(yaml.parse(text, Loader=yaml.CSafeLoader))
    try:
        data = reader.document()
    except yaml.YAMLError as error:
        raise ConfigError([_syntax(error, text)]) from None
    reader.findings.check()
    return data


def _text(document: str | bytes, most_bytes: int) -> str:
    try:
        raw = document.encode() if isinstance(document, str) else document
        if len(raw) > most_bytes:
            raise ConfigError([Problem("", f"is larger than {most_bytes} bytes: {len(raw)}; split or shorten it")])
        return raw.decode("utf-8-sig")
    except UnicodeError as error:
        raise ConfigError([Problem(f"byte {error.start}", "is not UTF-8; save the file as UTF-8")]) from None  # type: ignore[attr-defined]


class _Reader:
    """Builds data from parser events."""

    def __init__(self, events: Iterator[Event]) -> None:
        self.findings = Findings()
        self._events = events

    def document(self) -> Any:
        data = None
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                data = self._node(next(self._events), 0)
                break
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                self._refuse(event, "a second document", "keep one document in a file")
            if isinstance(event, StreamEndEvent):
                break
        return data

    def _node(self, event: Event, depth: int) -> Any:
        self._check(event)
        if isinstance(event, ScalarEvent):
            return _scalar(event.value) if event.implicit[0] else event.value
        if depth >= _MOST_NESTED:
            self._refuse(event, f"nested deeper than {_MOST_NESTED}", "flatten it")
        return self._mapping(depth) if isinstance(event, MappingStartEvent) else self._sequence(depth)

    def _sequence(self, depth: int) -> list[Any]:
        items = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(key := next(self._events), MappingEndEvent):
            self._check(key)
            if not isinstance(key, ScalarEvent):
                self._refuse(key, "a key that is not text", "write a name before the colon")
            value = self._node(next(self._events), depth + 1)
            if key.value in items:
                self.findings.add(_place(key.start_mark), "duplicate key", key.value, "keep one of them")
            items[key.value] = value
        return items

    def _check(self, event: Event) -> None:
        """Refuse what only complicates a configuration, or makes a small document a huge one."""
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors and aliases are not supported", "write the value out")
        if isinstance(event, ScalarEvent | CollectionStartEvent) and event.tag is not None:
            self._refuse(event, f"tags are not supported: {show(event.tag)}", "write the plain value")

    def _refuse(self, event: Event, problem: str, remedy: str) -> NoReturn:
        """End reading here: what follows depends on what was not understood. Raises ConfigError."""
        raise ConfigError([*self.findings.problems, Problem(_place(event.start_mark), problem, remedy=remedy)])


def _scalar(text: str) -> str | float | bool | None:
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= _LONGEST_NUMBER:
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    return text


def _syntax(error: yaml.YAMLError, text: str) -> Problem:
    problem = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
    problem = problem or getattr(error, "reason", "") or "cannot be read"
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        before = text[: getattr(error, "position", 0)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return Problem(f"line {line}, column {column}", f"is not YAML: {problem}")
    lines = text.split("\n")
    tab = mark.line < len(lines) and lines[mark.line][mark.column : mark.column + 1] == "\t"
    return Problem(_place(mark), f"is not YAML: {problem}", remedy="indent with spaces, not tabs" if tab else "")


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
