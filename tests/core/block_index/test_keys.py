"""Keys and their chains: equal exactly when prompts are, and never other than computed from scratch."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.block_index.chains import KeyChains
from picker.core.block_index.keys import block_keys, event_suffixes, pack, prompt_suffixes, root_key

tokens = st.lists(st.integers(0, 1), max_size=60)


def keys(ids, size=2, root=7, suffixes=None) -> list[int]:
    return block_keys(root, pack(ids), size, len(ids) // size, suffixes)


@given(tokens, tokens, st.integers(1, 5))
def test_keys_are_equal_as_far_as_prompts_are(one, other, size):
    for number, (left, right) in enumerate(zip(keys(one, size), keys(other, size), strict=False), 1):
        assert (left == right) == (one[: number * size] == other[: number * size])


def test_keys_differ_by_model_adapter_and_block_size():
    roots = [root_key("m", None, 16), root_key("n", None, 16), root_key("m", "None", 16), root_key("m", None, 32)]
    assert len({keys([1, 2], root=root)[0] for root in roots}) == len(roots)
    assert all(key < 1 << 60 for root in roots for key in keys(range(100), root=root))


def test_a_chain_goes_on_from_any_block():
    data = list(range(40))
    whole = keys(data, 4)
    assert block_keys(whole[3], pack(data[16:]), 4, 6) == whole[4:]


@given(st.lists(st.tuples(tokens, st.integers(0, 60)), max_size=12), st.integers(1, 3), st.sampled_from([None, "s"]))
def test_kept_chains_are_those_computed_from_scratch(steps, size, salt):
    chains = KeyChains(capacity=40, page_tokens=6)
    conversation: list[int] = []
    for more, back in steps:
        conversation = (conversation[:back] + more)[:90]
        suffixes = prompt_suffixes((), salt, size)
        chain = chains.chain(3, pack(conversation), size, suffixes)
        assert list(chain.keys) == keys(conversation, size, 3, suffixes)
        assert chains.keys <= 40 or len(chains._chains) == 0
        assert chains.keys == sum(len(kept.keys) for kept in chains._chains.values())


def test_a_known_prompt_costs_no_hashing(monkeypatch):
    chains = KeyChains(page_tokens=8)
    prompt = pack(range(50))
    first = chains.chain(3, prompt, 2, {})
    assert chains.chain(3, prompt, 2, {}) is first
    hashed = []

    def count(parent, data, size, blocks, suffixes=None):
        hashed.append(blocks)
        return block_keys(parent, data, size, blocks, suffixes)

    monkeypatch.setattr("picker.core.block_index.chains.block_keys", count)
    chains.chain(3, pack(range(60)), 2, {})
    chains.chain(3, pack([*range(57), 9, 9, 9, 9]), 2, {})  # 56 tokens are found by page
    chains.chain(3, pack([*range(57), 9, 9, 8, 8, 8]), 2, {})  # and one block more by comparing
    chains.chain(4, prompt, 2, {})
    assert hashed == [5, 2, 2, 25]


def test_packing_refuses_what_is_no_token():
    assert bytes(pack([1, 2**32 - 1])) == array("I", [1, 2**32 - 1]).tobytes()
    for wrong, error in (([-1], OverflowError), ([2**32], OverflowError), ([[1, 2]], TypeError), (["1"], TypeError)):
        with pytest.raises(error):
            pack(wrong)


@pytest.mark.parametrize(
    ("extra_keys", "adapter", "salt_field", "media", "salt"),
    [
        ((None, None, None, None), None, None, [], None),
        ((("ad-a",), ("ad-a",), None, None), "ad-a", None, [], None),
        ((("ad-a", "sss"), ("ad-a",), ("ad-a",), ("ad-a",)), "ad-a", None, [], "sss"),
        ((("s",), None, None, None), None, None, [], "s"),
        (None, None, "s", [], "s"),  # SGLang
        (
            (None, (("image", 2),), (("image", -14), ("other", 9)), None),
            None,
            None,
            [("image", 18, 20), ("other", 41, 5)],
            None,
        ),
        ((None, ("image",), ("image", "other"), None), None, None, [("image", 18, 20), ("other", 41, 5)], None),
        (((("image", 3), "s"), None, None, None), None, None, [("image", 3, 2)], "s"),
    ],
)
def test_events_and_prompts_tell_blocks_apart_alike(extra_keys, adapter, salt_field, media, salt):
    """Extra keys as vLLM publishes them: names, `(identifier, offset)` or bare identifiers, the salt in block 0."""
    assert event_suffixes(extra_keys, adapter, True, salt_field) == prompt_suffixes(media, salt, 16)


def test_a_salt_field_counts_in_the_first_block_only():
    assert event_suffixes(None, None, False, "s") == {}
