"""What the index does beyond plain stores and removals: windows, tiers, caps, lost and hostile events, life cycle."""

import random

import pytest

from picker.core.block_index.index import DAY, BlockIndex
from picker.core.block_index.limits import Limits
from picker.core.block_index.prediction import Prediction
from picker.core.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

PROMPT = list(range(100, 117))
"""17 tokens: 4 blocks of 4 can be hit."""


def store(first=0, last=4, *, size=4, base=1000, tokens=None, **more):
    """Blocks of PROMPT, named by their numbers."""
    ids = PROMPT[first * size : last * size] if tokens is None else tokens
    names = tuple(range(base + first, base + last))
    return BlockStored(names, base + first - 1 if first else None, tuple(ids), size, **more)


def removed(*numbers, base=1000, **more):
    return BlockRemoved(tuple(base + number for number in numbers), **more)


def apply(index, *events, slot=0, rank=None, now=0.0, model="m"):
    index.apply(slot, model, EventBatch(0.0, events, rank), now)


def cached(index, tokens=PROMPT, slot=0, rank=None, **more):
    return index.predict(index.prompt("m", tokens, **more), slot, rank).cached_tokens


def stats(index, slot=0, rank=0):
    return next(one for one in index.stats() if (one.slot, one.rank) == (slot, rank))


def test_the_last_token_is_always_computed():
    index = BlockIndex()
    apply(index, store())
    assert [cached(index, PROMPT[:length]) for length in (0, 1, 4, 5, 8, 9, 16, 17)] == [0, 0, 0, 4, 4, 8, 12, 16]
    assert cached(index, reads_cache=False) == 0


def test_a_middle_block_ends_the_hit_until_it_returns():
    index = BlockIndex()
    apply(index, store())
    apply(index, removed(1))
    assert cached(index) == 4
    apply(index, store(1, 2))
    assert cached(index) == 16


def test_every_copy_counts_and_none_below_zero():
    index = BlockIndex()
    apply(index, store(), store(3, 4))
    apply(index, removed(3))
    assert cached(index) == 16
    apply(index, removed(3), removed(3))
    assert cached(index) == 12
    assert stats(index).dropped == {"removed unknown block": 1}
    apply(index, store(3, 4))
    assert cached(index) == 16


def test_a_parent_may_be_gone_before_its_child_comes():
    index = BlockIndex()
    apply(index, store(0, 2), removed(0, 1), store(2, 4), store(0, 2))
    assert cached(index) == 16


def test_a_tombstone_that_was_dropped_orphans_the_child_until_the_parent_is_named_again():
    index = BlockIndex(limits=Limits(tombstones=1))
    apply(index, store(0, 2), removed(1, 0), store(2, 4))
    assert (stats(index).orphans, stats(index).tombstones) == (2, 1)
    assert cached(index) == 0
    apply(index, store(0, 2))
    assert (stats(index).orphans, cached(index)) == (0, 16)


def test_orphans_of_orphans_find_home_and_removed_ones_do_not_return():
    index = BlockIndex()
    apply(index, store(3, 4), store(1, 2), store(2, 3), removed(3))
    assert (cached(index), stats(index).orphans) == (0, 3)
    apply(index, store(0, 1))
    assert (cached(index), stats(index).orphans) == (12, 0)


def test_too_many_orphans_lose_the_oldest():
    index = BlockIndex(limits=Limits(orphans=3))
    apply(index, store(2, 4), store(1, 3, base=5000))
    assert (stats(index).orphans, stats(index).dropped) == (2, {"orphan": 2})
    apply(index, store(0, 2))
    assert cached(index) == 8
    apply(index, store(2, 4))
    assert cached(index) == 16


def test_engines_agree_whatever_their_hashes_and_block_sizes_are():
    index = BlockIndex()
    apply(index, store(base=1000), slot=0)
    apply(index, store(base=-(10**9) % 2**64), slot=1)
    apply(index, store(0, 2, size=8, base=7), slot=2)
    apply(index, *(store(number, number + 1, size=1, base=900) for number in range(17)), slot=3)
    assert index.match(index.prompt("m", PROMPT), 0b1111) == [(16, 0b1111)]
    assert index.match(index.prompt("m", PROMPT[:12]), 0b1111) == [(11, 0b1000), (8, 0b0111)]
    assert stats(index, 3).block_sizes == (1,)


def test_parts_of_blocks_never_match():
    index = BlockIndex()
    apply(index, store(0, 3), BlockStored((77,), 1002, tuple(PROMPT[12:14]), 2))
    assert (cached(index), stats(index).dropped) == (12, {"partial block": 1})
    index = BlockIndex()
    apply(index, BlockStored((77,), None, tuple(PROMPT[:2]), 2), store())
    assert (cached(index), cached(index, PROMPT[:3]), stats(index).block_sizes) == (16, 0, (4,))


def window(first, last, span, **more):
    """A sliding window of 8 tokens: the event covers `span` blocks of tokens, and names only some."""
    return BlockStored(
        tuple(range(1000 + first, 1000 + last)),
        None,
        tuple(PROMPT[: span * 4]),
        4,
        group_idx=0,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=8,
        **more,
    )


