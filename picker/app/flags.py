"""The flags of other endpoint pickers, so that their Deployments start this one by a change of the image.

Each flag sets a setting, has no effect and is told so, or is refused with what to do instead. Written `--name value`,
`--name=value` or, as Go programs take them, `-name value`; a boolean alone is true. A flag goes before the same setting
of the configuration file.

Names, defaults and meanings: the endpoint pickers of the Gateway API Inference Extension and of llm-d.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from picker.app.certificates import certificate_source
from picker.app.config import Loaded, load_file
from picker.app.config import load as load_text
from picker.app.quantities import seconds, size
from picker.core.engine_page import NAMES
from picker.core.kubernetes.pools import MOST_PORTS, PoolGroup, read_selector
from picker.core.strict import Findings

_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}
_DEBUG_VERBOSITY = 4
"""From this `-v` on endpoint pickers log each decision, as our `debug` does."""


class Flags(Struct, frozen=True):
    """What the command line says: where the configuration is, and what goes before it."""

    path: Path | None = None
    text: str = ""
    """The configuration itself, where there is no file."""
    overrides: Mapping[str, Any] = {}
    """Settings in the shape of the configuration."""
    warnings: tuple[str, ...] = ()


class _Flag(Struct, frozen=True):
    read: Callable[[str], Any]
    setting: str = ""
    """The setting it sets, as a path; left out where more than the value is needed."""
    help: str = ""
    boolean: bool = False


def _boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        raise ValueError("is not a boolean; give true or false")
    return _BOOLEANS[text]


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:6]) <= 65_535:
        raise ValueError("is not a port; give 1 .. 65535")
    return int(text)


def _listening(text: str) -> str:
    return f"0.0.0.0:{_port(text)}"


def _ports(text: str) -> list[int]:
    return list(dict.fromkeys(_port(part.strip()) for part in text.split(",")))


def _verbosity(text: str) -> str:
    if not re.fullmatch(r"-?\d{1,3}", text):
        raise ValueError("is not a verbosity; give a whole number")
    return "debug" if int(text) >= _DEBUG_VERBOSITY else "info"


def _zap_level(text: str) -> str:
    if text.isdecimal():
        return _verbosity(text)
    level = {"debug": "debug", "info": "info", "warn": "warning", "error": "error", "panic": "error"}.get(text.lower())
    if level is None:
        raise ValueError("is not a level; give debug, info, error or a whole number")
    return level


def _encoder(text: str) -> str:
    if text not in {"json", "console"}:
        raise ValueError("is not an encoder; give json or console")
    return text


def _pool_group(text: str) -> str:
    if text not in set(PoolGroup):
        raise ValueError(f"is not a group of InferencePools; give {' or '.join(PoolGroup)}")
    return text


def _only(*values: str, remedy: str) -> Callable[[str], str]:
    """Reads a flag that has no effect but is harmless with some values."""

    def read(text: str) -> str:
        if text not in values:
            raise ValueError(f"is not supported; {remedy}")
        return text

    return read


def _not_true(remedy: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if _boolean(text):
            raise ValueError(f"is not supported; {remedy}")
        return text

    return read


def _metric_flag(kind: str) -> _Flag:
    names = [name.decode() for engine in NAMES.values() for name in getattr(engine, kind)]
    return _Flag(_only(*names, "", remedy=f"engines are read under their own names: {', '.join(names)}; remove it"))


_FLAGS: Mapping[str, _Flag] = {
    "grpc-port": _Flag(_listening, "listen.extproc", "port of ext_proc and health"),
    "grpc-health-port": _Flag(_listening, "listen.admin", "port of the admin service and health"),
    "metrics-port": _Flag(_listening, "listen.http", "port of metrics and debug pages"),
    "drain-timeout": _Flag(seconds, "listen.drainSeconds", "how long open streams may take after SIGTERM, as 30s"),
    "grpc-max-recv-msg-size": _Flag(size, "listen.maxMessageBytes", "largest ext_proc message, as 16MiB"),
    "refresh-metrics-interval": _Flag(seconds, "scrape.intervalSeconds", "time between two readings of an engine"),
    "metrics-staleness-threshold": _Flag(seconds, "scrape.staleSeconds", "age from which on load is unknown"),
    "model-server-metrics-path": _Flag(str, "scrape.path", "path of the engines' metrics"),
    "zap-encoder": _Flag(_encoder, "log.format", "json or console"),
    "zap-log-level": _Flag(_zap_level, "log.level", "least severe messages that are logged"),
    "v": _Flag(_verbosity, "log.level", f"verbosity of the log; {_DEBUG_VERBOSITY} and more is debug"),
    "pool-name": _Flag(str, help="name of the InferencePool whose pods are the endpoints"),
    "pool-namespace": _Flag(str, help="its namespace; left out: NAMESPACE of the environment, else default"),
    "pool-group": _Flag(_pool_group, help=f"its API group ({PoolGroup.V1})"),
    "endpoint-selector": _Flag(read_selector, help="label selector of the pods that are the endpoints"),
    "endpoint-target-ports": _Flag(_ports, help="ports of those pods, as 8000,8001"),
    "secure-serving": _Flag(_boolean, help="TLS on the ext_proc port (true with a pool or selector)", boolean=True),
    "cert-path": _Flag(str, help="directory with tls.crt and tls.key; left out: a self-signed certificate"),
    "disable-endpoint-subset-filter": _Flag(
        _not_true("a gateway's subset of endpoints is always obeyed; remove it"), boolean=True
    ),
    "metrics-endpoint-auth": _Flag(
        _not_true("set it to false, and let only Prometheus reach the metrics port, by a NetworkPolicy"), boolean=True
    ),
    "metrics-cert-dir": _Flag(_only("", remedy="metrics are served in plain text; remove it")),
    "metrics-client-ca-file": _Flag(_only("", remedy="metrics are served in plain text; remove it")),
    "model-server-metrics-scheme": _Flag(_only("http", remedy="engines are read over http; remove it")),
    "model-server-metrics-port": _Flag(
        _only("0", remedy="an engine's metrics are read at the port it serves on; remove it")
    ),
    "total-queued-requests-metric": _metric_flag("waiting"),
    "total-running-requests-metric": _metric_flag("running"),
    "kv-cache-usage-percentage-metric": _metric_flag("kv_usage"),
}

_WITHOUT_EFFECT: Mapping[str, str] = {
    "ha-enable-leader-election": "every replica picks; none has to lead",
    "refresh-prometheus-metrics-interval": "metrics are as of the moment they are asked for",
    "grpc-max-send-msg-size": "messages to Envoy are never larger than Envoy takes them",
    "model-server-metrics-https-insecure-skip-verify": "engines are read over http",
    "lora-info-metric": "adapters are those that an engine's /v1/models lists",
    "cache-info-metric": "the size of an engine's cache is read under its own name",
    "enable-multi-engine": "which engine a pod runs is always told by its label",
    "engine-label-key": "the labels of both endpoint pickers for the engine's kind are known",
    "health-checking": "health is always served on the ext_proc port",
    "enable-cert-reload": "certificates are always read again when they change",
    "enable-grpc-stream-metrics": "these metrics are always there",
    "emit-endpoint-scores": "scores are on the debug page and in `picker explain`",
    "enable-pprof": "there is no pprof in Python",
    "tracing": "no traces are sent",
    "tls-min-version": "the least version is TLS 1.2",
    "tls-cipher-suites": "the cipher suites are those of OpenSSL's defaults",
    "allow-experimental-plugins": "every plugin that is there may be used",
    "zap-devel": "the format of the log is `log.format`",
    "zap-stacktrace-level": "unexpected errors have a traceback",
    "zap-time-encoding": "times are in UTC, as ISO 8601",
}
_SILENT_BOOLEANS = frozenset(
    {
        "ha-enable-leader-election",
        "enable-multi-engine",
        "emit-endpoint-scores",
        "enable-pprof",
        "tracing",
        "allow-experimental-plugins",
        "zap-devel",
        "health-checking",
        "enable-cert-reload",
        "enable-grpc-stream-metrics",
        "model-server-metrics-https-insecure-skip-verify",
    }
)
"""Flags without effect of which `false` asks for nothing."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add where the configuration is, and the flags of other endpoint pickers."""
    parser.allow_abbrev = False
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "-c", "--config", "--config-file", "-config-file", metavar="FILE", help="the configuration file"
    )
    source.add_argument("--config-text", "-config-text", metavar="TEXT", help="the configuration itself, as text")
    theirs = parser.add_argument_group("flags of other endpoint pickers", "They go before the configuration file.")
    for name, flag in _FLAGS.items():
        _add(theirs, name, flag.boolean, flag.help)
    for name in _WITHOUT_EFFECT:
        _add(theirs, name, name in _SILENT_BOOLEANS, "")


