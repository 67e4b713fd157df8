"""Where in a request the key of its session stands.

Types and rules are those of Kthena's `sessionSticky`: the first source that has something wins, names of headers are
case-insensitive, those of cookies and query parameters are not. Claims are read from the bearer token without checking
its signature: whoever forges one chooses among the endpoints that they could reach anyway, and no more.
"""

from __future__ import annotations

from binascii import Error, a2b_base64
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Meta, Struct

MAX_TOKEN_BYTES: Final = 16 * 1024
"""Longest payload of a token that is read."""


class SourceType(StrEnum):
    """A place in the request."""

    HEADER = "Header"
    QUERY = "Query"
    COOKIE = "Cookie"
    JWT_CLAIM = "JWTClaim"


class Source(Struct, frozen=True):
    """One place where the key of a session may stand."""

    type: SourceType
    """`Header`, `Query`, `Cookie`, or `JWTClaim`: a top-level claim of the bearer token in `Authorization`, which is text
    or a whole number. The token's signature is not checked."""
    name: Annotated[str, Meta(pattern=r"^[^\x00-\x1f]+$", max_length=256, extra={"remedy": "name it"})]
    """Name of the header (case-insensitive), query parameter, cookie or claim."""


_claims = msgspec.json.Decoder(dict[str, Any]).decode


def session_key(sources: Sequence[Source], headers: Mapping[str, bytes]) -> bytes:
    """Return what the first source that has something says, b"" when none does.

    `headers` are a request's by lower-case name, with the path as ":path".
    """
    for source in sources:
        found = _READ[source.type](headers, source.name)
        if found:
            return found
    return b""


def _header(headers: Mapping[str, bytes], name: str) -> bytes:
    return headers.get(name.lower(), b"").strip()


def _query(headers: Mapping[str, bytes], name: str) -> bytes:
    wanted = name.encode()
    for pair in headers.get(":path", b"").partition(b"#")[0].partition(b"?")[2].split(b"&"):
        key, _, value = pair.partition(b"=")
        if value and unquote_to_bytes(key.replace(b"+", b" ")) == wanted:
            return unquote_to_bytes(value.replace(b"+", b" "))
    return b""


def _cookie(headers: Mapping[str, bytes], name: str) -> bytes:
    wanted = name.encode()
    for pair in headers.get("cookie", b"").split(b";"):
        key, _, value = pair.partition(b"=")
        if key.strip() == wanted and (value := value.strip().strip(b'"')):
            return value
    return b""


def _claim(headers: Mapping[str, bytes], name: str) -> bytes:
    scheme, _, token = headers.get("authorization", b"").strip().partition(b" ")
    parts = token.strip().split(b".")
    if scheme.lower() != b"bearer" or len(parts) != 3 or len(parts[1]) > MAX_TOKEN_BYTES:
        return b""
    try:
        payload = a2b_base64(parts[1].translate(_BASE64URL) + b"=" * (-len(parts[1]) % 4))
        claim = _claims(payload).get(name)
    except (Error, ValueError, RecursionError):
        return b""
    if isinstance(claim, str):
        return claim.encode()
    return b"%d" % claim if type(claim) is int else b""


_BASE64URL = bytes.maketrans(b"-_", b"+/")
_READ = {
    SourceType.HEADER: _header,
    SourceType.QUERY: _query,
    SourceType.COOKIE: _cookie,
    SourceType.JWT_CLAIM: _claim,
}
