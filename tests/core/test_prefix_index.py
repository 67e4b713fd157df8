"""The prefix index against a model so plain that it can be read: lists in order of recency, searched backwards."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from picker.core.prefix_cache.hashing import block_hashes
from picker.core.prefix_cache.index import PrefixIndex

SLOTS = range(3)
EVERYONE = 0b111


def lengths(index: PrefixIndex, hashes: list[int], candidates: int = EVERYONE) -> dict[int, int]:
    """Matched blocks by slot, from the groups that `match` gives."""
    groups = index.match(hashes, candidates)
    assert [blocks for blocks, _ in groups] == sorted({blocks for blocks, _ in groups}, reverse=True)
    found: dict[int, int] = {}
    for blocks, mask in groups:
        assert blocks > 0
        assert mask > 0
        assert not mask & ~candidates
        for slot in range(mask.bit_length()):
            if mask >> slot & 1:
                assert slot not in found
                found[slot] = blocks
    return found


def make(capacity: int = 100) -> tuple[PrefixIndex, Counter[str]]:
    evicted: Counter[str] = Counter()

    def count(model: str, blocks: int) -> None:
        evicted[model] += blocks

    return PrefixIndex(capacity, count), evicted


def empty(index: PrefixIndex) -> bool:
    return not index.entries and not index.held and not index._runs


def test_longest_matches_come_first():
    index, _ = make()
    index.record(0, "m", [1, 2, 3])
    index.record(1, "m", [1, 2])
    index.record(2, "m", [1, 4, 5])
    assert index.match([1, 2, 3], EVERYONE) == [(3, 0b001), (2, 0b010), (1, 0b100)]


def test_only_candidates_match():
    index, _ = make()
    index.record(0, "m", [1, 2, 3])
    index.record(1, "m", [1])
    assert index.match([1, 2, 3], 0b10) == [(1, 0b10)]
    assert index.match([1, 2, 3], 0b100) == []
    assert index.match([1, 2, 3], 0) == []
    assert index.match([], EVERYONE) == []
    assert index.match([9], EVERYONE) == []


def test_a_full_list_loses_the_end_of_a_chain_first():
    index, evicted = make(2)
    index.record(0, "m", [1, 2, 3])
    assert lengths(index, [1, 2, 3]) == {0: 2}
    assert evicted == {"m": 1}
    index, evicted = make(3)
    index.record(0, "m", [1, 2, 3, 4, 5])
    assert lengths(index, [1, 2, 3, 4, 5]) == {0: 3}
    assert evicted == {"m": 2}


def test_evictions_are_counted_for_the_model_that_lost_and_removals_are_not():
    index, evicted = make(2)
    index.record(0, "a", [1, 2])
    index.record(0, "b", [3, 4, 5])
    assert evicted == {"a": 2, "b": 1}
    index.forget(0)
    assert evicted == {"a": 2, "b": 1}
    assert empty(index)


def test_capacity_is_for_each_slot_over_all_models():
    index, evicted = make(3)
    index.record(0, "a", [1, 2])
    index.record(1, "a", [1, 2])
    index.record(0, "b", [8, 9])
    assert index.entries == 5
    assert evicted == {"a": 1}
    assert lengths(index, [1, 2]) == {0: 1, 1: 2}
    assert lengths(index, [8, 9]) == {0: 2}


def test_recording_again_refreshes_and_looking_up_does_not():
    index, _ = make(4)
    index.record(0, "m", [1, 2])
    index.record(0, "m", [5, 6])
    index.match([1, 2], EVERYONE)
    index.record(0, "m", [7])
    assert lengths(index, [1, 2]) == {0: 1}
    index.record(0, "m", [1])
    index.record(0, "m", [8, 9])
    assert lengths(index, [1, 2]) == {0: 1}
    assert lengths(index, [5, 6]) == {}


def test_a_forgotten_slot_keeps_nothing_of_any_model():
    index, _ = make()
    index.record(0, "a", [1, 2])
    index.record(0, "b", [3])
    index.record(1, "a", [1])
    index.forget(0)
    assert lengths(index, [1, 2]) == {1: 1}
    assert lengths(index, [3]) == {}
    assert index.entries == 1
    index.forget(3)


def test_a_hold_is_visible_until_it_is_released():
    index, _ = make()
    first = index.hold(0, [1, 2, 3])
    second = index.hold(0, [1, 2])
    assert lengths(index, [1, 2, 3]) == {0: 3}
    assert (index.entries, index.held) == (0, 3)
    index.release(first)
    assert lengths(index, [1, 2, 3]) == {0: 2}
    index.release(second)
    assert empty(index)


def test_releasing_leaves_what_was_recorded():
    index, _ = make()
    hold = index.hold(0, [1, 2, 3])
    index.record(0, "m", [1, 2])
    index.release(hold)
    assert lengths(index, [1, 2, 3]) == {0: 2}


def test_what_is_held_stays_visible_when_its_record_is_evicted():
    index, evicted = make(2)
    index.record(0, "m", [1, 2])
    hold = index.hold(0, [1, 2])
    index.record(0, "m", [8, 9])
    assert evicted == {"m": 2}
    assert lengths(index, [1, 2]) == {0: 2}
    index.release(hold)
    assert lengths(index, [1, 2]) == {}


def test_a_stale_release_does_not_touch_the_next_owner_of_a_slot():
    index, _ = make()
    stale = index.hold(0, [1, 2])
    index.forget(0)
    assert empty(index)
    fresh = index.hold(0, [1, 2])
    index.release(stale)
    assert lengths(index, [1, 2]) == {0: 2}
    index.release(fresh)
    assert empty(index)


def test_shrinking_evicts_the_least_recently_recorded_at_once():
    index, evicted = make(4)
    index.record(0, "a", [1, 2])
    index.record(0, "b", [3, 4])
    index.resize(3)
    assert evicted == {"a": 1}
    assert lengths(index, [1, 2]) == {0: 1}
    index.resize(10)
    index.record(0, "a", [1, 2, 5, 6, 7])
    assert evicted == {"a": 1}
    assert index.entries == 7


class Against(RuleBasedStateMachine):
    """Random use, against lists. Chains are real ones, so every prefix of a chain is a chain."""

    holds = Bundle("holds")
    slots = st.sampled_from(SLOTS)
    models = st.sampled_from(["m", "n"])
    texts = st.text("ab", min_size=2, max_size=9).map(str.encode)

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 4
        self.evicted: Counter[str] = Counter()
        self.expected_evicted: Counter[str] = Counter()
        self.index = PrefixIndex(self.capacity, lambda model, blocks: self.evicted.update({model: blocks}))
        self.recorded: dict[int, list[tuple[int, str]]] = {slot: [] for slot in SLOTS}
        """By slot, least recently recorded first."""
        self.flying: list[tuple[object, int, list[int]]] = []

    def drop_oldest(self, slot: int) -> None:
        _, model = self.recorded[slot].pop(0)
        self.expected_evicted[model] += 1

    def visible(self, slot: int) -> set[int]:
        flying = [digest for _, owner, hashes in self.flying if owner == slot for digest in hashes]
        return {digest for digest, _ in self.recorded[slot]} | set(flying)

    @rule(slot=slots, model=models, text=texts)
    def record(self, slot, model, text):
        hashes = block_hashes(model, text, 2, 4)
        self.index.record(slot, model, hashes)
        entries = self.recorded[slot]
        for digest in hashes[::-1]:
            if (digest, model) in entries:
                entries.remove((digest, model))
            entries.append((digest, model))
        while len(entries) > self.capacity:
            self.drop_oldest(slot)

    @rule(target=holds, slot=slots, model=models, text=texts)
    def hold(self, slot, model, text):
        hashes = block_hashes(model, text, 2, 4)
        hold = self.index.hold(slot, hashes)
        token = object()
        self.flying.append((token, slot, hashes))
        return token, hold

    @rule(pair=consumes(holds))
    def release(self, pair):
        token, hold = pair
        self.index.release(hold)
        self.flying = [one for one in self.flying if one[0] is not token]

    @rule(slot=slots)
    def forget(self, slot):
        self.index.forget(slot)
        self.recorded[slot] = []
        self.flying = [one for one in self.flying if one[1] != slot]

    @rule(capacity=st.integers(1, 9))
    def resize(self, capacity):
        self.index.resize(capacity)
        self.capacity = capacity
        for slot in SLOTS:
            while len(self.recorded[slot]) > capacity:
                self.drop_oldest(slot)

    @rule(model=models, text=texts, candidates=st.integers(0, EVERYONE))
    def match(self, model, text, candidates):
        hashes = block_hashes(model, text, 2, 4)
        expected: dict[int, int] = {}
        for slot in SLOTS:
            if candidates >> slot & 1:
                seen = self.visible(slot)
                for number in range(len(hashes), 0, -1):
                    if hashes[number - 1] in seen:
                        expected[slot] = number
                        break
        assert lengths(self.index, hashes, candidates) == expected

    @invariant()
    def counts_agree(self):
        assert self.evicted == self.expected_evicted
        assert self.index.entries == sum(map(len, self.recorded.values()))
        assert self.index.held == len({(slot, digest) for _, slot, hashes in self.flying for digest in hashes})
        masks: dict[int, int] = {}
        for slot in SLOTS:
            for digest in self.visible(slot):
                masks[digest] = masks.get(digest, 0) | 1 << slot
        runs = self.index._runs.values()
        assert {digest: run.mask for run in runs for digest in run.hashes} == masks
        assert sum(len(run.hashes) for run in runs) == len(masks)

    def teardown(self):
        for slot in SLOTS:
            self.index.forget(slot)
        assert empty(self.index)


chains = st.lists(st.integers(0, 5), max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["record", "hold", "release", "match"]), st.sampled_from(SLOTS), chains)))
def test_hashes_that_collide_break_nothing(steps):
    """Whoever crafts collisions gets wrong matches; nothing raises, and nothing stays behind."""
    index, _ = make(4)
    holds = []
    for step, slot, hashes in steps:
        if step == "record":
            index.record(slot, "m", hashes)
        elif step == "hold":
            holds.append(index.hold(slot, hashes))
        elif step == "match":
            lengths(index, hashes)
        elif holds:
            index.release(holds.pop())
    for hold in holds:
        index.release(hold)
    assert not index.held
    for slot in SLOTS:
        index.forget(slot)
    assert not index.entries


TestAgainstLists = Against.TestCase
TestAgainstLists.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
