"""`picker serve`: put the parts together, keep them running, and stop without losing a request."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvloop
from aiohttp import web

from picker.app import flags
from picker.app.certificates import certificate_source
from picker.app.config import Config, ConfigError, Loaded, effective
from picker.app.config_settings import FileEndpoints, KubernetesEndpoints, LearnUsage, Transport
from picker.app.kubernetes import kubernetes_settings, pool_name
from picker.app.kvcache import KvCachePart, PredictError
from picker.app.reload import ConfigFile
from picker.app.sharing import SharingPart
from picker.app.sticky import StickyPart
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.conformance import ConformanceExchange
from picker.core.exchange.machine import Exchange
from picker.core.exchange.settings import ExchangeSettings
from picker.core.headers import CLIENT_FORBIDDEN
from picker.core.models import Rewrites
from picker.core.plugins.registry import build_scheduler
from picker.io.admin import AdminServer
from picker.io.admission import Gate, can_matter
from picker.io.discovery.endpoint_file import EndpointFile
from picker.io.discovery.kubernetes import KubernetesDiscovery
from picker.io.extproc.service import ExtProcService
from picker.io.extproc.settings import ExtProcSettings
from picker.io.http import create_app
from picker.io.keep import keep, tell_unseen
from picker.io.metrics import Metrics
from picker.io.scrape import Scraper, ScrapeSettings
from picker.io.telemetry import Hub, configure_logging
from picker.io.transport.grpcio_server import GrpcioServer
from picker.io.transport.health import HealthState, health_services
from picker.io.transport.limits import Limits
from picker.io.transport.server import Http2Server

logger = structlog.get_logger(__name__)

_STARTING = "starting"
_TELEMETRY_SECONDS = 0.05
"""How long metrics, logs and watchers may lag behind requests."""
_COLD = "waiting for what other pickers know"
_LOOK_SECONDS = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `picker serve`."""
    flags.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns 2 for a bad configuration, 1 when a port cannot be had."""
    try:
        given = flags.read(options, os.environ)
        loaded = flags.load(given)
    except ConfigError as error:
        print(f"{options.config or 'the command line'}:\n{error}", file=sys.stderr)
        return 2
    configure_logging(str(loaded.config.log.level), str(loaded.config.log.format))  # type: ignore[arg-type]
    for warning in (*given.warnings, *loaded.warnings):
        logger.warning("The configuration is odd", warning=warning)
    try:
        uvloop.run(_serve(loaded, given))
    except PortError as error:
        logger.error("The picker cannot start", error=str(error))  # noqa: TRY400
        return 1
    except (ConfigError, PredictError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


async def _serve(loaded: Loaded, given: flags.Flags) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Until the configuration's file is watched, which looks at it first of all.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    picker = Picker(loaded, given)
    await picker.start()
    await stop.wait()
    await picker.stop()


def _look_for_garbage_less() -> None:
    """Look for cycles among new objects every 10,000 of them, and never among what the start has made.

    A request makes no cycles, so that nearly all looks are in vain: of the CPU of requests they took 3 %.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


class PortError(Exception):
    """A port cannot be had; the text names its setting and says what to do."""


