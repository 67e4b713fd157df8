"""Finds what Redis has lost of what a sidecar wrote, though both stayed connected.

A Redis that is flushed, or that became the replica of an empty one, has lost everything, and with it a marker that is
written before everything else. One that evicts keys loses them one by one: a slice of all blocks is looked at each time,
in one round trip with the marker.

    picker:kv:sidecar:{pod}.{namespace}   what this sidecar's process calls itself; ends by itself after a day
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import Any

import hiredis
from msgspec import Struct

from picker.core.kv_index.owners import block_key
from picker.io.kv_index.redis_connection import Command
from picker.io.kv_index.redis_layout import Block, Layout

MARKER_PREFIX = "picker:kv:sidecar:"
_MARKER_SECONDS = 86_400
_FEW = 8
_MANY = 1 / 16
"""Of the blocks looked at, with so many missing, and more than a few, there are others missing."""


class Marker(StrEnum):
    """Whose marker there is. One that we may not read is taken for ours."""

    OURS = "ours"
    NONE = "none"
    ANOTHERS = "another's"


class Found(Struct, frozen=True):
    """What a look found. `wrong` are the blocks that are not there as they should be, because `missing` or `altered`.

    `many` says that more are missing than were looked at. `round_missing` is how many were in all blocks, when this look
    was the last of a round through them; else 0.
    """

    marker: Marker
    wrong: Sequence[Block]
    missing: int
    altered: int
    many: bool
    round_missing: int


class Losses:
    """Ask `questions`, then let `read` have the replies. `most` is how many blocks are looked at each time."""

    def __init__(self, layout: Layout, most: int) -> None:
        key, name = MARKER_PREFIX + layout.owner, secrets.token_hex(8)
        self.mark: Command = ("SET", key, name, "EX", _MARKER_SECONDS)
        self.unmark: Command = ("DEL", key)
        self._ask_marker: Sequence[Command] = (("GET", key), ("EXPIRE", key, _MARKER_SECONDS))
        self._name = name.encode()
        self._layout = layout
        self._most = most
        self._round: Iterator[Block] | None = None
        self._round_missing = 0
        self._asked: list[tuple[Block, bytes]] = []

    def questions(self, unwritten: Container[Block]) -> list[Command]:
        """Return what to ask next: of the marker, and of some blocks but for those that have yet to be written."""
        if self._round is None:
            self._round = self._layout.held()
            self._round_missing = 0
        some = list(islice(self._round, self._most))
        if len(some) < self._most:
            self._round = None
        self._asked = []
        for block in some:
            value = self._layout.value(block)
            if value is not None and block not in unwritten:
                self._asked.append((block, value.encode()))
        return [*self._ask_marker, *[("HGET", block_key(*block), self._layout.owner) for block, _ in self._asked]]

    def read(self, replies: Sequence[Any]) -> Found:
        """Read the replies to the questions."""
        marker, _, *values = replies
        answered = list(zip(self._asked, values, strict=True))
        missing = [block for (block, _), value in answered if value is None]
        altered = [block for (block, should), value in answered if isinstance(value, bytes) and value != should]
        self._round_missing += len(missing)
        return Found(
            marker=self._whose(marker),
            wrong=[*missing, *altered],
            missing=len(missing),
            altered=len(altered),
            many=len(missing) > max(_FEW, len(answered) * _MANY),
            round_missing=self._round_missing if self._round is None else 0,
        )

    def _whose(self, marker: Any) -> Marker:
        if marker is None:
            return Marker.NONE
        return Marker.OURS if marker == self._name or isinstance(marker, hiredis.ReplyError) else Marker.ANOTHERS
