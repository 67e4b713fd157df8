"""Rules of cache layouts against their definitions, tried out one lane and one length at a time."""

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.block_index.layout import PoolShape, advance, hybrid, layout_of, tail_blocks, windows

LANES = 3
masks = st.lists(st.integers(0, 7).map(lambda mask: mask | 2 * (mask > 2)), max_size=12)


def has(plane: list[int], position: int, lane: int) -> bool:
    return bool(plane[position] >> lane & 1)


def prefix(plane: list[int], lane: int) -> int:
    return next((number for number in range(len(plane)) if not has(plane, number, lane)), len(plane))


@given(masks, st.data())
def test_advance_finds_the_prefix_of_each_lane_from_whatever_was_known(plane, data):
    limit = data.draw(st.integers(0, len(plane)))
    starts: dict[int, int] = {}
    for lane in range(LANES):
        known = data.draw(st.integers(0, prefix(plane, lane) + 2 * (prefix(plane, lane) == len(plane))))
        starts[known] = starts.get(known, 0) | 1 << lane
    found = advance(range(len(plane)), limit, sorted(starts.items()), dict(enumerate(plane)).get)
    assert [depth for depth, _ in found] == sorted(depth for depth, _ in found)
    by_lane = [(lane, depth) for depth, lanes in found for lane in range(LANES) if lanes >> lane & 1]
    assert sorted(by_lane) == [(lane, min(limit, prefix(plane, lane))) for lane in range(LANES)]


@given(masks, st.integers(0, 14))
def test_windows(plane, length):
    for end, mask in enumerate(windows(plane, length, 7)):
        expected = 7
        for position in range(max(0, end + 1 - length), end + 1):
            expected &= plane[position]
        assert mask == expected


@given(
    st.integers(0, 30),
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.one_of(st.none(), st.integers(0, 4)), st.integers()),
        min_size=1,
        max_size=3,
    ),
    st.data(),
)
def test_hybrid_finds_the_longest_length_that_every_group_allows(tokens, specs, data):
    planes, groups = [], []
    for number, (size, tail, _) in enumerate(specs):
        blocks = tokens // size
        plane = data.draw(st.lists(st.sampled_from([7, 7, 7, 5, 3, 6, 1, 0]), min_size=blocks, max_size=blocks))
        planes.append(plane)
        groups.append((PoolShape(number, "GPU", size, tail), range(blocks), dict(enumerate(plane)).get))
    step = lcm(*(size for size, _, _ in specs))

    def allowed(length: int, lane: int) -> bool:
        for plane, (size, tail, _) in zip(planes, specs, strict=True):
            end = length // size
            start = 0 if tail is None else max(0, end - tail)
            if not all(has(plane, position, lane) for position in range(start, end)):
                return False
        return True

    expected = {}
    for lane in range(LANES):
        best = max((length for length in range(0, tokens + 1, step) if allowed(length, lane)), default=0)
        if best:
            expected[lane] = best
    found = hybrid(tokens, 7, groups)
    assert {lane: length for length, lanes in found for lane in range(LANES) if lanes >> lane & 1} == expected


@pytest.mark.parametrize(
    ("kind", "window", "size", "tail"),
    [
        ("full_attention", None, 32, None),
        (None, None, 32, None),
        ("mla_attention", None, 32, None),
        ("sink_full_attention", None, 16, None),
        ("sliding_window", 64, 32, 2),
        ("sliding_window", 65, 32, 2),
        ("sliding_window", 66, 32, 3),
        ("sliding_window", 1, 32, 0),
        ("mamba", None, 784, 1),
        ("something_new", None, 16, 1),
    ],
)
def test_what_a_group_needs_before_the_end_of_a_hit(kind, window, size, tail):
    assert tail_blocks(kind, window, size) == tail


def test_lower_tiers_count_by_weight_and_only_where_the_rule_is_known():
    gpu, cpu = PoolShape(0, "GPU", 16), PoolShape(0, "CPU", 64)
    disk, other = PoolShape(0, "DISK", 16), PoolShape(0, "TAPE", 16)
    weights = {"GPU": 1.0, "DISK": 0.5, "CPU": 0.8}
    assert layout_of([disk, cpu, other, gpu], weights).tiers == (cpu, disk)
    window = PoolShape(1, "GPU", 16, 4)
    assert layout_of([gpu, window, cpu], weights).tiers == ()
    assert layout_of([window, cpu], weights).tiers == ()
    assert layout_of([cpu], weights).tiers == (cpu,)
    assert layout_of([gpu, window], weights).single is None
    assert layout_of([gpu, cpu], weights).single == gpu
