"""Ownership against a naive engine: lists of physical blocks, hashed and counted the long way."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picker.core.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored
from picker.core.kv_index.ownership import Cleared, Limits, Ownership, Removed, Stored


def standard(tokens: list[int]) -> int:
    digest = hashlib.sha256(b"".join(token.to_bytes(4, "big") for token in tokens)).digest()
    return int.from_bytes(digest[:8], "big") & 0x7FFFFFFFFFFFFFFF


def stored(names, tokens, parent=None, size=2, **fields) -> BlockStored:
    return BlockStored(tuple(names), parent, tuple(tokens), size, **fields)


def state(ownership: Ownership) -> dict[tuple[str, int], set[str]]:
    return {
        (model, block): set(holding.references)
        for model in ownership.models
        for block, holding in ownership.holdings(model)
    }


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([0], 6863311662677045211),
        ([1, 2, 3], 8866284349863400844),
        ([3, 2, 1], 8614857523597101639),
        ([4294967295, 4294967196, 4294966296], 4722989680274072345),
        (list(range(1, 17)), 6615856733697512468),
    ],
)
def test_blocks_have_kthenas_standardized_hash(tokens, expected):
    ownership = Ownership("m")
    changes = ownership.apply(0, [stored([9], tokens, size=len(tokens))], 1000.9)
    assert changes.changes == (Stored("m", (expected,), 1000),)
    assert changes.engine_hashes == (9,)
    assert ownership.standard_hash(9) == expected


def test_a_block_is_owned_until_its_last_reference_is_gone():
    one, two, size = 101, 102, [7, 8]
    ownership = Ownership("m")
    ownership.apply(0, [stored([one], size), stored([two], size, parent=55)], 1)
    assert ownership.apply(0, [BlockRemoved((one,))], 2).changes == ()
    assert ownership.apply(0, [BlockRemoved((two,))], 3).changes == (Cleared("m", (standard(size),)),)


def test_copies_of_one_block_are_counted():
    ownership = Ownership("m")
    ownership.apply(0, [stored([1], [7, 8]), stored([1], [7, 8])], 1)
    assert ownership.apply(0, [BlockRemoved((1,))], 2).changes == ()
    assert ownership.apply(0, [BlockRemoved((1,))], 2).changes == (Cleared("m", (standard([7, 8]),)),)
    assert ownership.apply(0, [BlockRemoved((1,))], 2).changes == ()
    assert ownership.counts == {"removed_unknown": 1}


def test_the_meaning_of_a_hash_outlives_the_block():
    """An offloading connector stores a block again without its tokens."""
    ownership = Ownership("m")
    ownership.apply(0, [stored([1, 2], [1, 2, 3, 4]), BlockRemoved((1, 2))], 1)
    assert ownership.held == 0
    assert ownership.standard_hash(1) is None
    changes = ownership.apply(0, [BlockStored((1,), None, (), 0, medium="CPU")], 2)
    assert changes.changes == (Stored("m", (standard([1, 2]),), 2),)


def test_a_hash_that_comes_to_mean_other_tokens_gives_up_the_old_ones():
    ownership = Ownership("m")
    ownership.apply(0, [stored([1], [1, 2]), stored([5], [9, 9])], 1)
    changes = ownership.apply(0, [stored([1], [3, 4])], 2)
    assert set(changes.changes) == {Removed("m", (standard([1, 2]),)), Stored("m", (standard([3, 4]),), 2)}
    assert ownership.apply(0, [BlockRemoved((1,)), BlockRemoved((1,))], 3).changes == (
        Removed("m", (standard([3, 4]),)),
    )


def test_a_store_without_tokens_is_owned_as_soon_as_another_says_what_it_is():
    ownership = Ownership("m")
    assert ownership.apply(0, [BlockStored((1,), None, (), 2)], 1).changes == ()
    assert ownership.counts == {"unknown_tokens": 1}
    ownership.apply(0, [stored([1], [1, 2], medium="CPU"), BlockRemoved((1,), medium="CPU")], 2)
    assert state(ownership) == {("m", standard([1, 2])): {"GPU"}}


def test_media_are_counted_apart_and_the_fastest_is_told():
    ownership = Ownership("m")
    block = standard([1, 2])
    ownership.apply(0, [stored([1], [1, 2]), stored([1], [1, 2], medium="CPU")], 1)
    assert ownership.holding("m", block).medium == "GPU"
    changes = ownership.apply(0, [BlockRemoved((1,), medium="GPU")], 2)
    assert changes.changes == ()
    assert changes.touched == (("m", block),)
    assert ownership.holding("m", block).medium == "CPU"


def test_only_groups_that_need_the_whole_prefix_are_owned():
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    ownership = Ownership("m")
    ownership.apply(0, [stored([2], [1, 2, 3, 4], **window), stored([1, 2], [1, 2, 3, 4], **full)], 1)
    assert state(ownership).keys() == {("m", standard([1, 2])), ("m", standard([3, 4]))}
    assert ownership.apply(0, [BlockRemoved((2,), group_idx=0)], 2).changes == ()
    assert ownership.apply(0, [BlockRemoved((2,), group_idx=1)], 2).changes == (Removed("m", (standard([3, 4]),)),)


def test_what_tokens_alone_do_not_describe_is_not_owned():
    ownership = Ownership("m")
    salted = stored([1, 2], [1, 2, 3, 4], extra_keys=(("salt",), None))
    assert ownership.apply(0, [salted, stored([3], [5, 6], parent=2)], 1).changes == ()
    assert ownership.apply(0, [stored([4], [1, 2], cache_salt="salt")], 1).changes == ()
    assert ownership.apply(0, [stored([5], [1, 2], extra_keys=((("image", 0),),))], 1).changes == ()
    assert ownership.apply(0, [stored([6], [1, 2], lora_id=1)], 1).changes == ()
    assert ownership.counts == {"private": 5, "unnamed_adapter": 1}


def test_blocks_of_an_adapter_belong_to_its_name():
    ownership = Ownership("m")
    event = stored([1], [1, 2], lora_id=1, lora_name="adapter", extra_keys=(("adapter",),))
    assert ownership.apply(0, [event], 5).changes == (Stored("adapter", (standard([1, 2]),), 5),)
    assert ownership.models == ["m", "adapter"]
    assert ownership.apply(0, [BlockRemoved((1,))], 6).changes == (Cleared("adapter", (standard([1, 2]),)),)
    assert ownership.models == ["m"]


def test_a_rank_that_restarts_takes_only_its_own_blocks():
    ownership = Ownership("m")
    ownership.apply(0, [stored([1], [1, 2])], 1)
    ownership.apply(1, [stored([1, 2], [1, 2, 3, 4])], 1)
    assert ownership.forget(1, 2).changes == (Removed("m", (standard([3, 4]),)),)
    assert ownership.apply(0, [AllBlocksCleared()], 3).changes == (Cleared("m", (standard([1, 2]),)),)
    assert ownership.forget(7, 4).changes == ()


def test_what_is_still_held_is_told_again_before_others_take_it_for_stale():
    ownership = Ownership("m")
    for second in range(5):
        ownership.apply(0, [stored([second], [second, second])], second)
    first = ownership.refresh(3, 100, 2)
    assert first.changes == (Stored("m", (standard([0, 0]), standard([1, 1])), 100),)
    assert ownership.refresh(3, 100, 2).changes == (Stored("m", (standard([2, 2]),), 100),)
    assert ownership.refresh(3, 100, 2).changes == ()
    assert [holding.stored_at for _, holding in ownership.holdings("m")] == [3, 4, 100, 100, 100]


def test_the_oldest_blocks_go_when_there_are_too_many():
    ownership = Ownership("m", Limits(live=2))
    changes = ownership.apply(0, [stored([1, 2, 3], [1, 1, 2, 2, 3, 3])], 1)
    assert changes.changes == (Stored("m", (standard([2, 2]), standard([3, 3])), 1),)
    assert ownership.counts == {"evicted": 1}
    assert ownership.apply(0, [BlockRemoved((1,))], 1).changes == ()


def test_a_store_whose_tokens_do_not_fit_its_blocks_teaches_nothing():
    ownership = Ownership("m")
    assert ownership.apply(0, [stored([1, 2], [1, 2, 3]), stored([3], [1, 2, 3, 4])], 1).changes == ()


POOLS = [(0, None, None), (0, "CPU", None), (1, None, "full_attention"), (2, None, "sliding_window")]


@st.composite
def histories(draw):
    """Batches of a small engine: few prompts, so that hashes, copies and tokens meet again and again."""
    steps = []
    for _ in range(draw(st.integers(1, 25))):
        rank = draw(st.integers(0, 1))
        events = []
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from("ssssrrrc"))
            group, medium, spec = draw(st.sampled_from(POOLS))
            if kind == "s":
                prompt = draw(st.lists(st.sampled_from([(1, 1), (2, 2)]), min_size=1, max_size=3))
                salt = draw(st.sampled_from([None, None, "salt"]))
                start = draw(st.integers(0, len(prompt) - 1))
                events.append(("store", tuple(prompt), start, salt, group, medium, spec))
            elif kind == "r":
                events.append(("remove", draw(st.integers(0, 30)), group, medium))
            else:
                events.append(("clear",))
        steps.append((rank, events, draw(st.sampled_from(["apply", "apply", "apply", "forget"]))))
    return steps


def name_of(prompt: tuple[tuple[int, int], ...], salt: str | None) -> int:
    return int.from_bytes(hashlib.sha256(repr((prompt, salt)).encode()).digest()[:8], "big")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_any_history_ends_in_what_a_naive_engine_holds(history):
    ownership = Ownership("m")
    copies: dict[int, Counter] = {0: Counter(), 1: Counter()}  # (name, group, medium) -> copies
    tokens: dict[int, tuple[tuple[int, int], str | None]] = {}
    believed: dict[tuple[str, int], int] = {}
    prompts = [prompt for length in (1, 2, 3) for prompt in product([(1, 1), (2, 2)], repeat=length)]
    names = sorted({name_of(prompt, salt) for prompt in prompts for salt in (None, "salt")})
    seen_prompts: set[tuple[int, int]] = set()
    for now, (rank, events, how) in enumerate(history, start=1):
        if how == "forget":
            copies[rank].clear()
            seen_prompts = {seen for seen in seen_prompts if seen[0] != rank}
            follow(believed, ownership.forget(rank, now))
            check(ownership, copies, tokens, believed)
            continue
        wire = []
        for event in events:
            if event[0] == "store":
                _, prompt, start, salt, group, medium, spec = event
                # An engine has told of the blocks before, so that whoever listens knows of their salt.
                if salt and not all((rank, name_of(prompt[:n], salt)) in seen_prompts for n in range(1, start + 1)):
                    start = 0
                run = [name_of(prompt[: n + 1], salt) for n in range(start, len(prompt))]
                for n, name in enumerate(run):
                    copies[rank][name, group, medium or "GPU"] += 1
                    tokens[name] = (prompt[start + n], salt)
                    seen_prompts.add((rank, name))
                wire.append(
                    stored(
                        run,
                        [token for block in prompt[start:] for token in block],
                        parent=name_of(prompt[:start], salt) if start else None,
                        extra_keys=((salt,), *[None] * (len(run) - 1)) if salt and not start else None,
                        medium=medium,
                        group_idx=group,
                        kv_cache_spec_kind=spec,
                        kv_cache_spec_sliding_window=64 if spec == "sliding_window" else None,
                    )
                )
            elif event[0] == "remove":
                _, number, group, medium = event
                name = names[number % len(names)]
                place = name, group, medium or "GPU"
                if copies[rank][place]:
                    copies[rank][place] -= 1
                wire.append(BlockRemoved((name,), medium, group))
            else:
                copies[rank].clear()
                seen_prompts = {seen for seen in seen_prompts if seen[0] != rank}
                wire.append(AllBlocksCleared())
        follow(believed, ownership.apply(rank, wire, now))
        check(ownership, copies, tokens, believed)
        retell(ownership, now)


def follow(believed: dict[tuple[str, int], int], changes) -> None:
    """What somebody believes who only hears of changes."""
    for change in changes.changes:
        if isinstance(change, Stored):
            believed.update({(change.model, block): change.timestamp for block in change.hashes})
            continue
        for block in change.hashes:
            del believed[change.model, block]
        if isinstance(change, Cleared):
            assert not [key for key in believed if key[0] == change.model]


def check(ownership, copies, tokens, believed) -> None:
    expected: dict[tuple[str, int], set[str]] = {}
    for counter in copies.values():
        for (name, group, medium), count in counter.items():
            block, salt = tokens[name]
            if count and salt is None and group != 2:
                expected.setdefault(("m", standard(list(block))), set()).add(medium)
    assert state(ownership) == expected
    assert believed.keys() == expected.keys()
    assert believed == {
        (model, block): holding.stored_at for model in ownership.models for block, holding in ownership.holdings(model)
    }


def retell(ownership: Ownership, now: float) -> None:
    """Whoever is told everything anew ends up with the same blocks, copies and meanings."""
    other = Ownership("m")
    for rank in ownership.ranks:
        for events in ownership.replay(rank, 2):
            other.apply(rank, events, now)
    assert state(other) == state(ownership)
    for rank in ownership.ranks:
        ours, theirs = ownership._ranks[rank], other._ranks.get(rank)
        if theirs is None:
            assert not ours.live
            assert not ours.dead
            continue
        assert {name: sorted(ours._copies_of(name)) for name in ours.live} == {
            name: sorted(theirs._copies_of(name)) for name in theirs.live
        }
        for name in (*ours.live, *ours.dead):
            assert _told(ours.meaning(name)) == _told(theirs.meaning(name))


def _told(meaning):
    return meaning and (meaning.parent, meaning.tokens, meaning.private)
