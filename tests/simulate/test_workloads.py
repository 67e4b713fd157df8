"""Traffic: what is said of each family, and that prompts share what their pieces share."""

from __future__ import annotations

import math
from array import array
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.simulate.families import FAMILIES, generate
from picker.simulate.workload import Call, FreshTokens, Session, Workload, packed, token_array, tokens_in

ranges = st.builds(lambda start, length: range(start, start + length), st.integers(0, 50), st.integers(0, 9))


@given(st.lists(ranges), st.lists(ranges))
def test_packed_prompts_share_what_their_tokens_share(one: list[range], other: list[range]) -> None:
    for pieces in (one, other):
        expected = [token for piece in pieces for token in piece]
        assert packed(pieces) == array("I", expected).tobytes()
        assert token_array(packed(pieces)).tolist() == expected
        assert sum(map(tokens_in, pieces)) == len(expected)


@given(st.binary(max_size=40))
def test_a_text_has_a_token_for_every_four_bytes(text: bytes) -> None:
    data = packed([text])
    assert data.startswith(text)
    assert len(data) == 4 * tokens_in(text) == 4 * math.ceil(len(text) / 4)


def test_fresh_tokens_are_fresh_until_there_are_no_more() -> None:
    fresh = FreshTokens()
    taken = [fresh.take(2**31 - 10), fresh.take(2**31 - 10), fresh.take(100)]
    assert taken[0].stop == taken[1].start
    assert taken[2] == range(100)
    assert all(0 <= piece.start <= piece.stop <= 2**32 for piece in taken)


def make(name: str, seed: int = 1, load: float | None = 0.7, **length: float) -> Workload:
    return generate(name, load=load, engines=8, seed=seed, **length)  # type: ignore[arg-type]


def calls(workload: Workload) -> list[Call]:
    return [call for session in workload.sessions for call in session.calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_seed_makes_the_same_traffic_and_another_another(name: str) -> None:
    assert make(name) == make(name)
    assert make(name).sessions != make(name, seed=2).sessions


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "burst"])
def test_sessions_are_in_order_and_at_the_rate_of_the_load(name: str) -> None:
    workload = make(name)
    starts = [session.start for session in workload.sessions]
    assert starts == sorted(starts)
    assert 0 <= starts[0] <= starts[-1]
    capacity = FAMILIES[name].capacity
    assert capacity is not None
    expected = capacity * 0.7 * workload.end
    # Calls of sessions come in lumps of up to 64.
    assert workload.calls == pytest.approx(expected, abs=6 * math.sqrt(expected * 30))
    assert all(len(call.answer) >= 1 and call.prompt_tokens >= 1 for call in calls(workload))


def test_capacity_grows_with_the_engines() -> None:
    small, large = (generate("F5", load=0.5, engines=engines, seed=1).calls for engines in (4, 16))
    assert large == pytest.approx(4 * small, rel=0.1)


def test_length_is_in_seconds_or_in_requests() -> None:
    assert (make("F1").warm, make("F1").end) == (80, 240)
    assert (make("F1", seconds=60).warm, make("F1", seconds=60).end) == (20, 60)
    assert make("F1", requests=5000).calls == pytest.approx(5000, abs=300)


def prefixes(workload: Workload) -> list[range]:
    return [call.prompt[0] for call in calls(workload) if isinstance(call.prompt[0], range)]


@pytest.mark.parametrize(("name", "groups"), [("F1", 150), ("F9", 150), ("F10", 40), ("F11", 600)])
def test_shared_system_prompts(name: str, groups: int) -> None:
    workload = make(name)
    found = prefixes(workload)
    assert 0.8 * groups < len(set(found)) <= groups
    assert {len(prefix) for prefix in found} == {6000}
    assert all(
        1100 <= call.prompt_tokens - 6000 <= 1300 and 200 <= len(call.answer) <= 1000 for call in calls(workload)
    )
    top = max(found.count(prefix) for prefix in set(found)) / len(found)
    weights = [rank ** -(0.6 if name == "F11" else 0.8) for rank in range(1, groups + 1)]
    assert top == pytest.approx(weights[0] / sum(weights), rel=0.4)


def test_one_of_the_engines_is_slow_in_f9_if_there_is_one() -> None:
    assert make("F9").slow == {0: 2.0}
    assert make("F1").slow == {}


@pytest.mark.parametrize(("name", "turns", "opening"), [("F2", 6, 1000), ("F3", 20, 8000)])
def test_conversations_repeat_what_was_said(name: str, turns: int, opening: int) -> None:
    workload = make(name, requests=20_000)
    lengths = [len(session.calls) for session in workload.sessions]
    # Agents stop at 100,000 tokens, and so before their time.
    assert mean(lengths) == pytest.approx(turns, rel=0.1 if name == "F2" else 0.25)
    assert {len(prefix) for prefix in prefixes(workload)} == {opening}
    for session in workload.sessions[:200]:
        for before, after in zip(session.calls, session.calls[1:], strict=False):
            assert after.prompt[: len(before.prompt) + 1] == (*before.prompt, before.answer)
            assert after.prompt_tokens + len(after.answer) <= 100_000
    thinks = [call.think for session in workload.sessions for call in session.calls[1:]]
    assert mean(thinks) == pytest.approx(15 if name == "F2" else 3, rel=0.1)


def test_documents_are_asked_about_four_times() -> None:
    workload = make("F4", requests=5000)
    documents = [call.prompt[1] for call in calls(workload)]
    assert len(documents) / len(set(documents)) == pytest.approx(4, rel=0.15)
    assert len({call.prompt[0] for call in calls(workload)}) == 1


def test_unique_prompts_have_nothing_in_common() -> None:
    workload = make("F5", requests=5000)
    assert len(set(prefixes(workload))) == workload.calls
    sizes = [call.prompt_tokens for call in calls(workload)]
    assert median(sizes) == pytest.approx(1500, rel=0.1)
    assert max(sizes) <= 16_000


def test_fan_outs_come_within_20_ms() -> None:
    workload = make("F7")
    by_prefix: dict[range, list[float]] = {}
    for session in workload.sessions:
        if len(session.calls[0].prompt) > 1:
            by_prefix.setdefault(session.calls[0].prompt[0], []).append(session.start)  # type: ignore[arg-type]
    assert all(16 <= len(starts) <= 64 and max(starts) - min(starts) <= 0.02 for starts in by_prefix.values())
    assert all(6000 <= len(prefix) <= 12_000 for prefix in by_prefix)
    assert sum(map(len, by_prefix.values())) / workload.calls == pytest.approx(0.75, abs=0.1)


def test_one_burst_has_64_requests_at_any_load() -> None:
    workload = make("burst", load=None)
    assert [session.start for session in workload.sessions] == [0.0] * 64
    assert {len(prefix) for prefix in prefixes(workload)} == {10_000}
    assert len(set(prefixes(workload))) == 1
    assert isinstance(workload.sessions[0], Session)
