"""The hash protocols by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from picker.core.block_hashes import kthena, llm_d, sglang, vllm
from picker.core.block_hashes.context import BlockHasher
from picker.core.block_hashes.llm_d import Chain


class HashName(StrEnum):
    """The names of hash protocols."""

    KTHENA = "kthena"
    LLM_D_CBOR_FNV = "llm-d-cbor-fnv"
    LLM_D_XXH64 = "llm-d-xxh64"
    VLLM_SHA256 = "vllm-sha256"
    VLLM_SHA256_CBOR = "vllm-sha256-cbor"
    VLLM_SHA256_UNTAGGED = "vllm-sha256-untagged"
    VLLM_SHA256_CBOR_UNTAGGED = "vllm-sha256-cbor-untagged"
    SGLANG = "sglang"


class HashProtocol(NamedTuple):
    """A way to name blocks: what it is, in a line, and the function that does it.

    `of_engine`: engines name their blocks so themselves. `chain` is there where a key follows from the one before it.
    `tells_apart`: keys cover cache salts and multimodal items; others' prompts with these would match otherwise.
    """

    description: str
    hash_blocks: BlockHasher
    of_engine: bool = False
    chain: Chain | None = None
    tells_apart: bool = True


HASH_PROTOCOLS: Mapping[HashName, HashProtocol] = MappingProxyType(
    {
        HashName.KTHENA: HashProtocol(
            "Kthena's standardized hash: SHA-256 of each block's tokens, unchained",
            kthena.standardized,
            tells_apart=False,
        ),
        HashName.LLM_D_CBOR_FNV: HashProtocol(
            "llm-d's default: chained FNV-1a over canonical CBOR", llm_d.CBOR_FNV.hash_blocks, chain=llm_d.CBOR_FNV
        ),
        HashName.LLM_D_XXH64: HashProtocol(
            "llm-d's fast form: chained XXH64", llm_d.XXH64.hash_blocks, chain=llm_d.XXH64
        ),
        HashName.VLLM_SHA256: HashProtocol(
            "vLLM >= 0.31, sha256 (its default), fixed seed", vllm.sha256_pickle, of_engine=True
        ),
        HashName.VLLM_SHA256_CBOR: HashProtocol(
            "vLLM >= 0.31, sha256_cbor, fixed seed", vllm.sha256_cbor, of_engine=True
        ),
        HashName.VLLM_SHA256_UNTAGGED: HashProtocol(
            "vLLM 0.12 .. 0.30, sha256, fixed seed", vllm.sha256_pickle_untagged, of_engine=True
        ),
        HashName.VLLM_SHA256_CBOR_UNTAGGED: HashProtocol(
            "vLLM 0.12 .. 0.30, sha256_cbor, fixed seed", vllm.sha256_cbor_untagged, of_engine=True
        ),
        HashName.SGLANG: HashProtocol(
            "SGLang >= 0.5.6: chained SHA-256 of pages", sglang.sha256_chain, of_engine=True, tells_apart=False
        ),
    }
)
