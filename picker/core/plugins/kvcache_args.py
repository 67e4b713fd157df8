"""The arguments of `kvcache-aware`: Kthena's, and those of what is better here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from picker.core import addresses
from picker.core.block_hashes.registry import HashName
from picker.core.block_index.index import TIER_WEIGHTS
from picker.core.strict import Findings, child

_Url = Annotated[
    str,
    Meta(pattern=r"^(https?://[!-~]+)?$", max_length=2048, extra={"remedy": "give http://host:port"}),
]
_File = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]*$", max_length=4096, extra={"remedy": "use the path of a file"})]
_Port = Annotated[int, Meta(le=65_535)]
_Name = Annotated[str, Meta(max_length=512)]


class IndexMode(StrEnum):
    """Where it is known which engine holds what."""

    REDIS = "redis"
    MEMORY = "memory"
    DIRECT = "direct"


class Way(StrEnum):
    """A way to turn prompts into tokens."""

    LOCAL = "local"
    ENGINE = "engine"
    RENDER = "render"
    SERVICE = "service"


class TokenizerService(Struct, frozen=True, rename="camel"):
    """Kthena's Tokenizer Service."""

    enabled: bool = False
    """Whether prompts are tokenized by a Tokenizer Service in the place of engines."""
    endpoint: _Url = "http://127.0.0.1:8100"
    """Where it is, `http://host:port`."""
    fallback_to_engine: bool = True
    """Whether an engine is asked when the service fails."""


class RedisArgs(Struct, frozen=True, rename="camel"):
    """How Redis is reached. The password comes from the environment only, as `REDIS_PASSWORD`."""

    address: Annotated[str, Meta(extra={"read": addresses.service})] = ""
    """Where it is, `host:port`. Left out: `REDIS_HOST` and `REDIS_PORT` of the environment, else `redis-server:6379`."""
    db: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Number of the database."""
    username: _Name = ""
    """User of the ACL; left out: the default one."""
    tls: bool = False
    """Whether the connection is encrypted; certificates are checked against the system's."""
    budget_seconds: Annotated[float, Meta(ge=0.001, le=10)] = 0.05
    """How long a request waits for Redis, in seconds. Without an answer it is routed by the other plugins."""


class KvCacheArgs(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Arguments of `kvcache-aware`. Whole numbers that are zero or less mean the default."""

    index_mode: IndexMode = IndexMode.REDIS
    """Where it is known which engine holds what: `redis`: sidecars write it there; `memory`: sidecars stream it to the
    picker; `direct`: the picker follows the engines' own KV events, without sidecars."""
    block_size_to_hash: int = 16
    """Tokens in a block of the engines. With `redis` it must be the engines' own, with the others events say it."""
    hash_protocol: HashName = HashName.KTHENA
    """What blocks are called by sidecars, in Redis and where their streams have hashes only: `kthena`, or, for an index
    that others fill by their own keys, `llm-d-cbor-fnv`, `llm-d-xxh64`, or the engines' own: `vllm-sha256` and
    `vllm-sha256-cbor` (0.31 and later), the same with `-untagged` (before), `sglang`. Sidecars say it as
    `KV_EVENT_HASH_PROTOCOL`."""
    hash_seed: Annotated[str, Meta(max_length=1024)] = ""
    """What hashes begin with: the engines' `PYTHONHASHSEED`, or llm-d's `hashSeed`. Not for `kthena` and `sglang`."""
    max_blocks_to_match: int = 128
    """Blocks of a prompt that are looked up in `redis` and `memory` mode; tokens after them are ignored. `direct` has no
    such limit."""
    max_blocks_per_pod: int = 1 << 20
    """Blocks that are known of one endpoint, over all models; the oldest are dropped. Not for `redis`."""
    tokenizers: tuple[Way, ...] = ()
    """Ways to tokenize, each tried when those before failed. Left out: `local` where there is a `modelDirectory`,
    `service` where it is enabled, then `engine`."""
    model_directory: _File = ""
    """Directory with the model's `tokenizer.json` and chat template, for `local`."""
    vllm_tokenizer_port: _Port = 8000
    """Port of vLLM's `/tokenize`, on the endpoint's host. The default also stands for the endpoint's own port."""
    sglang_tokenizer_port: _Port = 30_000
    """Port of SGLang's `/tokenize`, on the endpoint's host. The default also stands for the endpoint's own port."""
    tokenizer_service: TokenizerService = TokenizerService()
    """Kthena's Tokenizer Service."""
    model_aliases: Mapping[str, _Name] = {}
    """Clients' model names that engines do not know, each with the engines' name."""
    redis: RedisArgs = RedisArgs()
    """How Redis is reached."""
    runtime_port: _Port = 9000
    """Port of the sidecar on the endpoint's host, for `memory`; an endpoint's `runtime` goes before it."""
    zmq_port: _Port = 5557
    """Port of an engine's KV events on the endpoint's host, for `direct`; an endpoint's `kvEvents` go before it."""
    zmq_replay: bool = True
    """Whether engines replay events at `zmqReplayPort`. Without it a lost event leaves an engine's cache unknown."""
    zmq_replay_port: _Port = 5558
    """Port of the replays, on the endpoint's host."""
    zmq_ranks: Annotated[int, Meta(le=1024)] = 1
    """Data-parallel ranks of an engine; rank r has the ports above plus r."""
    topic: Annotated[str, Meta(max_length=1024)] = ""
    """What the topic of events has to begin with."""
    tier_weights: Mapping[str, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=lambda: dict(TIER_WEIGHTS))
    """What a cached block is worth by the medium it is on, 0 to 1. Other media do not count."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways to tokenize, in their order."""
        if self.tokenizers:
            return self.tokenizers
        service = self.tokenizer_service
        return (
            *((Way.LOCAL,) if self.model_directory else ()),
            *((Way.SERVICE,) if service.enabled else ()),
            *((Way.ENGINE,) if service.fallback_to_engine or not service.enabled else ()),
        )

    def check(self, path: str, findings: Findings) -> None:
        """Look at what only all arguments together can have wrong."""
        ways, here = self.ways, child(path, "tokenizers")
        if len(set(ways)) < len(ways):
            findings.add(here, "has a way twice", list(ways), "keep it once")
        if Way.LOCAL in ways and not self.model_directory:
            findings.add(child(path, "modelDirectory"), "is missing", remedy="name the directory of the tokenizer")
        if Way.SERVICE in ways and not self.tokenizer_service.endpoint:
            findings.add(child(child(path, "tokenizerService"), "endpoint"), "is missing", remedy="add it")
        if self.model_directory and Way.LOCAL not in ways:
            findings.warn(child(path, "modelDirectory"), "is not used: tokenizers does not have local")
        if self.hash_seed and self.hash_protocol in {HashName.KTHENA, HashName.SGLANG}:
            findings.warn(child(path, "hashSeed"), f"is not used: hashes of {self.hash_protocol} have no seed")
        for name, address in (("zmqPort", self.zmq_port), ("zmqReplayPort", self.zmq_replay_port)):
            if address + self.zmq_ranks - 1 > 65_535:
                findings.add(child(path, name), f"leaves no ports for {self.zmq_ranks} ranks", address)
