"""Whatever comes, in whatever order: nothing raises, and the machine keeps to its table."""

import hypothesis.strategies as st
from hypothesis import given, settings

from picker.core.exchange.effects import Decide, Effect, Finish, Immediate, StreamedBody
from picker.core.exchange.events import (
    BodyMode,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamEnded,
    TimerFired,
)
from picker.core.exchange.machine import Exchange
from picker.core.exchange.outcomes import Refused, Routed
from picker.core.exchange.settings import ExchangeSettings
from picker.core.exchange.states import DECIDED, TRANSITIONS, State
from picker.core.headers import CLIENT_FORBIDDEN

modes = st.sampled_from(BodyMode)
protocols = st.none() | st.builds(ProtocolConfig, modes, modes)
headers = st.dictionaries(st.sampled_from([":path", "accept", *sorted(CLIENT_FORBIDDEN)]), st.binary(max_size=3))
subsets = st.none() | st.lists(st.sampled_from(["a:1", "b:2"]), max_size=2).map(tuple)
bodies = st.binary(max_size=9) | st.sampled_from([70_000, 62_000]).map(bytes)
served = st.sampled_from([None, "a:1"])
statuses = st.sampled_from([None, 100, 200, 204, 404, 503, -1])
messages = st.one_of(
    st.builds(RequestHeaders, headers, st.booleans(), subsets, protocols),
    st.builds(RequestBody, bodies, st.booleans(), subsets, protocols),
    st.builds(RequestTrailers, protocols),
    st.builds(ResponseHeaders, statuses, st.booleans(), served, protocols),
    st.builds(ResponseBody, bodies, st.booleans(), protocols),
    st.builds(ResponseTrailers, served, protocols),
    st.just(TimerFired()),
)
steps = st.lists(messages | st.just("decide") | messages | st.just(StreamEnded()), max_size=14)


@settings(max_examples=400, deadline=None)
@given(
    steps=steps,
    start=st.none() | st.builds(RequestHeaders, headers, st.booleans(), subsets, protocols),
    assumed=st.none() | modes,
    cap=st.sampled_from([5, 1 << 24]),
    outcome=st.sampled_from([Routed("a:1"), Refused(503)]),
)
def test_any_order_of_events_is_survived(steps, start, assumed, cap, outcome):
    exchange = Exchange(ExchangeSettings(max_body_bytes=cap, assumed_request_body=assumed))
    everything: list[Effect] = []
    pending = False
    for step in [*([start] if start is not None else []), *steps]:
        before = exchange.state
        if step == "decide":
            if not pending:
                continue
            pending = False
            effects = exchange.decided(outcome)
            assert exchange.state is before if before not in DECIDED else exchange.state in DECIDED[before]
        else:
            effects = exchange.receive(step)
            assert exchange.state in allowed(before, type(step))
        decides = [effect for effect in effects if isinstance(effect, Decide)]
        assert decides in ([], [effects[-1]] if effects else [])
        pending = pending or bool(decides)
        everything += effects
        if before is State.SILENT:
            assert all(isinstance(effect, Finish) for effect in effects)
    assert sum(isinstance(effect, Decide) for effect in everything) <= 1
    assert sum(isinstance(effect, Finish) for effect in everything) <= 1
    assert sum(isinstance(effect, Immediate) for effect in everything) <= 1
    assert all(len(effect.data) <= 62_000 for effect in everything if isinstance(effect, StreamedBody))


def allowed(state, event):
    _, leads_to = TRANSITIONS[state].get(event, ("", ()))
    return (state, *leads_to)
