"""What a decision came to, handed to `Exchange.decided`."""

from __future__ import annotations

from msgspec import Struct


class Routed(Struct, frozen=True, gc=False):
    """Send the request to `destination`: "ip:port", or several in the order of trial, separated by commas.

    `set_headers` are request headers that go along, in the place of the client's own of those names. `body` replaces a
    request body that was complete when the decision was asked for.
    """

    destination: str
    set_headers: tuple[tuple[str, bytes], ...] = ()
    body: bytes | None = None


class Refused(Struct, frozen=True, gc=False):
    """Answer the client ourselves. `details` goes to Envoy's access log, the rest to the client."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, bytes], ...] = ()
    details: str = ""
