"""The index of standalone hashes: Kthena's scoring vectors, and any history against sets."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.core.kv_index.hash_index import MOST_MODELS, HashIndex, leading

A, B, C = 1, 2, 4


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ([0, A, A], {}),
        ([A, A, A], {A: 3}),
        ([A | B, A | B, A, A], {A: 4, B: 2}),
        ([A | B, A, B, A], {A: 2, B: 1}),
        ([A | B | C | 8, A | B | C, A | B, A, A], {A: 5, B: 3, C: 2, 8: 1}),
        ([A | B, C, C], {A: 1, B: 1}),
        ([A, A, 0], {A: 2}),
        ([A | B | C], {A: 1, B: 1, C: 1}),
    ],
)
def test_consecutive_blocks_from_the_first_count(holders, expected):
    groups = leading(15, holders)
    assert {bit: blocks for blocks, mask in groups for bit in (1, 2, 4, 8) if mask & bit} == expected
    assert groups == sorted(groups, reverse=True)


def test_those_that_are_no_candidates_do_not_count():
    assert leading(B, [A | B, A | B, A, A]) == [(2, B)]


def test_models_are_apart():
    index = HashIndex()
    index.store(0, "a", [1, 2], [1, 1])
    assert index.match("b", [1, 2], 1) == []
    index.store(0, "b", [1], [1])
    assert index.match("b", [1, 2], 1) == [(1, 1)]
    index.clear(0, "a")
    assert index.match("b", [1, 2], 1) == []
    assert not index.sweep(100)
    assert index.match("b", [1, 2], 1) == [(1, 1)]
    assert index.match("a", [1, 2], 1) == []


def test_the_oldest_go_when_a_slot_has_too_many():
    index = HashIndex(most_blocks=3)
    index.store(0, "m", [1, 2, 3], [10, 11, 12])
    index.store(1, "m", [1], [10])
    index.store(0, "m", [1], [13])
    index.store(0, "m", [4], [14])
    assert index.match("m", [1], 1) == [(1, 1)]
    assert index.match("m", [2], 1) == []
    assert (index.blocks_of(0), index.blocks, index.counts["evicted"]) == (3, 4, 1)


def test_a_slot_that_is_forgotten_is_invisible_at_once_and_swept_in_slices():
    index = HashIndex()
    index.store(0, "m", range(10), [1] * 10)
    index.store(1, "m", range(10), [1] * 10)
    index.forget(0)
    assert index.match("m", [0, 1], 3) == [(2, 2)]
    assert index.is_hidden(0)
    assert index.sweep(4)
    assert index.sweep(4)
    assert not index.sweep(4)
    assert not index.is_hidden(0)
    index.store(0, "m", [5], [1])
    assert index.match("m", [5], 3) == [(1, 3)]


def test_a_hidden_slot_that_stores_again_has_only_the_new():
    index = HashIndex()
    index.store(0, "m", range(10), [1] * 10)
    index.forget(0)
    index.store(0, "m", [3], [2])
    assert index.match("m", [3], 1) == [(1, 1)]
    assert index.match("m", [4], 1) == []


def test_old_blocks_expire():
    index = HashIndex()
    index.store(0, "m", [1, 2, 3], [10, 20, 30])
    index.store(1, "m", [1, 2, 3], [10, 20, 30])
    assert index.expire(20, 10) == 2
    assert index.match("m", [2, 3], 3) == [(2, 3)]


def test_what_was_stored_up_to_a_restart_goes_in_whatever_order_it_came():
    index = HashIndex()
    index.store(0, "m", [1, 2, 3], [20, 21, 22])
    index.store(0, "other", [1, 2], [5, 30])
    index.store(1, "m", [1, 2], [5, 5])
    index.forget_older(0, 21)
    assert index.match("m", [3], 1) == []  # hidden until it is known which are left
    while index.sweep(1):
        pass
    assert [bool(index.match("m", [block], 1)) for block in (1, 2, 3)] == [False, False, True]
    assert [bool(index.match("other", [block], 1)) for block in (1, 2)] == [False, True]
    assert index.match("m", [1, 2], 2) == [(2, 2)]
    assert index.counts["before_start"] == 3


def test_no_sender_can_fill_the_table_of_models():
    index = HashIndex()
    for number in range(MOST_MODELS + 3):
        index.store(0, f"m{number}", [1], [1])
    assert index.counts["too_many_models"] == 3
    assert index.blocks == MOST_MODELS


class AnyHistory(RuleBasedStateMachine):
    """Slots hold what was stored and not removed since, whatever is still being swept."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HashIndex(most_blocks=6)
        self.model: dict[int, dict[tuple[str, int], int]] = {slot: {} for slot in range(3)}
        self.now = 0

    @rule(slot=st.integers(0, 2), model=st.sampled_from("ab"), hashes=st.lists(st.integers(0, 7), unique=True))
    def store(self, slot, model, hashes):
        self.now += 1
        self.index.store(slot, model, hashes, [self.now] * len(hashes))
        for block in hashes:
            self.model[slot].pop((model, block), None)
            self.model[slot][model, block] = self.now
        while len(self.model[slot]) > 6:
            del self.model[slot][next(iter(self.model[slot]))]

    @rule(slot=st.integers(0, 2), model=st.sampled_from("ab"), hashes=st.lists(st.integers(0, 7)))
    def remove(self, slot, model, hashes):
        self.index.remove(slot, model, hashes)
        for block in hashes:
            self.model[slot].pop((model, block), None)

    @rule(slot=st.integers(0, 2), model=st.sampled_from("ab"))
    def clear(self, slot, model):
        self.index.clear(slot, model)
        self.model[slot] = {key: time for key, time in self.model[slot].items() if key[0] != model}

    @rule(slot=st.integers(0, 2))
    def forget(self, slot):
        self.index.forget(slot)
        self.model[slot] = {}

    @rule(slot=st.integers(0, 2), age=st.integers(0, 5))
    def restart(self, slot, age):
        self.index.forget_older(slot, self.now - age)
        self.model[slot] = {key: time for key, time in self.model[slot].items() if time > self.now - age}

    @rule(age=st.integers(0, 5))
    def expire(self, age):
        while self.index.sweep(3):
            pass
        while self.index.expire(self.now - age, 2):
            pass
        for slot, held in self.model.items():
            self.model[slot] = {key: time for key, time in held.items() if time >= self.now - age}

    @rule(most=st.integers(1, 5))
    def sweep(self, most):
        self.index.sweep(most)

    @invariant()
    def slots_hold_what_they_should(self):
        for model in "ab":
            for block in range(8):
                holders = sum(mask for _, mask in self.index.match(model, [block], 7))
                for slot, held in self.model.items():
                    if self.index.is_hidden(slot):
                        assert not holders >> slot & 1
                    else:
                        assert holders >> slot & 1 == ((model, block) in held)


TestAnyHistory = AnyHistory.TestCase
