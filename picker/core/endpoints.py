"""The endpoints that can be picked, and what a scrape says of an engine, as values."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class KvEvents(Struct, frozen=True, rename="camel"):
    """Where an engine publishes its KV events; what is empty follows from the host and the arguments of the plugin."""

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""


class Endpoint(Struct, frozen=True):
    """One model server that can be picked. `address` is "ip:port", IPv6 in brackets.

    Two endpoints are the same when name, namespace and address are; labels, engine and model may change meanwhile.
    """

    name: str
    address: str
    namespace: str = "default"
    engine: str = "vllm"
    model: str = ""
    labels: Mapping[str, str] = {}
    runtime: str = ""
    """"host:port" of its sidecar."""
    kv_events: KvEvents = KvEvents()
    """Those of data-parallel rank 0."""
    rank: int = 0
    """Which data-parallel rank it is of those that share its host and name."""
    started_at: float | None = None
    """When its container started, in Unix seconds, where discovery knows it."""

    @property
    def host(self) -> str:
        """The host of its address; IPv6 in brackets."""
        return self.address.rpartition(":")[0]

    @property
    def identity(self) -> tuple[str, str, str]:
        return (self.namespace, self.name, self.address)


NOBODY = Endpoint(name="", address="")


class Adapters(Struct, frozen=True):
    """LoRA adapters that an engine has loaded for running requests, those that requests wait for, and its slots for them."""

    running: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    most: int = 0


class EngineMetrics(Struct, frozen=True):
    """What one scrape of an engine said; None where it said nothing.

    `waiting` and `running` are requests, `kv_usage` is 0..1, `ttft` and `tpot` are the mean seconds to the first
    and to each further token since the scrape before (0 when there was no traffic yet), `models` are the names the
    engine serves, adapters included, `bases` those of its base model, `started_at` is when its process started, in
    Unix seconds, `cache_tokens` how many tokens its KV cache has room for, and `adapters` what it does with LoRA adapters.
    """

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    models: frozenset[str] | None = None
    bases: tuple[str, ...] | None = None
    started_at: float | None = None
    cache_tokens: float | None = None
    adapters: Adapters | None = None
