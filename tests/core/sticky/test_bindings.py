"""Bindings in memory against a model that keeps everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from picker.core.sticky import Binding, Bindings

PODS = [Binding("a", "1:1"), Binding("a", "1:2"), Binding("b", "2:1")]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["bind", "release", "wait"]),
        st.sampled_from("stuvwx"),
        st.sampled_from(PODS),
        st.integers(0, 4),
    )
)


@given(STEPS)
def test_they_slide_and_end(steps):
    bindings, model, now = Bindings(10, 1000), {}, 0.0
    for act, session, pod, seconds in steps:
        if act == "bind":
            bindings.bind(session, pod, None, now)
            model[session] = pod, now
        elif act == "release":
            bindings.release(session, pod)
            if model.get(session, (None,))[0] == pod:
                del model[session]
        else:
            now += seconds
        for each in "stuvwx":
            bound, at = model.get(each, (None, 0))
            assert bindings.find(each, now) == (bound if now < at + 10 else None)
    assert bindings.evicted == 0


@given(st.lists(st.sampled_from("stuvwx")))
def test_the_least_recently_bound_go_when_there_are_too_many(sessions):
    bindings, order = Bindings(10, 3), []
    for session in sessions:
        bindings.bind(session, PODS[0], None, 0)
        order = [*(one for one in order if one != session), session]
    assert [one for one in "stuvwx" if bindings.find(one, 0)] == sorted(order[-3:])
    assert len(bindings) == len(order[-3:])


def test_what_is_over_is_freed_by_those_that_come():
    bindings = Bindings(10, 1000)
    for number in range(100):
        bindings.bind(f"old-{number}", PODS[0], None, 0)
    for number in range(100):
        bindings.bind(f"new-{number}", PODS[0], None, 10)
    assert (len(bindings), bindings.evicted) == (100, 0)


def test_an_unknown_address_is_the_same_as_any():
    assert Binding("a", "").same(Binding("a", "1:1"))
    assert Binding("a", "1:1").same(Binding("a", ""))
    assert not Binding("a", "1:1").same(Binding("a", "1:2"))
    assert not Binding("a", "").same(Binding("b", ""))
