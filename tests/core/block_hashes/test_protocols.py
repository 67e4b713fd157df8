"""Block keys against published vectors and independent implementations of each protocol."""

from __future__ import annotations

import hashlib
import pickle
import struct
from functools import reduce
from typing import Any

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from picker.core.block_hashes.cbor import encode
from picker.core.block_hashes.context import HashContext
from picker.core.block_hashes.llm_d import fnv1a_64
from picker.core.block_hashes.registry import HASH_PROTOCOLS

PLAIN = HashContext(model="tiny")


def keys(protocol: str, tokens: Any, block_size: int, context: HashContext = PLAIN) -> list[int]:
    return HASH_PROTOCOLS[protocol].hash_blocks(tokens, block_size, context)


def blocks_of(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[at : at + size] for at in range(0, len(tokens), size) if at + size <= len(tokens)]


# -- Kthena: vectors of its documentation --


@pytest.mark.parametrize(
    ("tokens", "key"),
    [
        ([0], 6863311662677045211),
        ([1], 3748984630417570165),
        ([123], 3207548891546131000),
        ([1, 2, 3], 8866284349863400844),
        ([3, 2, 1], 8614857523597101639),
        ([1, 2, 3, 4], 4233425515844289900),
        ([5, 6, 7, 8], 929962052233473060),
        ([1, 2, 3, 4, 5], 6818328894798336332),
        ([100, 200, 300], 5035269745346673545),
        ([65536, 131072, 262144], 8449045214337056412),
        ([4294967295], 3284552513154947520),
        ([4294967295, 4294967196, 4294966296], 4722989680274072345),
        (list(range(1, 17)), 6615856733697512468),
        (list(range(16)), 6473494984593326032),
    ],
)
def test_kthena_vectors(tokens: list[int], key: int):
    assert keys("kthena", tokens, len(tokens)) == [key]


def test_kthena_is_not_chained():
    assert keys("kthena", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], 4) == [
        4233425515844289900,
        929962052233473060,
        4233425515844289900,
    ]


# -- What every protocol owes --

contexts = st.builds(
    HashContext,
    model=st.text(max_size=30),
    lora_name=st.none() | st.text(min_size=1, max_size=10),
    lora_path=st.text(max_size=10),
    cache_salt=st.none() | st.text(min_size=1, max_size=300),
    multimodal=st.dictionaries(
        st.integers(0, 3), st.lists(st.tuples(st.text(max_size=64), st.integers(-999, 999)), max_size=2).map(tuple)
    ),
    seed=st.text(max_size=10),
)
prompts = st.lists(st.integers(0, 300) | st.integers(0, 2**32 - 1), max_size=40)
sizes = st.integers(1, 20)


@pytest.mark.parametrize("protocol", HASH_PROTOCOLS)
@given(prompts, sizes, contexts)
def test_full_blocks_only_and_a_prefix_keeps_its_keys(
    protocol: str, tokens: list[int], size: int, context: HashContext
):
    found = keys(protocol, tokens, size, context)
    assert len(found) in {len(tokens) // size, 0}
    assert all(0 <= key < 2**64 for key in found)
    assert keys(protocol, tokens[: len(tokens) // 2], size, context) == found[: len(tokens) // 2 // size]


@pytest.mark.parametrize("protocol", HASH_PROTOCOLS)
def test_what_cannot_be_hashed_is_refused(protocol: str):
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"block_size is {size}"):
            keys(protocol, [1, 2], size)
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            keys(protocol, [token], 1)


@pytest.mark.parametrize("protocol", HASH_PROTOCOLS)
def test_every_protocol_says_what_it_is(protocol: str):
    assert HASH_PROTOCOLS[protocol].description


# -- Canonical CBOR, against an encoder of it --

cbor_values = st.recursive(
    st.none() | st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=30).map(tuple) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(cbor_values)
def test_cbor_is_canonical(value: Any):
    assert encode(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("value", [23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1])
def test_cbor_takes_the_shortest_form(value: int):
    assert encode(value) == cbor2.dumps(value, canonical=True)


def test_cbor_refuses_the_rest():
    for value in (True, 1.5, {1, 2}):
        with pytest.raises(TypeError):
            encode(value)
    with pytest.raises(OverflowError):
        encode(2**64)


# -- llm-d --


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0xCBF29CE484222325),
        (b"a", 0xAF63DC4C8601EC8C),
        (b"b", 0xAF63DF4C8601F1A5),
        (b"foobar", 0x85944171F73967E8),
    ],
)
def test_fnv_vectors(data: bytes, value: int):
    assert fnv1a_64(data) == value


