"""Network addresses as the configuration writes them: "ip:port", IPv6 in brackets."""

from __future__ import annotations

import ipaddress
import re

_SERVICE = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
_EXAMPLES = 'such as "10.0.0.1:8000" or "[::1]:8000"'


def listening(data: object) -> str:
    """An address to listen on, in its canonical spelling; port 0 lets the system choose. Raises ValueError."""
    host, port = _split(data)
    return _join(host, port)


def endpoint(data: object) -> str:
    """An address to send requests to, in its canonical spelling, which is Envoy's. Raises ValueError."""
    host, port = _split(data)
    if host.is_unspecified or host.is_multicast:
        raise ValueError("is not an address of one server; use the server's own")
    if port == 0:
        raise ValueError("port 0 is no server's; use the port that the server listens on")
    return _join(host, port)


def service(data: object) -> str:
    """Where a server is that is connected to: "host:port", the host a name or an IP address; or empty. Raises ValueError."""
    if data == "":
        return ""
    found = _SERVICE.fullmatch(data) if isinstance(data, str) else None
    if found is None or not 1 <= int(found[2]) <= 65_535:
        raise ValueError('is not where a server is; write host:port, such as "redis:6379" or "[::1]:6379"')
    return found[0]


def _split(data: object) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    if not isinstance(data, str):
        raise ValueError(f"expected an address, {_EXAMPLES}")  # noqa: TRY004  all that is wrong is a ValueError
    host, separator, port = data.rpartition(":")
    if not separator or not port.isascii() or not port.isdecimal():
        raise ValueError(f"has no port; write ip:port, {_EXAMPLES}")
    if len(port) > 5 or int(port) > 65_535:
        raise ValueError("the port must be at most 65535")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        raise ValueError(f"is not an IP address; host names need discovery: write ip:port, {_EXAMPLES}") from None
    if bracketed != (address.version == 6) or "%" in host:
        raise ValueError(f"is not an IP address with a port; write it {_EXAMPLES}")
    return address, int(port)


def _join(host: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    return f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"
