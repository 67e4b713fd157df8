"""Which slot holds how much of which chain: against a list of claims that is searched from end to end."""

from array import array
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from picker.core.sessions.chain import Chain
from picker.core.sessions.index import Evicted, SessionIndex

SLOTS = 3
ALL = (1 << SLOTS) - 1


class Content:
    """Chains of made-up contents: a position stands for all letters up to it, and weighs by what these are."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = count(1)

    def chain(self, letters: str) -> Chain:
        hashes = array("Q", [self._number(letters[:end]) for end in range(1, len(letters) + 1)])
        sizes = array("I", map(self.weight, letters))
        return Chain(hashes, sizes, sum(sizes))

    def _number(self, prefix: str) -> int:
        if prefix not in self._numbers:
            self._numbers[prefix] = next(self._next)
        return self._numbers[prefix]

    @staticmethod
    def weight(letter: str) -> int:
        return 1 + ord(letter) % 4


def size(letters: str) -> int:
    return sum(map(Content.weight, letters))


def lengths(index: SessionIndex, chain: Chain, candidates: int = ALL) -> list[int]:
    """Bytes by slot; checks that slots are named once and the longest come first."""
    by_slot = [0] * SLOTS
    groups = index.match(chain, candidates)
    assert [held for held, _ in groups] == sorted({held for held, _ in groups}, reverse=True)
    for held, mask in groups:
        assert held > 0
        for slot in range(SLOTS):
            if mask >> slot & 1:
                assert by_slot[slot] == 0
                by_slot[slot] = held
    return by_slot


letters = st.text("abc", min_size=1, max_size=9)
slots = st.integers(0, SLOTS - 1)


class Machine(RuleBasedStateMachine):
    """The index beside lists of `(slot, letters, used)` for what is kept, oldest first, and `(slot, letters)` held."""

    @initialize(capacity=st.integers(5, 60), most=st.integers(3, 60), seconds=st.integers(2, 30))
    def begin(self, capacity, most, seconds):
        self.content = Content()
        self.index = SessionIndex(capacity=capacity, max_positions=most, seconds=seconds)
        self.capacities = [capacity] * SLOTS
        self.capacity, self.most, self.seconds = capacity, most, seconds
        self.kept: list[tuple[int, str, int]] = []
        self.held: list[tuple[int, str, object]] = []
        self.now = 0

    @rule(slot=slots, letters=letters)
    def hold(self, slot, letters):
        self.held.append((slot, letters, self.index.hold(slot, self.content.chain(letters))))

    @rule(at=st.integers(0, 50))
    def release(self, at):
        if self.held:
            *_, claim = self.held.pop(at % len(self.held))
            assert self.index.holds(claim)
            self.index.release(claim)
            self.index.release(claim)

    @rule(at=st.integers(0, 50), later=st.integers(0, 3))
    def keep(self, at, later):
        if not self.held:
            return
        self.now += later
        slot, letters, claim = self.held.pop(at % len(self.held))
        self.index.keep(claim, self.now)
        self._keep(slot, letters)

    @rule(slot=slots, letters=letters, later=st.integers(0, 3))
    def serve(self, slot, letters, later):
        self.now += later
        self.index.keep(self.index.hold(slot, self.content.chain(letters)), self.now)
        self._keep(slot, letters)

    def _keep(self, slot, letters):
        self.kept = [one for one in self.kept if not (one[0] == slot and letters.startswith(one[1]))]
        self.kept.append((slot, letters, self.now))
        self._shrink(slot)

    def _shrink(self, slot):
        while (
            self._size(slot) > self.capacities[slot] and len(mine := [one for one in self.kept if one[0] == slot]) > 1
        ):
            self.kept.remove(mine[0])
        while self._positions() > self.most and len(self.kept) > 1:
            self.kept.pop(0)

    @rule(slot=slots)
    def forget(self, slot):
        claims = [claim for held_by, _, claim in self.held if held_by == slot]
        self.index.forget(slot)
        for claim in claims:
            assert not self.index.holds(claim)
            self.index.release(claim)
            self.index.keep(claim, self.now)
        self.kept = [one for one in self.kept if one[0] != slot]
        self.held = [one for one in self.held if one[0] != slot]
        self.capacities[slot] = self.capacity

    @rule(later=st.integers(0, 40))
    def expire(self, later):
        self.now += later
        self.index.expire(self.now)
        self.kept = [one for one in self.kept if self.now - one[2] <= self.seconds]

    @rule(slot=slots, before=st.integers(0, 20))
    def lost(self, slot, before):
        self.index.lost(slot, self.now - before)
        self.kept = [one for one in self.kept if one[0] != slot or one[2] > self.now - before]

    @rule(slot=slots, capacity=st.integers(1, 60))
    def limit(self, slot, capacity):
        self.index.limit(slot, capacity)
        if slot in self.index._slots:
            self.capacities[slot] = capacity

    def _claims(self, slot):
        return [one[1] for one in (*self.kept, *self.held) if one[0] == slot]

    def _size(self, slot):
        prefixes = {one[:end] for one in self._claims(slot) for end in range(1, len(one) + 1)}
        return sum(Content.weight(prefix[-1]) for prefix in prefixes)

    def _positions(self):
        everything = [one for slot in range(SLOTS) for one in self._claims(slot)]
        return len({one[:end] for one in everything for end in range(1, len(one) + 1)})

    @rule(letters=letters, candidates=st.integers(0, ALL))
    def match(self, letters, candidates):
        found = lengths(self.index, self.content.chain(letters), candidates)
        for slot in range(SLOTS):
            best = longest(letters, self._claims(slot)) if candidates >> slot & 1 else ""
            assert found[slot] == size(best)

    @rule(slot=slots, letters=letters)
    def known(self, slot, letters):
        mine = [(one, used) for held_by, one, used in self.kept if held_by == slot]
        best = longest(letters, [one for one, _ in mine])
        claim = self.index.hold(slot, self.content.chain(letters))
        assert claim.known == size(best)
        if best:
            assert claim.known_used >= max(when for one, when in mine if one.startswith(best))
        self.index.release(claim)

    @invariant()
    def counts_are_right(self):
        if not hasattr(self, "index"):
            return
        assert self.index.positions == self._positions()
        assert [self.index.size(slot) for slot in range(SLOTS)] == [self._size(slot) for slot in range(SLOTS)]
        assert (self.index.kept, self.index.held) == (len(self.kept), len(self.held))

    def teardown(self):
        if not hasattr(self, "index"):
            return
        for slot in range(SLOTS):
            self.index.forget(slot)
        assert (self.index.positions, self.index.kept, self.index.held) == (0, 0, 0)
        assert not self.index._root.children


def longest(letters: str, claims: list[str]) -> str:
    """The longest beginning of the letters that one of the claims has."""
    common = [letters[:end] for end in range(len(letters) + 1) if any(one.startswith(letters[:end]) for one in claims)]
    return common[-1] if common else ""


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def index() -> SessionIndex:
    return SessionIndex(capacity=10_000, max_positions=10_000, seconds=3600)


def nodes(index: SessionIndex) -> int:
    found, left = 0, [index._root]
    while left:
        children = list(left.pop().children.values())
        found += len(children)
        left += children
    return found


def test_a_conversation_that_grows_stays_one_node(index):
    content = Content()
    for turn in range(1, 50):
        index.keep(index.hold(0, content.chain("ab" * turn)), float(turn))
        assert (nodes(index), index.kept) == (1, 1)


def test_a_fan_out_shares_its_beginning(index):
    content = Content()
    claims = [index.hold(n % SLOTS, content.chain("aaaa" + one)) for n, one in enumerate("bcdefgh")]
    assert (nodes(index), index.positions) == (8, 11)
    for claim in claims:
        index.release(claim)
    assert nodes(index) == 0


def test_what_went_is_counted_by_reason():
    content, index = Content(), SessionIndex(capacity=size("aaab"), max_positions=6, seconds=10)
    for at, one in enumerate(("aaa", "bbb", "ccc")):
        index.keep(index.hold(0, content.chain(one)), float(at))
    assert index.evicted[Evicted.CAPACITY] == 2
    for slot, one in ((1, "aaa"), (2, "bbb")):
        index.keep(index.hold(slot, content.chain(one)), 3.0)
    assert index.evicted[Evicted.POSITIONS] == 1
    index.lost(1, 3.0)
    assert index.evicted[Evicted.USAGE] == 1
    index.expire(14.0)
    assert index.evicted[Evicted.TIME] == 1
    assert index.kept == 0


def test_claims_from_elsewhere_that_are_no_real_chains_do_no_harm(index):
    """Equal hashes after different ones do not come of hashing, but they may come over a network."""
    hostile = [[1, 2, 3, 4], [1, 9, 3, 4], [1, 9, 3, 5], [1, 1, 1, 1], [1, 1, 2, 1], [4, 3, 2, 1]]
    chains = [Chain(array("Q", one), array("I", [1] * 4), 4) for one in hostile]
    claims = [index.hold(0, chain) for chain in chains]
    for chain in chains:
        assert lengths(index, chain)[0] == 4
    for claim in claims:
        index.release(claim)
    assert (index.positions, nodes(index), index.size(0)) == (0, 0, 0)


def test_smaller_bounds_evict_at_once(index):
    content = Content()
    for at, one in enumerate(("aaa", "bbb", "ccc")):
        index.keep(index.hold(0, content.chain(one)), float(at))
    index.resize(capacity=size("ccc"), max_positions=10, seconds=10)
    assert lengths(index, content.chain("ccc"))[0] == size("ccc")
    assert index.kept == 1