def read(options: Namespace, environment: Mapping[str, str]) -> Flags:
    """What the options say. Raises ConfigError with all that is wrong with them."""
    findings = Findings()
    values: dict[str, Any] = {}
    for name, flag in _FLAGS.items():
        text = _given(options, name)
        if text is None:
            continue
        try:
            values[name] = flag.read(text)
        except ValueError as error:
            findings.add(f"--{name}", str(error), text)
    for name, why in _WITHOUT_EFFECT.items():
        text = _given(options, name)
        if text is not None and not (name in _SILENT_BOOLEANS and _BOOLEANS.get(text) is False):
            findings.warn(f"--{name}", f"has no effect: {why}")
    overrides: dict[str, Any] = {}
    for name, flag in _FLAGS.items():
        if flag.setting and name in values:
            section, _, key = flag.setting.partition(".")
            overrides.setdefault(section, {})[key] = values[name]
    endpoints = _endpoints(values, environment, findings)
    if endpoints is not None:
        overrides["endpoints"] = {"kubernetes": endpoints}
    tls = _tls(values, findings)
    if tls is not None:
        overrides.setdefault("listen", {})["tls"] = tls
    if options.config is None and options.config_text is None and not _names_endpoints(options):
        remedy = "name the configuration file, or an InferencePool with --pool-name"
        findings.add("--config", "is missing, so that there are no endpoints", remedy=remedy)
    findings.check()
    path = None if options.config is None else Path(options.config)
    return Flags(path, options.config_text or "", overrides, tuple(findings.warnings))


