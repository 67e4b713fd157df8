"""The `prefix-cache` plugin: the scoring of its specification, provisional recording, and new arguments."""

import random
from collections import Counter

import pytest

from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.plugins.prefix_cache import PrefixCacheProducer, PrefixMatch, PrefixScorer
from picker.core.plugins.prefix_cache_args import PrefixCacheArgs
from picker.core.prompts import Prompt, Unused
from picker.core.scheduling.api import Candidates, Request


class Fleet:
    """A producer over some endpoints, asked with whole prompts."""

    def __init__(self, endpoints: int = 3, **args: int) -> None:
        self.evicted: Counter[str] = Counter()
        self.producer = PrefixCacheProducer(PrefixCacheArgs(**args), self._count)
        self.scorer = PrefixScorer("prefix-cache", "prefix-cache")
        self.table = EndpointTable()
        self.table.replace(Endpoint(f"p{i}", f"10.0.0.{i + 1}:8000") for i in range(endpoints))
        self.rng = random.Random(3)

    def _count(self, model: str, blocks: int) -> None:
        self.evicted[model] += blocks

    def candidates(self, slots: list[int] | None = None) -> Candidates:
        chosen = self.table.slots if slots is None else self.table.slots[slots]
        return Candidates(self.table, chosen, sum(1 << int(slot) for slot in chosen))

    def match(self, *texts: bytes, model: str = "m", slots: list[int] | None = None) -> PrefixMatch:
        request = Request("id", "/v1/completions", Prompt(model, texts, None if texts else Unused.EMPTY))
        match = self.producer.match(request, self.candidates(slots), self.rng)
        assert match is not None
        return match

    def scores(self, *texts: bytes, model: str = "m", slots: list[int] | None = None) -> list[float]:
        match = self.match(*texts, model=model, slots=slots)
        request = Request("id", "/v1/completions", Prompt(model, texts))
        scores = self.scorer.score(request, self.candidates(slots), match.info, self.rng)
        assert scores is not None
        return scores.tolist()

    def served(self, slot: int, *texts: bytes, model: str = "m") -> None:
        self.match(*texts, model=model).picked(slot).confirm(slot)


