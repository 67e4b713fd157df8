"""Block hashes: the golden vectors of Kthena's router, computed with an independent implementation, and the chain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.prefix_cache.hashing import BlockHasher, block_hashes

CHATML = b"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is Kthena?<|im_end|>\n"


@pytest.mark.parametrize(
    ("model", "text", "size", "most", "expected"),
    [
        ("test-model", b"Hello World", 64, 128, [1993528491812861608]),
        ("test-model", b"hello world", 64, 128, [2635914025576938453]),
        ("test-model", "你好,世界!".encode(), 64, 128, [11679727296606855623]),
        (
            "test-model",
            b"This is a longer prompt that should span multiple blocks based on the block size",
            20,
            128,
            [8626393537367828840, 16829149375953976751, 13000309909902416355, 4164474810863779859],
        ),
        (
            "test-model",
            b"A very long prompt " + b"test " * 100,
            10,
            3,
            [16111477285489601796, 3196756824981370828, 16885010878743789486],
        ),
        ("bench-model", b"a" * 65, 64, 128, [7043395440821958154, 1403495587738010730]),
        ("", b"x", 64, 128, [12454288895216015885]),
        ("Qwen/Qwen3-0.6B", CHATML, 64, 128, [7667825538605972909, 3187242934721970840]),
    ],
)
def test_golden(model, text, size, most, expected):
    assert block_hashes(model, text, size, most) == expected


def test_golden_full_length():
    text = bytes(ord("a") + i % 26 for i in range(8192))
    hashes = block_hashes("bench-model", text, 64, 128)
    assert len(hashes) == 128
    assert hashes[:8] == [
        2255003460060045391,
        11149546857834002314,
        17187590233846641107,
        4034322412968604605,
        15207223297201143248,
        9824985680695740636,
        494137533886476659,
        12428692248081375853,
    ]
    assert hashes[-1] == 3713727362220958295


@pytest.mark.parametrize(
    ("length", "blocks"),
    [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (192, 3), (320, 5), (1600, 25), (2000, 32), (8192, 128), (32768, 128)],
)
def test_number_of_blocks(length, blocks):
    assert len(block_hashes("m", b"x" * length, 64, 128)) == blocks


def test_text_after_the_last_block_is_ignored():
    assert block_hashes("m", b"x" * 8192, 64, 128) == block_hashes("m", b"x" * 8192 + b"y" * 500, 64, 128)
    assert block_hashes("m", b"ab" + b"c", 2, 1) == block_hashes("m", b"ab" + b"d", 2, 1)


def test_a_short_last_block_is_not_its_own_extension():
    assert block_hashes("m", b"abc", 64, 128) != block_hashes("m", b"abcd", 64, 128)


letters = st.text("ab", max_size=14).map(str.encode)


@settings(max_examples=300, deadline=None)
@given(
    common=letters,
    tails=st.tuples(letters, letters),
    size=st.integers(1, 5),
    most=st.integers(1, 6),
    model=st.sampled_from(["m", "n"]),
)
def test_hashes_are_equal_exactly_as_far_as_the_blocks_are(common, tails, size, most, model):
    first, second = (common + tail for tail in tails)
    a, b = block_hashes("m", first, size, most), block_hashes(model, second, size, most)
    assert len(a) == min(most, -(-len(first) // size))
    for block in range(min(len(a), len(b))):
        end = (block + 1) * size
        assert (a[block] == b[block]) == (model == "m" and first[:end] == second[:end])
    assert len({*a, *b}) == len(a) + len(b) - sum(x == y for x, y in zip(a, b, strict=False))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 70), st.integers(1, 9))
def test_a_longer_prompt_continues_the_chain(text, size, most):
    hashes = block_hashes("m", text, size, most)
    for blocks in range(1, len(hashes)):
        assert block_hashes("m", text[: blocks * size], size, most) == hashes[:blocks]
    assert all(0 <= digest < 2**64 for digest in hashes)


@given(
    st.lists(st.tuples(st.sampled_from(["m", "n"]), st.integers(0, 6), st.binary(max_size=40)), max_size=30),
    st.integers(1, 20),
)
def test_what_is_remembered_never_changes_a_hash(prompts, block_size):
    hasher = BlockHasher()
    for model, repeats, tail in prompts:
        text = b"the same beginning of all of these prompts, which is longer than the key " * repeats * 2 + tail
        assert hasher.hashes(model, text, block_size, 64) == block_hashes(model, text, block_size, 64)


def test_what_is_remembered_is_bounded():
    hasher = BlockHasher()
    for number in range(3000):
        hasher.hashes("m", f"{number:05}".encode() * 10_000, 512, 100_000)
    assert hasher.remembered <= 16 * 1024 * 1024
    assert len(hasher.hashes("m", b"x" * 3_000_000, 512, 100_000)) == -(-3_000_000 // 512)
    assert hasher.remembered <= 16 * 1024 * 1024
