"""What `picker sidecar` is told: Kthena's options and environment, and some of our own."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from picker.core.block_hashes.registry import HashName
from picker.core.strict import suggest
from picker.io.kv_events.source import KvEventSource
from picker.io.kv_index.redis_connection import RedisSettings

ENGINES = ("vllm", "sglang", "vllmdisaggregated")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


class SettingsError(ValueError):
    """An option or a variable cannot be used; says which, and what to do."""


class SyncMode(StrEnum):
    """How ownership travels to routers."""

    REDIS = "redis"
    MEMORY = "memory"


class SidecarSettings(Struct, frozen=True):
    """All settings, checked. Times in seconds."""

    engine: str
    """"vllm" or "sglang"."""
    host: str
    port: int
    base_url: str
    metrics_path: str
    pod: str
    model: str
    mode: SyncMode
    source: KvEventSource
    redis: RedisSettings
    request_timeout: float
    media: bool
    hash_protocol: HashName
    """What blocks are called; routers have to know it, too."""
    hash_seed: str
    token: str
    certificate: tuple[Path, Path] | None
    """Files with the certificate chain and its key."""
    warnings: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `picker sidecar`, which are Kthena's."""
    parser.add_argument("-E", "--engine", required=True, type=str.lower, choices=ENGINES, help="the engine's kind")
    parser.add_argument("-H", "--host", default="0.0.0.0", help="address to listen on (%(default)s)")
    parser.add_argument("-P", "--port", type=int, default=9000, help="port to listen on (%(default)s)")
    parser.add_argument(
        "-B", "--engine-base-url", default="http://localhost:8000", help="where the engine serves (%(default)s)"
    )
    parser.add_argument("-M", "--engine-metrics-path", default="/metrics", help="path of its metrics (%(default)s)")
    parser.add_argument("-I", "--pod", default="", help="the engine's name for routers: pod.namespace")
    parser.add_argument("-N", "--model", default="", help="the model's name for routers, as requests give it")


def read_settings(options: argparse.Namespace, environment: Mapping[str, str]) -> SidecarSettings:
    """Put options and environment together. Raises SettingsError."""
    engine = "sglang" if options.engine == "sglang" else "vllm"
    if not 0 <= options.port <= 65_535:
        raise SettingsError(f"--port is {options.port}; give 0 .. 65535")
    if not options.engine_base_url.startswith(("http://", "https://")):
        raise SettingsError(f"--engine-base-url is {options.engine_base_url!r}; it begins with http:// or https://")
    warnings: list[str] = []
    wanted = environment.get("KV_EVENT_SYNC_MODE", "").strip().lower() or SyncMode.REDIS
    if wanted not in set(SyncMode):
        warnings.append(f"KV_EVENT_SYNC_MODE is {wanted!r}, which is neither redis nor memory: taken for redis")
        wanted = SyncMode.REDIS
    return SidecarSettings(
        engine=engine,
        host=options.host,
        port=options.port,
        base_url=options.engine_base_url,
        metrics_path=options.engine_metrics_path,
        pod=options.pod.strip(),
        model=options.model.strip(),
        mode=SyncMode(wanted),
        source=_source(engine.upper(), environment),
        redis=RedisSettings(
            host=environment.get("REDIS_HOST", "").strip() or "redis-server",
            port=_integer(environment, "REDIS_PORT", 6379, 1, 65_535),
            db=_integer(environment, "REDIS_DB", 0, 0, 1 << 20),
            username=environment.get("REDIS_USERNAME", ""),
            password=environment.get("REDIS_PASSWORD", ""),
            tls=ssl.create_default_context() if _flag(environment, "REDIS_TLS") else None,
        ),
        request_timeout=_seconds(environment, "REQUEST_TIMEOUT", 30.0),
        media=_flag(environment, "KV_EVENT_MEDIUM"),
        hash_protocol=_hash_protocol(environment),
        hash_seed=environment.get("KV_EVENT_HASH_SEED", ""),
        token=_token(environment),
        certificate=_certificate(environment),
        warnings=tuple(warnings),
    )


def _hash_protocol(environment: Mapping[str, str]) -> HashName:
    name = environment.get("KV_EVENT_HASH_PROTOCOL", "").strip().lower() or HashName.KTHENA
    try:
        return HashName(name)
    except ValueError:
        raise SettingsError(f"KV_EVENT_HASH_PROTOCOL is {name!r}; {suggest(name, HashName)}") from None


def _source(prefix: str, environment: Mapping[str, str]) -> KvEventSource:
    """Where the engine publishes; Kthena's defaults."""
    topic = environment.get(f"{prefix}_ZMQ_TOPIC_FILTER", "kv-events" if prefix == "VLLM" else "")
    try:
        return KvEventSource(
            endpoint=environment.get(f"{prefix}_ZMQ_ENDPOINT", "").strip() or "tcp://localhost:5557",
            replay_endpoint=environment.get(f"{prefix}_ZMQ_REPLAY_ENDPOINT", "").strip() or None,
            topic=topic,
            exact_topic=bool(topic),
            ranks=_integer(environment, f"{prefix}_ZMQ_RANKS", 1, 1, 1024),
        )
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"{prefix}_ZMQ_ENDPOINT or {prefix}_ZMQ_REPLAY_ENDPOINT: {error}") from error


def _integer(environment: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise SettingsError(f"{name} is {text!r}; give a whole number from {least} to {most}")
    return int(text)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value < 86_400:
        raise SettingsError(f"{name} is {text!r}; give seconds, more than 0")
    return value


def _flag(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").strip().lower()
    if text not in _TRUE | _FALSE:
        raise SettingsError(f"{name} is {text!r}; give true or false")
    return text in _TRUE


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    text = environment.get(name, "").strip()
    return Path(text) if text else None


def _certificate(environment: Mapping[str, str]) -> tuple[Path, Path] | None:
    chain, key = (_path(environment, name) for name in ("TLS_CERT_FILE", "TLS_KEY_FILE"))
    if chain is not None and key is not None:
        return chain, key
    if chain is not None or key is not None:
        raise SettingsError("TLS_CERT_FILE and TLS_KEY_FILE go together; set both or none")
    return None


def _token(environment: Mapping[str, str]) -> str:
    """The bearer token for the register endpoint, from a variable or from a file."""
    token, path = environment.get("KV_EVENT_TOKEN", "").strip(), _path(environment, "KV_EVENT_TOKEN_FILE")
    if path is None:
        return token
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"KV_EVENT_TOKEN_FILE is {str(path)!r}, which cannot be read: {error}") from error
    if not token:
        raise SettingsError(f"KV_EVENT_TOKEN_FILE is {str(path)!r}, which is empty; nobody could register")
    return token