def full(first=0, last=4):
    return store(first, last, group_idx=1, kv_cache_spec_kind="full_attention")


def test_windows_are_understood_by_the_names_of_another_group_before_or_after():
    for events in ((window(2, 4, 4), full()), (full(), window(2, 4, 4))):
        index = BlockIndex()
        apply(index, *events)
        assert cached(index) == 16
        assert cached(index, PROMPT[:13]) == 0, "the window group lacks block 1"
        assert index.match(index.prompt("m", PROMPT), 1) == [(16, 1)]
        apply(index, removed(1, group_idx=1))
        assert cached(index) == 0


def test_groups_lose_their_blocks_separately():
    index = BlockIndex()
    apply(index, window(0, 4, 4), full())
    apply(index, removed(3, group_idx=0))
    assert cached(index) == 12
    apply(index, removed(1, group_idx=0))
    assert cached(index) == 4
    apply(index, removed(0, group_idx=1))
    assert cached(index) == 0


def test_mamba_needs_its_state_at_the_end():
    index = BlockIndex()
    state = BlockStored((1001,), None, tuple(PROMPT[:16]), 4, group_idx=2, kv_cache_spec_kind="mamba")
    apply(index, state, full())
    assert cached(index) == 8


def test_lower_tiers_continue_a_hit():
    index = BlockIndex()
    apply(index, store(), store(medium="CPU"), removed(2, medium="GPU"))
    assert cached(index) == 16
    assert index.match(index.prompt("m", PROMPT), 1) == [(8 + 0.8 * 8, 1)]
    apply(index, removed(3, medium="CPU"))
    assert cached(index) == 12
    apply(index, removed(0), removed(0, medium="CPU"))
    assert cached(index) == 0


def test_tiers_may_have_larger_blocks_and_placeholders():
    index = BlockIndex()
    apply(index, store(0, 1), store(0, 2, size=8, base=50, medium="CPU"))
    assert cached(index) == 16
    apply(index, removed(1, base=50, medium="CPU"))
    assert cached(index) == 8
    index = BlockIndex()
    placeholder = BlockStored((1002, 1003), 1001, (), 0, medium="CPU")
    apply(index, store(), placeholder, removed(2))
    assert cached(index) == 16
    apply(BlockIndex(), placeholder)


def test_an_unknown_medium_does_not_count():
    index = BlockIndex()
    apply(index, store(medium="tape"))
    assert cached(index) == 0
    assert BlockIndex(tier_weights={"TAPE": 0.1}).match(index.prompt("m", PROMPT), 1) == []


def test_a_cap_drops_what_was_stored_first():
    index = BlockIndex(max_blocks=5)
    apply(index, store(), BlockStored((1, 2), None, tuple(range(8)), 4))
    assert (stats(index).blocks, stats(index).evicted) == (5, 1)
    assert cached(index) == 0
    assert cached(index, list(range(9))) == 8
    apply(index, store(0, 1))
    assert cached(index) == 4
    apply(index, removed(1))
    assert stats(index).dropped == {"removed unknown block": 1}


def test_the_cap_is_for_an_endpoint_and_takes_from_the_fuller_rank():
    index = BlockIndex(max_blocks=5)
    apply(index, store(), rank=0)
    apply(index, store(0, 2), rank=1)
    assert (stats(index, 0, 0).blocks, stats(index, 0, 1).blocks) == (3, 2)
    apply(index, store(), slot=1)
    assert stats(index, 1).evicted == 0


def test_ranks_are_separate_caches():
    index = BlockIndex()
    apply(index, store(), rank=0)
    apply(index, store(0, 2), rank=1)
    assert [cached(index, rank=rank) for rank in (0, 1, None)] == [16, 8, 8]
    assert index.match(index.prompt("m", PROMPT), 1) == [(12, 1)]
    apply(index, store(), rank=5000)
    assert index.unknown_ranks == 1


def test_reports_of_reuse_are_not_copies_where_they_are_expected():
    for reports_reuse, left in ((True, 12), (False, 16)):
        index = BlockIndex(reports_reuse=reports_reuse)
        apply(index, store())
        apply(index, store())
        apply(index, removed(3))
        assert cached(index) == left


def test_a_hold_is_visible_for_scheduling_only():
    index = BlockIndex()
    index.open(0, "m", 0.0, block_size=4)
    prompt = index.prompt("m", PROMPT)
    holds = [index.hold(0, prompt), index.hold(0, prompt)]
    assert index.match(prompt, 0b11) == [(16, 1)]
    assert index.predict(prompt, 0).cached_tokens == 0
    index.release(holds[0])
    assert index.match(prompt, 1) == [(16, 1)]
    index.restart(0, 0)
    assert index.match(prompt, 1) == []
    index.release(holds[1])
    assert index.hold(7, prompt).parts == []


def test_another_model_name_starts_anew():
    index = BlockIndex()
    apply(index, store())
    apply(index, store(0, 2), model="n")
    assert cached(index) == 0
    assert index.predict(index.prompt("n", PROMPT), 0).cached_tokens == 8


