"""What a decision came to, handed to `Exchange.decided`."""

from __future__ import annotations

from msgspec import Struct


class Routed(Struct, frozen=True, gc=False):
    """Send the request to `destination`: "ip:port", or several in the order of trial, separated by commas."""

    destination: str


class Refused(Struct, frozen=True, gc=False):
    """Answer the client ourselves. `details` goes to Envoy's access log, the rest to the client."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, bytes], ...] = ()
    details: str = ""
