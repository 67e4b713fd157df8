"""The hash protocols by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from picker.core.block_hashes import kthena, llm_d, sglang, vllm
from picker.core.block_hashes.context import BlockHasher


class HashProtocol(NamedTuple):
    """A way to name blocks: what it is, in a line, and the function that does it."""

    description: str
    hash_blocks: BlockHasher


HASH_PROTOCOLS: Mapping[str, HashProtocol] = MappingProxyType(
    {
        "kthena": HashProtocol(
            "Kthena's standardized hash: SHA-256 of each block's tokens, unchained", kthena.standardized
        ),
        "llm-d-cbor-fnv": HashProtocol("llm-d's default: chained FNV-1a over canonical CBOR", llm_d.cbor_fnv),
        "llm-d-xxh64": HashProtocol("llm-d's fast form: chained XXH64", llm_d.xxh64),
        "vllm-sha256": HashProtocol("vLLM >= 0.31, sha256 (its default), fixed seed", vllm.sha256_pickle),
        "vllm-sha256-cbor": HashProtocol("vLLM >= 0.31, sha256_cbor, fixed seed", vllm.sha256_cbor),
        "vllm-sha256-untagged": HashProtocol("vLLM 0.12 .. 0.30, sha256, fixed seed", vllm.sha256_pickle_untagged),
        "vllm-sha256-cbor-untagged": HashProtocol(
            "vLLM 0.12 .. 0.30, sha256_cbor, fixed seed", vllm.sha256_cbor_untagged
        ),
        "sglang": HashProtocol("SGLang >= 0.5.6: chained SHA-256 of pages", sglang.sha256_chain),
    }
)