def reference_fnv(data: bytes) -> int:
    return reduce(lambda value, byte: ((value ^ byte) * 1099511628211) % 2**64, data, 14695981039346656037)


def reference_extra(context: HashContext, number: int) -> list[str]:
    extra = [identifier for identifier, _ in context.multimodal.get(number, ())]
    if number == 0 and context.cache_salt:
        extra.append(context.cache_salt)
    return extra


@given(prompts, sizes, contexts)
def test_llm_d_cbor_fnv(tokens: list[int], size: int, context: HashContext):
    def digest(*parts: Any) -> int:
        return reference_fnv(cbor2.dumps(list(parts), canonical=True))

    key = digest(reference_fnv(context.seed.encode()), None, context.lora_name or context.model)
    expected = []
    for number, block in enumerate(blocks_of(tokens, size)):
        extra = [{"Hash": text} for text in reference_extra(context, number)]
        key = digest(key, block, extra or None)
        expected.append(key)
    assert keys("llm-d-cbor-fnv", tokens, size, context) == expected


@given(prompts, sizes, contexts)
def test_llm_d_xxh64(tokens: list[int], size: int, context: HashContext):
    def digest(parent: int, block: list[int], extra: list[str]) -> int:
        state = xxhash.xxh64(struct.pack("<Q", parent))
        for token in block:
            state.update(struct.pack("<I", token))
        for text in extra:
            state.update(struct.pack("<Q", len(text.encode())))
            state.update(text.encode())
        return state.intdigest()

    key = digest(xxhash.xxh64(context.seed.encode()).intdigest(), [], [context.lora_name or context.model])
    expected = []
    for number, block in enumerate(blocks_of(tokens, size)):
        key = digest(key, block, reference_extra(context, number))
        expected.append(key)
    assert keys("llm-d-xxh64", tokens, size, context) == expected


# -- vLLM: the pickled form also in test_captures, against an engine --


def reference_vllm_extra(context: HashContext, number: int, tagged: bool) -> tuple[Any, ...] | None:
    extra: list[Any] = []
    if context.lora_name:
        extra.append(("lora", context.lora_name, context.lora_path) if tagged else context.lora_name)
    for identifier, offset in context.multimodal.get(number, ()):
        extra.append(("mm", identifier, offset) if tagged else (identifier, offset))
    if context.cache_salt and number == 0:
        extra.append(("cache_salt", context.cache_salt) if tagged else context.cache_salt)
    return tuple(extra) or None


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("form", ["vllm-sha256", "vllm-sha256-cbor"])
@given(prompts, sizes, contexts)
def test_vllm(form: str, tagged: bool, tokens: list[int], size: int, context: HashContext):
    def digest(value: Any) -> bytes:
        written = cbor2.dumps(value, canonical=True) if form.endswith("cbor") else pickle.dumps(value, protocol=5)
        return hashlib.sha256(written).digest()

    parent = digest(context.seed or "vllm-none-hash")
    expected = []
    for number, block in enumerate(blocks_of(tokens, size)):
        parent = digest((parent, tuple(block), reference_vllm_extra(context, number, tagged)))
        expected.append(int(parent.hex()[-16:], 16))
    assert keys(form if tagged else f"{form}-untagged", tokens, size, context) == expected


@pytest.mark.parametrize("form", ["vllm-sha256", "vllm-sha256-cbor"])
def test_an_adapter_whose_path_is_not_known_has_no_keys(form: str):
    assert keys(form, [1, 2], 1, HashContext(lora_name="adapter")) == []
    assert keys(f"{form}-untagged", [1, 2], 1, HashContext(lora_name="adapter"))


# -- SGLang --


@given(prompts, sizes)
def test_sglang(tokens: list[int], size: int):
    prior, expected = None, []
    for page in blocks_of(tokens, size):
        state = hashlib.sha256()
        if prior is not None:
            state.update(bytes.fromhex(prior))
        for token in page:
            state.update(token.to_bytes(4, "little"))
        prior = state.hexdigest()
        (signed,) = struct.unpack(">q", bytes.fromhex(prior[:16]))
        expected.append(signed % 2**64)
    assert keys("sglang", tokens, size) == expected


@pytest.mark.parametrize("context", [HashContext(lora_name="adapter"), HashContext(cache_salt="salt")])
def test_sglang_namespaces_are_its_own(context: HashContext):
    assert keys("sglang", [1, 2], 1, context) == []
