"""`ConformanceExchange` without a network: it differs from `Exchange` in two kinds of effects and in nothing else."""

from __future__ import annotations

from ipaddress import ip_address

import hypothesis.strategies as st
from hypothesis import given
from msgspec.structs import replace

from picker.core.exchange.conformance import ConformanceExchange, in_both
from picker.core.exchange.effects import Decide, HeadersReply, Side
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

HOSTS = ["10.0.0.1", "10.0.0.2", "::1", "fe80::1", "fe80::1:80"]
PORTS = [80, 8000]
ENDPOINTS = [(host, port) for host in HOSTS for port in PORTS]


def written(host, port=None, *, brackets=True):
    name = f"[{host}]" if ":" in host and (brackets or port) else host
    return f"{name}:{port}" if port else name


places = st.lists(
    st.builds(
        lambda host, port, brackets: (host, port, written(host, port, brackets=brackets)),
        st.sampled_from(HOSTS),
        st.sampled_from([None, *PORTS]),
        st.booleans(),
    ),
    max_size=6,
)


def meant(found):
    """The endpoints that places mean, whatever way they are written in."""
    return {
        (host, port) for host, port in ENDPOINTS for place, only, _ in found if place == host and only in (None, port)
    }


def read(place):
    """A place as any reader of addresses understands it."""
    host, colon, port = place.rpartition(":")
    if place.count(":") > 1 and not host.endswith("]"):
        host, colon, port = place, "", ""
    host = host if colon else place
    return str(ip_address(host.strip("[]"))), int(port) if colon and port else None, place


@given(places, places)
def test_what_is_in_both_is_what_both_mean(one, other):
    both = in_both([place for *_, place in one], [place for *_, place in other])
    assert meant([read(place) for place in both]) == meant(one) & meant(other)


modes = st.sampled_from(BodyMode)
protocols = st.none() | st.builds(ProtocolConfig, modes, modes)
headers = st.dictionaries(
    st.sampled_from([":path", "accept", "x-prefiller-host-port", "test-epp-endpoint-selection"]), st.binary(max_size=3)
)
subsets = st.none() | st.lists(st.sampled_from(["a:1", "b:2"]), max_size=2).map(tuple)
served = st.sampled_from([None, "a:1"])
steps = st.lists(
    st.one_of(
        st.builds(RequestHeaders, headers, st.booleans(), subsets, protocols),
        st.builds(RequestBody, st.binary(max_size=3), st.booleans(), subsets, protocols),
        st.builds(RequestTrailers, protocols),
        st.builds(ResponseHeaders, st.sampled_from([None, 100, 200, 503]), st.booleans(), served, protocols),
        st.builds(ResponseBody, st.binary(max_size=3), st.booleans(), protocols),
        st.builds(ResponseTrailers, served, protocols),
        st.just(TimerFired()),
        st.just(StreamEnded()),
    ),
    max_size=8,
)


def plain(effect):
    """An effect without what the conformance suite wants."""
    if isinstance(effect, Decide):
        return replace(effect, subset=None)
    if isinstance(effect, HeadersReply) and effect.side is Side.RESPONSE:
        return replace(effect, set_headers=())
    return effect


@given(steps, st.sampled_from([Routed("a:1,b:2"), Refused(503)]), st.booleans())
def test_everything_else_is_the_same(steps, outcome, at_once):
    exchange, usual = ConformanceExchange(pool="default/pool"), Exchange()
    pending = False
    for step in steps:
        effects, expected = exchange.receive(step), usual.receive(step)
        assert [plain(effect) for effect in effects] == [plain(effect) for effect in expected]
        for effect, other in zip(effects, expected, strict=True):
            if isinstance(effect, Decide):
                pending = True
                named = effect.headers.get("test-epp-endpoint-selection")
                assert named is not None or effect.subset == other.subset
                assert other.subset is None or set(effect.subset) <= set(other.subset)
            if isinstance(effect, HeadersReply) and effect.side is Side.RESPONSE:
                told = dict(effect.set_headers)
                assert told["x-conformance-test-epp-pool"] == b"default/pool"
                place = getattr(step, "served", None)
                assert told["x-conformance-test-served-endpoint"] == (
                    place.encode() if place else b"fail: missing destination endpoint served metadata"
                )
        if pending and at_once:
            pending = False
            assert [plain(effect) for effect in exchange.decided(outcome)] == list(usual.decided(outcome))


def test_the_endpoint_that_was_selected_is_the_first_of_the_list():
    exchange = ConformanceExchange()
    exchange.receive(RequestHeaders({}, end_of_stream=True, protocol=ProtocolConfig(BodyMode.NONE, BodyMode.NONE)))
    exchange.decided(Routed("10.0.0.1:80,10.0.0.2:80"))
    reply, *_ = exchange.receive(ResponseHeaders(200, served="10.0.0.2:80"))
    assert reply.set_headers == (
        ("x-conformance-test-served-endpoint", b"10.0.0.2:80"),
        ("x-conformance-test-selected-endpoint", b"10.0.0.1:80"),
    )


def test_a_selection_is_split_at_commas():
    exchange = ConformanceExchange()
    named = {"test-epp-endpoint-selection": b" 10.0.0.1 ,10.0.0.2:80,,"}
    (decide,) = exchange.receive(
        RequestHeaders(named, end_of_stream=True, protocol=ProtocolConfig(BodyMode.NONE, BodyMode.NONE))
    )
    assert decide.subset == ("10.0.0.1", "10.0.0.2:80")
