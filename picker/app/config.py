"""The configuration file: one strict YAML document.

Every setting has a default, so that `{}` is a configuration. A file without any content is none: an editor may be
about to write it. What is wrong is said with its path, its value
and what to do, everything at once.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from picker.app import config_scheduler, config_sticky
from picker.app.certificates import certificate_source
from picker.app.config_settings import (
    Config,
    KubernetesEndpoints,
    KubernetesSource,
    Listen,
    Predict,
    Scrape,
    StaticEndpoints,
    TlsMode,
)
from picker.app.migration.mapped import Mapped
from picker.app.migration.reading import in_our_shape
from picker.core.kubernetes.pools import MOST_PORTS
from picker.core.plugins.registry import SchedulerSpec
from picker.core.strict import ConfigError, Findings, Problem, child, decode
from picker.io import strict_yaml
from picker.io.discovery import endpoint_list
from picker.io.file_watch import FileError, read_file

__all__ = [
    "MOST_BYTES",
    "Config",
    "ConfigError",
    "Loaded",
    "effective",
    "in_force",
    "load",
    "load_file",
    "needs_restart",
]

MOST_BYTES = 1024 * 1024

_WHICH = frozenset(("pool", "selector", "ports"))
"""The settings of `endpoints.kubernetes` that say which pods are meant."""


class Loaded(Struct, frozen=True):
    """A configuration without errors, what it means for the scheduler, and what is odd about it."""

    config: Config
    spec: SchedulerSpec
    warnings: tuple[str, ...] = ()
    mapped: tuple[Mapped, ...] = ()
    """What became of the parts of another router's configuration."""


def load(document: str | bytes, overrides: Mapping[str, Any] = MappingProxyType({})) -> Loaded:
    """Read a configuration, the picker's own or another router's. Raises ConfigError with all problems found.

    `overrides` are settings in the shape of the configuration that go before it.
    """
    data = strict_yaml.parse(document, most_bytes=MOST_BYTES)
    if data is None:
        raise ConfigError([Problem("", "is empty; write {} for the defaults")])
    findings = Findings()
    data, mapped = in_our_shape(data, findings)
    if isinstance(data, dict):
        data = _overridden(data, overrides)
    config = decode(Config, data, "", findings)
    findings.check()
    _check_listen(config.listen, findings)
    _check_scrape(config.scrape, findings)
    _check_predict(config.predict, findings)
    if config.exchange.conformance:
        findings.warn("exchange.conformance", "lets clients choose the endpoint; remove it where no gateway is tested")
    config.admission.check("admission", findings)
    config.models.check("models", findings)
    config_sticky.check(config.session_sticky, "sessionSticky", findings)
    scheduler, spec = config_scheduler.settle(config.scheduler, "scheduler", findings)
    endpoints = config.endpoints
    if isinstance(endpoints, StaticEndpoints):
        endpoints = StaticEndpoints(endpoint_list.settle(endpoints.static, "endpoints.static", findings))
        if not endpoints.static:
            findings.warn("endpoints", "there are none, so every request is refused; add some under static")
    if isinstance(endpoints, KubernetesEndpoints):
        _check_kubernetes(endpoints.kubernetes, "endpoints.kubernetes", findings)
    findings.check()
    settled = msgspec.structs.replace(config, scheduler=scheduler, endpoints=endpoints)
    return Loaded(settled, spec, tuple(findings.warnings), mapped)


