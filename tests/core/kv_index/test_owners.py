"""Redis values and what they make of a prompt, by Kthena's vectors."""

from __future__ import annotations

from collections import Counter

import pytest

from picker.core.kv_index.owners import Candidate, block_key, owned_prefix, parse_value

TIERS = {"GPU": 1.0, "CPU": 0.5}


def owned(blocks, candidates, counts=None):
    counts = Counter() if counts is None else counts
    return owned_prefix([block.items() for block in blocks], candidates, TIERS, counts)


def test_keys_are_kthenas():
    model = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    assert block_key(model, 12345678901234567890) == f"matrix:kv:block:{model}@12345678901234567890"
    assert block_key("prefix", 0) == "matrix:kv:block:prefix@0"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"1703123789", (1703123789, None)),
        (b"1703123789|GPU", (1703123789, "GPU")),
        (b"1703123789|cpu_pinned", (1703123789, "CPU_PINNED")),
        (b"not-a-number", (None, None)),
        (b"-5", (None, None)),
        (b"", (None, None)),
        (b"|", (None, None)),
        (b"\xff\xfe", (None, None)),
        ("²".encode(), (None, None)),
    ],
)
def test_values(value, expected):
    assert parse_value(value) == expected


def test_ownership_from_before_the_container_started_does_not_count():
    candidates = {b"pod.default": Candidate(0, started_at=1000)}
    counts: Counter[str] = Counter()

    def kept(owner: bytes, value: bytes) -> bool:
        return bool(owned([{owner: value}], candidates, counts).groups)

    assert not kept(b"pod.default", b"999")
    assert not kept(b"pod.default", b"1000")
    assert kept(b"pod.default", b"1001")
    assert kept(b"pod.default", b"not-a-number")
    assert not kept(b"pod.other", b"1001")
    assert counts == {"stale": 2, "unknown_owner": 1}
    assert owned([{b"pod.default": b"999"}], {b"pod.default": Candidate(0)}).groups == [(1, 1)]


def test_a_value_that_is_too_long_does_not_count():
    counts: Counter[str] = Counter()
    assert owned([{b"a.b": b"9" * 65}], {b"a.b": Candidate(0)}, counts).groups == []
    assert counts == {"malformed": 1}


def test_leading_blocks_by_owner():
    pods = {b"pod1.default": Candidate(0), b"pod2.default": Candidate(1)}
    both = {b"pod1.default": b"5", b"pod2.default": b"5", b"pod1.other": b"5"}
    one = {b"pod1.default": b"5"}
    assert owned([both, both, one, one], pods).groups == [(4, 1), (2, 2)]
    assert owned([{}, both], pods).groups == []


def test_blocks_in_slower_tiers_are_worth_less():
    pods = {b"a.b": Candidate(3), b"c.d": Candidate(4)}
    blocks = [{b"a.b": b"5|GPU", b"c.d": b"5"}, {b"a.b": b"5|CPU"}, {b"a.b": b"5|TAPE"}, {b"a.b": b"5|CPU"}]
    found = owned(blocks, pods)
    assert found.groups == [(2, 8), (1, 16)]
    assert found.weights == {3: 1.5}
