"""Model servers as the suite has them: they echo, and know nothing of metrics."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

from aiohttp import web

BACKEND = "x-backend"
"""Response header with the address that answered."""
_numbers = itertools.count(1)


class Pod:
    """A loopback address with a server on each of some ports: the ranks of a data-parallel model server."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Test processes do not share addresses, nor with other tests that give pods some.
        self.ip = f"127.{210 + os.getpid() % 40}.{os.getpid() // 40 % 250}.{next(_numbers)}"
        self._runner: web.AppRunner | None = None

    async def start(self, ports: list[int]) -> list[int]:
        """Listen on these ports; where one is 0 the system chooses. Returns them."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._echo)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        for port in ports:
            await web.TCPSite(self._runner, self.ip, port).start()
        return [address[1] for address in self._runner.addresses]

    async def stop(self) -> None:
        """Close every port and connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _echo(self, request: web.Request) -> web.Response:
        length = len(await request.read())
        assert request.transport is not None
        host, port = request.transport.get_extra_info("sockname")
        headers = [[name.lower(), value] for name, value in request.headers.items()]
        answer = {"pod": self.name, "httpPort": str(port), "headers": headers, "length": length}
        return web.json_response(answer, headers={BACKEND: f"{host}:{port}"})


def h2c_backend(addresses: list[str]) -> dict[str, Any]:
    """An Envoy that answers at these addresses, in HTTP/2 without encryption and in nothing else."""
    kind = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{kind}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "backend",
        "codec_type": "HTTP2",
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{kind}.http.router.v3.Router"}}
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "direct_response": {"status": 200, "body": {"inline_string": json.dumps({"pod": "h2c"})}},
                            "response_headers_to_add": [
                                {"header": {"key": BACKEND, "value": "%DOWNSTREAM_LOCAL_ADDRESS%"}},
                                {"header": {"key": "x-protocol", "value": "%PROTOCOL%"}},
                            ],
                        }
                    ],
                }
            ]
        },
    }
    listeners = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        place = {"socket_address": {"address": host, "port_value": int(port)}}
        listeners.append({"name": address, "address": place, "filter_chains": [chain]})
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
    return {"admin": admin, "static_resources": {"listeners": listeners, "clusters": []}}
