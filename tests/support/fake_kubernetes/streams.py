"""Watches that are open, and the lines that are sent on them."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

from tests.support.fake_kubernetes.resources import Resource
from tests.support.fake_kubernetes.selectors import Matches, Object
from tests.support.fake_kubernetes.storage import Change, frame_for


class Stream:
    """A watch that is open: frames wait here until they are sent."""

    def __init__(self, resource: Resource, namespace: str, matches: Matches) -> None:
        self.resource = resource
        self.namespace = namespace
        self.matches = matches
        self.frames: deque[bytes | None] = deque()
        """None ends the stream properly."""
        self.wake = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self.muted = False

    def tell(self, storage: tuple[str, str], change: Change) -> None:
        if storage == self.resource.storage and (frame := frame_for(change, self.namespace, self.matches)):
            self.send(frame_line(*frame, self.resource))

    def send(self, line: bytes | None) -> None:
        if not self.muted:
            self.frames.append(line)
            self.wake.set()

    def mute(self) -> None:
        """Be silent from now on, without an end."""
        self.muted = True
        self.frames.clear()


def frameline_of(kind: str, found: Object, resource: Resource) -> bytes:
    return line_of(kind, {"apiVersion": resource.api_version, "kind": resource.kind, **found})


def frame_line(kind: str, found: Object, resource: Resource) -> bytes:
    return line_of(kind, {"apiVersion": resource.api_version, "kind": resource.kind, **found})


def bookmark_line(resource: Resource, revision: int) -> bytes:
    metadata: dict[str, Any] = {"resourceVersion": str(revision), "creationTimestamp": None}
    return line_of("BOOKMARK", {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata})


def line_of(kind: str, found: Object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"
