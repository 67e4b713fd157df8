"""What every plugin's arguments share: they are frozen structs whose field names are the configuration's names."""

from __future__ import annotations

from msgspec import Struct


class NoArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """A plugin without arguments."""