def test_silent_engines_are_forgotten_after_a_day_and_old_blocks_are_not():
    index = BlockIndex()
    apply(index, store(), slot=0, now=0.0)
    apply(index, store(), slot=1, now=0.0)
    apply(index, store(), slot=2, now=0.0)
    index.heard(1, 0, DAY)
    apply(index, slot=2, now=DAY)
    assert index.expire(DAY) == 0
    assert index.expire(DAY + 1) == 1
    assert index.match(index.prompt("m", PROMPT), 0b111) == [(16, 0b110)]
    assert (index.expired, index.expire(DAY + 1)) == (1, 0)


def test_what_is_incomplete_says_so():
    index = BlockIndex()
    apply(index, store())
    prompt = index.prompt("m", PROMPT)
    assert index.predict(prompt, 0) == Prediction(16, complete=True)
    index.mark_incomplete(0, 0, 12.0)
    index.mark_incomplete(0, 0, 15.0)
    assert (index.predict(prompt, 0).complete, stats(index).incomplete_since) == (False, 12.0)
    index.mark_complete(0, 0)
    assert index.predict(prompt, 0).complete
    for method in (index.mark_complete, index.restart):
        method(9, 9)
    index.mark_incomplete(9, 9, 0.0)
    index.heard(9, 9, 0.0)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (BlockStored((1,), None, ([1, 2], [2, 3], [3, 4], [4, 5]), 4), "token ids"),
        (BlockStored((1,), None, (1, 2, 3, 2**32), 4), "token ids"),
        (BlockStored((1,), None, (1, 2, 3, 4), 0), "block size"),
        (BlockStored((1,), None, (1,), 2**40), "block size"),
    ],
)
def test_unusable_events_are_counted_and_the_rest_of_the_batch_is_used(event, reason):
    index = BlockIndex()
    apply(index, event, store())
    assert (cached(index), stats(index).dropped) == (16, {reason: 1})


def test_pools_are_bounded():
    index = BlockIndex(limits=Limits(pools=3))
    apply(index, *(store(group_idx=number) for number in range(9)))
    assert stats(index).dropped == {"too many pools": 6}


def test_one_hash_for_two_blocks_stands_for_the_later():
    """SGLang up to 0.5.2 hashes a page by its own tokens only."""
    index = BlockIndex()
    apply(index, BlockStored((5, 6), None, (1, 1, 2, 2), 2), BlockStored((6, 5), None, (2, 2, 1, 1), 2))
    assert cached(index, [2, 2, 1, 1, 0]) == 4
    assert cached(index, [1, 1, 2, 2, 0]) == 0


def test_a_forgotten_endpoint_never_shows_while_it_is_swept_and_refilled():
    rng = random.Random(3)
    index = BlockIndex()
    prompt = index.prompt("m", PROMPT)
    for _ in range(30):
        apply(index, store())
        for number in range(rng.randrange(40)):
            apply(index, BlockStored((number,), None, (number, 1, 2, 3), 4))
        assert index.match(prompt, 0b11) == [(16, 1)]
        if rng.random() < 0.3:
            apply(index, AllBlocksCleared())
        elif rng.random() < 0.5:
            index.forget(0)
        else:
            index.restart(0, 0)
        for _ in range(rng.randrange(5)):
            assert index.match(prompt, 0b11) == []
            assert cached(index) == 0
            index.sweep(rng.randrange(8))
        apply(index, store(0, 2), slot=1)
        assert index.match(prompt, 0b11) == [(8, 2)]
        index.forget(1)
    while index.sweep(7):
        pass
    assert index.match(prompt, 0b11) == []
    index.forget(0)
    while index.sweep(7):
        pass
    assert not any(index._planes.values())


def test_clears_without_end_do_not_pile_up():
    index = BlockIndex()
    for number in range(300):
        apply(index, BlockStored((number,), None, (number, 1, 2, 3), 4), AllBlocksCleared())
    assert index._lanes._taken.bit_length() <= 4


def test_a_prompt_asked_again_sees_every_change():
    """Results are remembered for long prompts: nothing that happens in between may be missed."""
    index = BlockIndex()
    ids = list(range(5000))
    names = tuple(range(1, 313))
    everything = BlockStored(names, None, tuple(ids[:4992]), 16)
    rng = random.Random(5)
    have = {0: set(), 1: set()}
    for _ in range(60):
        slot = rng.randrange(2)
        if rng.random() < 0.5:
            apply(index, everything, slot=slot)
            have[slot] = set(names)
            index.restart(slot, 0)
            apply(index, everything, slot=slot)
        gone = [name for name in rng.sample(names, 2) if name in have[slot]]
        if rng.random() < 0.7 and gone:
            apply(index, BlockRemoved(tuple(gone)), slot=slot)
            have[slot] -= set(gone)
        length = rng.randrange(4200, 5000)
        for one in (0, 1):
            usable = (length - 1) // 16
            prefix = next((name - 1 for name in names[:usable] if name not in have[one]), usable)
            assert cached(index, ids[:length], slot=one) == prefix * 16