def load(given: Flags) -> Loaded:
    """The configuration that is meant; without a file or a text all defaults. Raises ConfigError."""
    if given.path is not None:
        return load_file(given.path, given.overrides)
    loaded = load_text(given.text or "{}", given.overrides)
    certificate_source(loaded.config.listen.tls)
    return loaded


def _add(group: Any, name: str, boolean: bool, text: str) -> None:
    names = ("-v", "--v") if name == "v" else (f"--{name}", f"-{name}")
    more = {"nargs": "?", "const": "true", "metavar": "true|false"} if boolean else {"metavar": "VALUE"}
    group.add_argument(*names, dest=_destination(name), help=text or SUPPRESS, **more)


def _destination(name: str) -> str:
    return "flag_" + name.replace("-", "_")


def _names_endpoints(options: Namespace) -> bool:
    return bool(_given(options, "pool-name") or _given(options, "endpoint-selector"))


def _given(options: Namespace, name: str) -> str | None:
    text: str | None = getattr(options, _destination(name))
    return text


def _endpoints(values: Mapping[str, Any], environment: Mapping[str, str], findings: Findings) -> dict[str, Any] | None:
    name, selector, ports = (values.get(key) for key in ("pool-name", "endpoint-selector", "endpoint-target-ports"))
    namespace = values.get("pool-namespace") or environment.get("NAMESPACE") or "default"
    if name and selector:
        findings.add("--endpoint-selector", "is given beside --pool-name", remedy="keep one of them")
        return None
    if name:
        if ports:
            findings.warn("--endpoint-target-ports", "has no effect: the InferencePool has the ports")
        group = values.get("pool-group", PoolGroup.V1.value)
        return {"pool": {"name": name, "group": group}, "namespace": namespace}
    if selector:
        if not ports or len(ports) > MOST_PORTS:
            findings.add(
                "--endpoint-target-ports", f"has to have 1 to {MOST_PORTS} ports", ports, "name the ports of the pods"
            )
            return None
        return {"selector": selector, "ports": ports, "namespace": namespace}
    for flag in ("pool-namespace", "pool-group", "endpoint-target-ports"):
        if flag in values:
            findings.add(f"--{flag}", "says nothing alone", remedy="add --pool-name or --endpoint-selector")
    return None


def _tls(values: Mapping[str, Any], findings: Findings) -> dict[str, str] | None:
    """The section of TLS. Other endpoint pickers encrypt unless told otherwise, and gateways rely on it."""
    as_endpoint_picker = bool(values.get("pool-name") or values.get("endpoint-selector"))
    directory = values.get("cert-path")
    if "secure-serving" not in values and not as_endpoint_picker and not directory:
        return None
    if not values.get("secure-serving", True):
        if directory:
            findings.warn("--cert-path", "has no effect with --secure-serving=false")
        return {"mode": "off"}
    if directory:
        return {
            "mode": "files",
            "certificate": str(Path(directory) / "tls.crt"),
            "key": str(Path(directory) / "tls.key"),
        }
    return {"mode": "self-signed"}
