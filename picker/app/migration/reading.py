"""Tell whose configuration it is, and put it into the picker's own shape."""

from __future__ import annotations

from typing import Any

from picker.app.migration import endpoint_picker, kthena
from picker.app.migration.endpoint_picker_document import KIND
from picker.app.migration.mapped import Mapped
from picker.core.strict import Findings

_KTHENA = {"auth"}


def in_our_shape(data: Any, findings: Findings) -> tuple[Any, tuple[Mapped, ...]]:
    """The picker's own configuration as it is, llm-d's and Kthena's translated; with what became of their parts."""
    if not isinstance(data, dict):
        return data, ()
    if data.get("kind") == KIND:
        return endpoint_picker.translate(data, findings)
    if _KTHENA & data.keys():
        return kthena.translate(data, findings)
    return data, ()