def load_file(path: str | Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> Loaded:
    """Read a configuration file. Raises ConfigError also when it, or a file of its certificate, cannot be used."""
    try:
        loaded = load(read_file(Path(path), MOST_BYTES), overrides)
    except FileError as error:
        raise ConfigError([Problem("", str(error), remedy="name the configuration file with -c")]) from None
    # Not in load: a certificate needs a restart, so a reload must not fail for one that is just being renewed.
    certificate_source(loaded.config.listen.tls)
    return loaded


def _overridden(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The data with the overrides in it. Endpoints come from one place: where else the data has them from is dropped."""
    base = dict(data)
    if "endpoints" in overrides:
        source = base["endpoints"].get("kubernetes") if isinstance(base.get("endpoints"), dict) else None
        base["endpoints"] = {}
        if isinstance(source, dict) and "kubernetes" in overrides["endpoints"]:
            base["endpoints"]["kubernetes"] = {key: value for key, value in source.items() if key not in _WHICH}
    return _merged(base, overrides)


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for key, value in overrides.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def effective(config: Config) -> dict[str, Any]:
    """The configuration as plain data. Reading it again, as YAML, gives the same configuration.

    It holds no secrets: keys and certificates are in it as the names of their files.
    """
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return plain


def in_force(started: Config, changed: Config) -> Config:
    """The changed configuration, but for what is read once, when the process starts."""
    replace = msgspec.structs.replace
    at_stop = {name: getattr(changed.listen, name) for name in ("leave_seconds", "drain_seconds")}
    return replace(
        changed,
        listen=replace(started.listen, **at_stop),
        predict=started.predict,
        log=replace(changed.log, format=started.log.format),
        debug=started.debug,
    )


def needs_restart(started: Config, changed: Config) -> list[str]:
    """The paths of changed settings that only a restart puts in force."""
    return _changed("", effective(in_force(started, changed)), effective(changed))


def _changed(path: str, was: Any, now: Any) -> list[str]:
    if isinstance(was, dict):
        return [found for key in was for found in _changed(child(path, key), was[key], now[key])]
    return [] if was == now else [path]


def _check_listen(listen: Listen, findings: Findings) -> None:
    taken: dict[str, str] = {}
    for name in ("extproc", "admin", "http"):
        address = getattr(listen, name)
        if address in taken and not address.endswith(":0"):
            findings.add(f"listen.{name}", f"is the address of {taken[address]} too", address, "use another port")
        taken.setdefault(address, f"listen.{name}")
    tls = listen.tls
    for name in ("certificate", "key"):
        path = getattr(tls, name)
        if tls.mode is TlsMode.FILES and not path:
            findings.add(f"listen.tls.{name}", "is missing", remedy="name a PEM file, or use mode: self-signed")
        if tls.mode is not TlsMode.FILES and path:
            findings.warn(f"listen.tls.{name}", f"is not used with mode: {tls.mode}; use mode: files")
    if tls.mode is not TlsMode.SELF_SIGNED and tls.names:
        findings.warn("listen.tls.names", f"is not used with mode: {tls.mode}; use mode: self-signed")


def _check_kubernetes(source: KubernetesSource, path: str, findings: Findings) -> None:
    ports = child(path, "ports")
    pool = source.pool.name
    if bool(pool) == bool(source.selector):
        has = "has both pool and selector" if pool else "has neither pool nor selector"
        findings.add(path, has, remedy="name an InferencePool, or write a label selector and ports")
    elif pool and source.ports:
        findings.add(ports, "belongs to selector", source.ports, "remove it: the pool says which ports there are")
    elif source.selector and not source.ports:
        findings.add(ports, "is missing", remedy="add the ports that the pods serve on, such as [8000]")
    if len(source.ports) > MOST_PORTS:
        findings.add(ports, f"has {len(source.ports)} entries; at most {MOST_PORTS} are supported")
    if len(set(source.ports)) < len(source.ports):
        findings.add(ports, "has a port twice", source.ports, "remove one of them")
    if source.context and not source.kubeconfig:
        findings.add(child(path, "context"), "belongs to kubeconfig", source.context, "name the kubeconfig too")


def _check_predict(predict: Predict, findings: Findings) -> None:
    loopback = ipaddress.ip_address(predict.listen.rpartition(":")[0].strip("[]")).is_loopback
    if predict.enabled and not loopback and not predict.token_environment:
        findings.warn("predict.listen", "lets other machines ask what prompts are cached; set tokenEnvironment")


def _check_scrape(scrape: Scrape, findings: Findings) -> None:
    if scrape.stale_seconds <= scrape.interval_seconds:
        findings.add(
            "scrape.staleSeconds",
            f"must be greater than intervalSeconds, {scrape.interval_seconds}",
            scrape.stale_seconds,
            "else load is never known",
        )
