"""Endpoints from a file that is watched."""

from __future__ import annotations

from pathlib import Path

from picker.core.endpoints import Endpoint
from picker.io.discovery import endpoint_list
from picker.io.file_watch import WatchedFile


class EndpointFile(WatchedFile[list[Endpoint]]):
    """A YAML or JSON file of endpoints. While it is missing or no good, the endpoints stay what they were."""

    def __init__(self, path: Path, *, poll_seconds: float = 1.0) -> None:
        super().__init__(path, endpoint_list.parse, most_bytes=endpoint_list.MOST_BYTES, poll_seconds=poll_seconds)
