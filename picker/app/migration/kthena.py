"""Kthena's `routerConfiguration`: its `scheduler` is the picker's, and what else it may have is looked at here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picker.app.migration.mapped import Mapped
from picker.core.strict import Findings, child

_AUTH = "let Envoy check tokens (Envoy Gateway: SecurityPolicy), and remove the section"


def translate(data: Mapping[str, Any], findings: Findings) -> tuple[dict[str, Any], tuple[Mapped, ...]]:
    """The same without what only Kthena has. Authentication that was asked for is refused, as it would be missing."""
    ours = {key: value for key, value in data.items() if key != "auth"}
    mapped = []
    if "auth" in data:
        for key, value in _entries(data["auth"]):
            if value:
                findings.add(child("auth", key), "would not be obeyed: the picker does not see who asks", value, _AUTH)
        mapped.append(Mapped("auth", "", "is empty"))
    return ours, tuple(mapped)


def _entries(section: Any) -> list[tuple[str, Any]]:
    if isinstance(section, dict):
        return list(section.items())
    return [("", section)] if section else []