def numbered(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


# --- Scoring -----------------------------------------------------------------------------------------------------


def test_the_first_24_of_32_blocks_score_75():
    fleet, prompt = Fleet(), numbered(2000)
    fleet.served(1, prompt[: 24 * 64])
    assert fleet.match(prompt).info.total == 32
    assert fleet.match(prompt).info.matched.tolist() == [0, 24, 0]
    assert fleet.scores(prompt) == [0, 75, 0]


def test_the_same_request_again_scores_100_where_it_was_served():
    fleet, prompt = Fleet(), numbered(300)
    assert fleet.scores(prompt) == [0, 0, 0]
    fleet.served(2, prompt)
    assert fleet.scores(prompt) == [0, 0, 100]


def test_each_endpoint_scores_its_own_longest_match():
    fleet, prompt = Fleet(4), numbered(640)
    fleet.served(0, prompt[:320] + b"x" * 64)
    fleet.served(1, prompt)
    fleet.served(2, prompt[:64])
    assert fleet.scores(prompt) == [50, 100, 10, 0]
    assert fleet.scores(prompt, slots=[0, 2, 3]) == [50, 10, 0]


def test_models_do_not_share():
    fleet, prompt = Fleet(), numbered(640)
    fleet.served(0, prompt, model="a")
    assert fleet.scores(prompt, model="b") == [0, 0, 0]
    assert fleet.scores(prompt, model="a") == [100, 0, 0]


def test_only_the_covered_text_counts():
    fleet = Fleet(blockSizeToHash=4, maxBlocksToMatch=3)
    fleet.served(0, b"aaaabbbbcccc" + b"one tail")
    assert fleet.scores(b"aaaabbbbcccc" + b"another tail") == [100, 0, 0]
    assert fleet.match(b"x" * 100).info.total == 3


def test_exactly_top_k_endpoints_score_when_more_are_equal():
    chosen: Counter[int] = Counter()
    for most in (1, 2, 5):
        fleet, prompt = Fleet(8, topKMatches=most), numbered(128)
        for slot in range(8):
            fleet.served(slot, prompt)
        for _ in range(50):
            scores = fleet.scores(prompt)
            assert sorted(scores) == [0] * (8 - most) + [100] * most
            chosen.update(slot for slot, score in enumerate(scores) if score)
    assert set(chosen) == set(range(8))


def test_longer_matches_are_among_the_top_k_before_shorter_ones():
    fleet, prompt = Fleet(6, topKMatches=3), numbered(640)
    fleet.served(5, prompt)
    fleet.served(2, prompt[:320])
    for slot in (0, 1, 3, 4):
        fleet.served(slot, prompt[:64])
    for _ in range(20):
        scores = fleet.scores(prompt)
        assert (scores[5], scores[2]) == (100, 50)
        assert sorted(scores[slot] for slot in (0, 1, 3, 4)) == [0, 0, 0, 10]


def test_top_k_is_among_the_candidates():
    fleet, prompt = Fleet(6, topKMatches=2), numbered(640)
    for slot in range(6):
        fleet.served(slot, prompt if slot < 3 else prompt[:64])
    assert fleet.scores(prompt, slots=[3, 4]) == [10, 10]


@pytest.mark.parametrize("endpoints", [9, 20, 70, 130])
def test_many_endpoints_at_once(endpoints):
    fleet, prompt = Fleet(endpoints, topKMatches=endpoints), numbered(128)
    for slot in range(endpoints):
        fleet.served(slot, prompt[: 64 * (1 + slot % 2)])
    assert fleet.scores(prompt) == [50 * (1 + slot % 2) for slot in range(endpoints)]
    odd = list(range(1, endpoints, 2))
    assert fleet.scores(prompt, slots=odd) == [100] * len(odd)


@pytest.mark.parametrize("reason", list(Unused))
def test_a_request_without_a_prompt_is_not_scored(reason):
    fleet = Fleet()
    request = Request("id", "/v1/completions", Prompt("m", (), reason))
    assert fleet.producer.match(request, fleet.candidates(), fleet.rng) is None
    assert fleet.scorer.score(request, fleet.candidates(), None, fleet.rng) is None


def test_the_prompts_of_a_batch_add_up():
    fleet = Fleet(blockSizeToHash=1)
    fleet.served(0, b"abcd")
    fleet.served(1, b"xy")
    assert fleet.match(b"abcd", b"xyzw").info.matched.tolist() == [4, 2, 0]
    assert fleet.scores(b"abcd", b"xyzw") == [50, 25, 0]
    fleet.served(2, b"abcd", b"xyzw")
    assert fleet.scores(b"xyzw") == [0, 50, 100]


def test_at_most_top_k_endpoints_score_for_a_batch_too():
    fleet = Fleet(4, blockSizeToHash=1, topKMatches=1)
    fleet.served(0, b"abcd")
    fleet.served(1, b"xyz")
    assert fleet.scores(b"abcd", b"xyzw") == [50, 0, 0, 0]


# --- Learning ----------------------------------------------------------------------------------------------------


def test_a_pick_is_visible_at_once_and_stays_when_it_is_confirmed():
    fleet, prompt = Fleet(), numbered(300)
    learning = fleet.match(prompt).picked(1)
    assert fleet.scores(prompt) == [0, 100, 0]
    assert fleet.producer.index.entries == 0
    learning.confirm(1)
    assert fleet.scores(prompt) == [0, 100, 0]
    assert (fleet.producer.index.entries, fleet.producer.index.held) == (5, 0)


def test_blocks_may_be_recorded_only_when_a_request_has_succeeded():
    fleet, prompt = Fleet(recordAtPick=False), numbered(640)
    learning = fleet.match(prompt).picked(1)
    told = fleet.producer.adopt(2, fleet.match(prompt).shared(2), 0.0)
    assert fleet.match(prompt).info.matched.tolist() == [0, 0, 0]
    learning.confirm(1)
    assert fleet.match(prompt).info.matched.tolist() == [0, 10, 0]
    told.undo()
    fleet.match(prompt).picked(0).undo()
    assert fleet.match(prompt).info.matched.tolist() == [0, 10, 0]


def test_a_failed_pick_leaves_nothing():
    fleet, prompt = Fleet(), numbered(300)
    fleet.served(1, prompt[:64])
    learning = fleet.match(prompt).picked(1)
    other = fleet.match(prompt).picked(0)
    learning.undo()
    assert fleet.scores(prompt) == [100, 20, 0]
    other.undo()
    assert fleet.scores(prompt) == [0, 20, 0]
    assert (fleet.producer.index.entries, fleet.producer.index.held) == (1, 0)


def test_a_pick_served_elsewhere_is_recorded_there():
    fleet, prompt = Fleet(), numbered(300)
    fleet.match(prompt).picked(1).confirm(2)
    assert fleet.scores(prompt) == [0, 0, 100]


def test_a_pick_served_by_nobody_we_know_leaves_nothing():
    fleet, prompt = Fleet(), numbered(300)
    fleet.match(prompt).picked(1).confirm(None)
    assert fleet.scores(prompt) == [0, 0, 0]
    assert not fleet.producer.index.held


def test_a_failure_does_not_hide_what_a_twin_on_its_way_shows():
    fleet, prompt = Fleet(), numbered(300)
    first, twin = fleet.match(prompt).picked(1), fleet.match(prompt).picked(1)
    first.undo()
    assert fleet.scores(prompt) == [0, 100, 0]
    twin.undo()
    assert fleet.scores(prompt) == [0, 0, 0]


def test_a_batch_with_the_same_prompt_twice_comes_and_goes_whole():
    fleet, prompt = Fleet(), numbered(300)
    fleet.match(prompt, prompt).picked(1).undo()
    assert (fleet.scores(prompt), fleet.producer.index.held) == ([0, 0, 0], 0)
    fleet.served(1, prompt, prompt)
    assert (fleet.scores(prompt), fleet.producer.index.held) == ([0, 100, 0], 0)


def test_an_engine_restart_forgets_recorded_and_provisional_blocks():
    fleet, one, two = Fleet(), numbered(300, 1), numbered(300, 2)
    fleet.served(1, one)
    learning = fleet.match(two).picked(1)
    fleet.producer.forget(1)
    assert fleet.scores(one) == fleet.scores(two) == [0, 0, 0]
    later = fleet.match(two).picked(1)
    learning.undo()
    assert fleet.scores(two) == [0, 100, 0]
    later.undo()
    assert fleet.scores(two) == [0, 0, 0]
    assert not fleet.evicted


def test_evictions_are_told_with_their_model():
    fleet = Fleet(1, blockSizeToHash=1, maxHashCacheSize=4)
    fleet.served(0, b"abc", model="a")
    fleet.served(0, b"xyz", model="b")
    assert fleet.evicted == {"a": 2}
    assert fleet.scores(b"abc", model="a") == [33]
    fleet.served(0, b"123456", model="c")
    assert fleet.evicted == {"a": 3, "b": 3, "c": 2}
    assert fleet.scores(b"123456", model="c") == [66]


# --- Arguments ---------------------------------------------------------------------------------------------------


def test_defaults_stand_in_for_zero_and_negative_values():
    assert PrefixCacheArgs() == PrefixCacheArgs(
        blockSizeToHash=64, maxBlocksToMatch=128, maxHashCacheSize=50000, topKMatches=5
    )
    assert PrefixCacheArgs(0, -1, 0, -5).effective() == PrefixCacheArgs()
    assert PrefixCacheArgs(1, 2, 3, 4).effective() == PrefixCacheArgs(1, 2, 3, 4)
    assert Fleet(blockSizeToHash=0, maxBlocksToMatch=-1).match(b"x" * 9000).info.total == 128


def test_new_arguments_keep_the_index_unless_blocks_have_another_size():
    fleet, prompt = Fleet(), numbered(640)
    fleet.served(1, prompt)
    assert fleet.producer.reconfigure(PrefixCacheArgs(topKMatches=1, maxBlocksToMatch=5))
    assert fleet.match(prompt).info.total == 5
    assert fleet.scores(prompt) == [0, 100, 0]
    assert fleet.producer.reconfigure(PrefixCacheArgs(blockSizeToHash=-1))
    assert fleet.scores(prompt) == [0, 100, 0]
    assert not fleet.producer.reconfigure(PrefixCacheArgs(blockSizeToHash=32))
    assert fleet.scores(prompt) == [0, 0, 0]
    assert fleet.producer.index.entries == 0
    assert not fleet.evicted


def test_a_smaller_cache_evicts_at_once():
    fleet, prompt = Fleet(), numbered(640)
    fleet.served(1, prompt)
    assert fleet.producer.reconfigure(PrefixCacheArgs(maxHashCacheSize=4))
    assert fleet.evicted == {"m": 6}
    assert fleet.scores(prompt) == [0, 40, 0]


@pytest.mark.parametrize("succeeds", [True, False])
def test_what_was_on_its_way_when_blocks_changed_size_leaves_nothing(succeeds):
    fleet, prompt = Fleet(), numbered(640)
    learning = fleet.match(prompt).picked(1)
    fleet.producer.reconfigure(PrefixCacheArgs(blockSizeToHash=32))
    fresh = fleet.match(prompt).picked(2)
    if succeeds:
        learning.confirm(1)
    else:
        learning.undo()
    assert fleet.scores(prompt) == [0, 0, 100]
    assert fleet.producer.index.entries == 0
    fresh.undo()
    assert (fleet.scores(prompt), fleet.producer.index.held) == ([0, 0, 0], 0)