class Picker:
    """One running picker. `ports` has the ports of `extproc`, `admin` and `http` once it is started."""

    def __init__(self, loaded: Loaded, given: flags.Flags) -> None:
        config = loaded.config
        self.ports: dict[str, int] = {}
        self._config = config
        self._file = ConfigFile(given.path, config, overrides=given.overrides) if given.path else None
        self._not_ready: str | None = _STARTING
        self._endpoint_file: EndpointFile | None = None
        self._kubernetes: KubernetesDiscovery | None = None
        self._discovery: asyncio.Task[None] | None = None
        self._scraping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._metrics = Metrics()
        loop = asyncio.get_running_loop()
        self._hub = Hub(
            self._metrics,
            sample_decisions=config.log.sample_decisions,
            later=partial(loop.call_later, _TELEMETRY_SECONDS),
        )
        self._health = HealthState(self._hub.failed)
        scheduler, _ = build_scheduler(loaded.spec, None, self._metrics.evicted)
        self._director = Director(
            scheduler,
            EndpointTable(stale_seconds=config.scrape.stale_seconds),
            fallbacks=config.exchange.fallbacks,
            rng=random.Random(),
            timer=time.perf_counter_ns,
        )
        self._director.decision_seconds = config.exchange.decision_seconds
        self._kv_cache = KvCachePart(self._director, config.predict, self._keep, self._hub.failed)
        self._sticky = StickyPart(self._director, self._keep)
        self._sharing = SharingPart(self._director, self._keep, self._hub.failed)
        self._service = ExtProcService(self._director, self._hub, _extproc_settings(config), loop.call_soon)
        self._admit(config)
        self._scraper = Scraper(self._director, _scrape_settings(loaded), self._restarted, self._hub.failed)
        self._server = _transport(config, self._service, self._health)
        self._admin = AdminServer(self._director, self._hub, self._health)
        self._http = web.AppRunner(
            create_app(
                self._director,
                self._hub,
                not_ready=self._why_not_ready,
                config=self._in_force,
            ),
            access_log=None,
        )
        metrics = self._metrics
        metrics.director = self._director
        metrics.service = self._service
        metrics.kv_cache = lambda: self._kv_cache.runtime
        metrics.prediction_outcomes = lambda: self._kv_cache.gate.counts
        metrics.shared_picks = lambda: self._sharing.picks
        metrics.transport = self._server.counters
        metrics.scrape_outcomes = self._scraper.outcomes
        metrics.discovery_outcomes = self._discovery_outcomes
        metrics.discovery_staleness = lambda: self._kubernetes.staleness() if self._kubernetes else None
        metrics.odd_pods = lambda: self._kubernetes.odd if self._kubernetes else {}
        if file := self._file:
            metrics.reload_outcomes = lambda: {"ok": file.reloads, **file.refused}

    async def start(self) -> None:
        """Listen and begin to work. PortError if a port cannot be had."""
        tell_unseen(asyncio.get_running_loop(), self._hub.failed)
        config = self._config
        listen = config.listen
        await self._http.setup()
        with _naming("listen.http", listen.http):
            await web.TCPSite(self._http, *_split(listen.http)).start()
        self.ports["http"] = self._http.addresses[0][1]
        with _naming("listen.admin", listen.admin):
            self.ports["admin"] = await self._admin.start(*_split(listen.admin))
        with _naming("listen.extproc", listen.extproc):
            self.ports["extproc"] = await self._server.start(*_split(listen.extproc))
        with _naming("predict.listen", config.predict.listen):
            await self._kv_cache.start()
        self._sticky.configure(config.session_sticky)
        self._sharing.configure(config.sharing)
        if self._kv_cache.port is not None:
            self.ports["predict"] = self._kv_cache.port
        self._discover(config)
        self._scrape(config)
        if self._file:
            self._watching = self._keep("config_file", partial(self._file.run, self._reload))
        _look_for_garbage_less()
        await asyncio.sleep(0)  # what was begun takes signals now
        logger.info("The picker is up", **self.ports, endpoints=len(self._director.table))

    async def stop(self) -> None:
        """Leave rotation, let open streams finish for `drainSeconds`, then stop. Nobody waits for room meanwhile."""
        listen = self._config.listen
        logger.info("The picker is draining", open_streams=self._service.open_streams, seconds=listen.drain_seconds)
        self._not_ready = "draining"
        self._health.set_ready(False)
        if self._service.gate is not None:
            self._service.gate.open()
        await asyncio.sleep(min(listen.leave_seconds, listen.drain_seconds))
        await self._server.close(listen.drain_seconds)
        for task in (self._watching, self._discovery, self._scraping):
            if task is not None:
                task.cancel()
        await self._kv_cache.stop()
        await self._sticky.stop()
        await self._sharing.stop()
        await self._admin.close(0.2)
        await self._http.cleanup()
        self._hub.settle()
        logger.info("The picker is down", open_streams=self._service.open_streams)

    def _reload(self, loaded: Loaded) -> None:
        """Put a changed configuration in force, without losing what is known."""
        old, config = self._config, loaded.config
        self._config = config
        scheduler, notes = build_scheduler(loaded.spec, self._director.scheduler, self._metrics.evicted)
        for note in notes:
            logger.warning("A change lost what was known", note=note)
        self._director.scheduler = scheduler
        self._director.fallbacks = config.exchange.fallbacks
        self._director.decision_seconds = config.exchange.decision_seconds
        self._kv_cache.configure()
        self._sticky.configure(config.session_sticky)
        self._sharing.configure(config.sharing)
        self._director.table.stale_seconds = config.scrape.stale_seconds
        self._service.settings = _extproc_settings(config)
        self._admit(config)
        self._scraper.settings = _scrape_settings(loaded)
        if config.log != old.log:
            configure_logging(str(config.log.level), str(config.log.format))  # type: ignore[arg-type]
            self._hub.follow_logging(config.log.sample_decisions)
        if config.endpoints != old.endpoints:
            self._discover(config)
        if config.scrape.enabled != old.scrape.enabled:
            self._scrape(config)

    def _admit(self, config: Config) -> None:
        """Put names of models in force, and a gate before the scheduler if any request could be stopped there."""
        self._director.rewrites = Rewrites(config.models)
        settings, gate = config.admission, self._service.gate
        if gate is not None:
            gate.configure(settings)
        elif can_matter(settings):
            self._service.gate = Gate(self._director, settings)

    def _discover(self, config: Config) -> None:
        if self._discovery is not None:
            self._discovery.cancel()
            self._discovery = self._endpoint_file = self._kubernetes = None
        source = config.endpoints
        if isinstance(source, FileEndpoints):
            self._endpoint_file = EndpointFile(Path(source.file.path), poll_seconds=source.file.poll_seconds)
            self._discovery = self._keep("endpoint_file", partial(self._endpoint_file.run, self._endpoints_changed))
        elif isinstance(source, KubernetesEndpoints):
            self._kubernetes = KubernetesDiscovery(kubernetes_settings(source.kubernetes))
            self._discovery = self._keep("kubernetes", partial(self._kubernetes.run, self._endpoints_changed))
        else:
            self._endpoints_changed([entry.endpoint() for entry in source.static])

    def _endpoints_changed(self, endpoints: list[Endpoint]) -> None:
        added, removed = self._director.replace_endpoints(endpoints)
        self._kv_cache.follow()
        if added or removed:
            logger.info("The endpoints have changed", endpoints=len(self._director.table), added=added, removed=removed)
        if self._not_ready == _STARTING:
            self._become_ready()

    def _become_ready(self) -> None:
        """Be ready as soon as it is known what other pickers know."""
        if self._not_ready not in (_STARTING, _COLD):
            return
        try:
            warm = self._sharing.warm
        except Exception as error:  # noqa: BLE001  nobody else would make it ready
            self._hub.failed("sharing", error)
            warm = True
        if warm:
            self._not_ready = None
            self._health.set_ready(True)
        else:
            self._not_ready = _COLD
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._become_ready)

    def _why_not_ready(self) -> str | None:
        file, kubernetes = self._endpoint_file, self._kubernetes
        if self._not_ready == _STARTING and file is not None and file.last_error:
            return f"endpoints.file: {file.last_error}; the picker is ready as soon as the file is good"
        if self._not_ready == _STARTING and kubernetes is not None and kubernetes.problem:
            return f"endpoints.kubernetes: {kubernetes.problem}"
        return self._not_ready

    def _in_force(self) -> dict[str, Any]:
        """The configuration in force, and the settings whose changes wait for a restart, if there are any."""
        waiting = self._file.needs_restart if self._file else []
        return {**effective(self._config), **({"needs_restart": waiting} if waiting else {})}

    def _discovery_outcomes(self) -> Mapping[str, int]:
        file, kubernetes = self._endpoint_file, self._kubernetes
        if kubernetes is not None:
            return {"ok": kubernetes.updates, **kubernetes.failures}
        return {} if file is None else {"ok": file.reloads, **file.refused}

    def _scrape(self, config: Config) -> None:
        if self._scraping is not None:
            self._scraping.cancel()
            self._scraping = None
        if config.scrape.enabled:
            self._scraping = self._keep("scrape", self._scraper.run)

    def _keep(self, name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run something for as long as the picker runs, again and again should it ever fail."""
        return asyncio.create_task(keep(name, run, failed=self._hub.failed))

    def _restarted(self, endpoint: Endpoint) -> None:
        logger.warning("An engine has restarted; its cache is taken for empty", endpoint=endpoint.address)


def _transport(config: Config, service: ExtProcService, state: HealthState) -> Http2Server | GrpcioServer:
    listen = config.listen
    services = {**service.services, **health_services(state)}
    limits = Limits(max_message=listen.max_message_bytes, max_concurrent_streams=listen.max_concurrent_streams)
    server = Http2Server if listen.transport is Transport.HTTP2 else GrpcioServer
    return server(services, limits=limits, certificates=certificate_source(listen.tls))


def _extproc_settings(config: Config) -> ExtProcSettings:
    exchange = config.exchange
    return ExtProcSettings(
        max_body_bytes=exchange.max_body_bytes,
        max_buffered_bytes=exchange.max_buffered_bytes,
        assumed_request_body=exchange.assume_request_body.body_mode,
        mode_grace_seconds=exchange.mode_grace_seconds,
        retry_after_seconds=exchange.retry_after_seconds,
        wants_response_body=exchange.learn_usage is LearnUsage.FROM_BODY,
        control_headers=CLIENT_FORBIDDEN | {config.scheduler.disaggregation.header},
        exchange=_state_machine(config),
    )


def _state_machine(config: Config) -> Callable[[ExchangeSettings], Exchange]:
    if not config.exchange.conformance:
        return Exchange
    source = config.endpoints
    pool = pool_name(source.kubernetes) if isinstance(source, KubernetesEndpoints) else ""
    return partial(ConformanceExchange, pool=pool)


def _scrape_settings(loaded: Loaded) -> ScrapeSettings:
    scrape = loaded.config.scrape
    return ScrapeSettings(
        interval=scrape.interval_seconds,
        timeout=scrape.timeout_seconds,
        path=scrape.path,
        models_interval=scrape.models_interval_seconds if _models_matter(loaded) else None,
    )


def _models_matter(loaded: Loaded) -> bool:
    return not loaded.spec.plugins.isdisjoint(("lora-affinity", "kvcache-aware"))


@contextmanager
def _naming(setting: str, address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PortError(f"{setting}: {address}: cannot listen; free the port or use another ({error})") from error


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
