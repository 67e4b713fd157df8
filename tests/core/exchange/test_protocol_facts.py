"""One test for each fact of the protocol that was measured on a real Envoy or reported by its users."""

import pytest

from picker.core.exchange.effects import (
    Anomaly,
    Answered,
    Arm,
    BodyReply,
    BodyState,
    Decide,
    Finish,
    FirstChunk,
    HeadersReply,
    Immediate,
    LearnedOn,
    Report,
    Side,
    StreamedBody,
    TrailersReply,
)
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

NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = BodyMode
POD = "10.0.0.1:8000"
HEADERS = {":method": b"POST", ":path": b"/v1/completions"}


def opened(mode, response=BodyMode.NONE, *, headers=HEADERS, end=False, subset=None, **options):
    exchange = Exchange(ExchangeSettings(**options))
    return exchange, exchange.receive(RequestHeaders(headers, end, subset, ProtocolConfig(mode, response)))


def routed(mode=BodyMode.NONE, response=BodyMode.NONE):
    exchange, effects = opened(mode, response, end=True)
    assert isinstance(effects[-1], Decide)
    exchange.decided(Routed(POD))
    return exchange


def request_headers_reply(**fields):
    return HeadersReply(Side.REQUEST, **fields)


# The request


def test_buffered_answers_headers_at_once_because_envoy_sends_the_body_only_after_that():
    exchange, effects = opened(BUFFERED)
    assert effects == (request_headers_reply(),)
    assert exchange.receive(RequestBody(b"{}", end_of_stream=True)) == (
        Decide(HEADERS, b"{}", BodyState.COMPLETE, BUFFERED, None),
    )
    assert exchange.decided(Routed(POD)) == (BodyReply(Side.REQUEST, destination=POD),)


def test_buffered_body_before_trailers_has_no_end_of_stream_and_is_whole():
    exchange, _ = opened(BUFFERED)
    (decide,) = exchange.receive(RequestBody(b"{}"))
    assert decide.body_state is BodyState.COMPLETE
    exchange.decided(Routed(POD))
    assert exchange.receive(RequestTrailers()) == (TrailersReply(Side.REQUEST),)


def test_buffered_request_of_trailers_alone_is_decided_and_answered_with_metadata():
    exchange, _ = opened(BUFFERED)
    assert exchange.receive(RequestTrailers()) == (Decide(HEADERS, b"", BodyState.NONE, BUFFERED, None),)
    assert exchange.decided(Routed(POD)) == (TrailersReply(Side.REQUEST, POD),)


def test_buffered_partial_past_the_limit_sends_one_message_without_end_of_stream():
    exchange, _ = opened(PARTIAL)
    (decide,) = exchange.receive(RequestBody(b'{"prompt": "on'))
    assert decide.body_state is BodyState.TRUNCATED
    assert exchange.decided(Routed(POD)) == (BodyReply(Side.REQUEST, destination=POD),)


def test_streamed_body_comes_too_late_for_a_pick_so_headers_decide_and_it_is_reported():
    exchange, effects = opened(STREAMED)
    assert effects == (
        Report(Anomaly.STREAMED_REQUEST_BODY),
        Decide(HEADERS, b"", BodyState.STREAMED, STREAMED, None),
    )
    assert exchange.decided(Routed(POD)) == (request_headers_reply(destination=POD),)
    assert exchange.receive(RequestBody(b"{")) == (BodyReply(Side.REQUEST),)
    assert exchange.receive(RequestBody(b"}", end_of_stream=True)) == (BodyReply(Side.REQUEST),)


def test_streamed_body_sent_without_waiting_is_answered_after_the_headers():
    exchange, _ = opened(STREAMED)
    assert exchange.receive(RequestBody(b"{")) == ()
    assert exchange.receive(RequestBody(b"}")) == ()
    assert exchange.receive(RequestTrailers()) == ()
    assert exchange.decided(Routed(POD)) == (
        request_headers_reply(destination=POD),
        BodyReply(Side.REQUEST),
        BodyReply(Side.REQUEST),
        TrailersReply(Side.REQUEST),
    )


@pytest.mark.parametrize(("mode", "end"), [(NONE, False), *((mode, True) for mode in BodyMode)])
def test_a_request_without_body_is_decided_at_once(mode, end):
    exchange, effects = opened(mode, end=end)
    assert effects == (Decide(HEADERS, b"", BodyState.NONE, mode, None),)
    assert exchange.decided(Routed(POD)) == (request_headers_reply(destination=POD),)


def test_duplex_answers_nothing_until_the_body_ends_and_then_everything():
    exchange, effects = opened(DUPLEX)
    assert effects == ()
    assert exchange.receive(RequestBody(b"hello, ")) == ()
    assert exchange.receive(RequestBody(b"")) == ()
    assert exchange.receive(RequestBody(b"world")) == ()
    (decide,) = exchange.receive(RequestBody(b"", end_of_stream=True))
    assert decide == Decide(HEADERS, b"hello, world", BodyState.COMPLETE, DUPLEX, None)
    assert exchange.decided(Routed(POD)) == (
        request_headers_reply(destination=POD),
        StreamedBody(Side.REQUEST, b"hello, world", end_of_stream=True),
    )


def test_duplex_empty_body_is_one_empty_piece_with_end_of_stream():
    exchange, _ = opened(DUPLEX)
    exchange.receive(RequestBody(b"", end_of_stream=True))
    assert exchange.decided(Routed(POD)) == (
        request_headers_reply(destination=POD),
        StreamedBody(Side.REQUEST, b"", end_of_stream=True),
    )


def test_duplex_pieces_are_at_most_62000_bytes_because_gateways_refuse_64_kib():
    exchange, _ = opened(DUPLEX)
    exchange.receive(RequestBody(bytes(124_001), end_of_stream=True))
    _, *pieces = exchange.decided(Routed(POD))
    assert [(len(piece.data), piece.end_of_stream) for piece in pieces] == [
        (62_000, False),
        (62_000, False),
        (1, True),
    ]


def test_duplex_body_ended_by_trailers_has_no_end_of_stream():
    exchange, _ = opened(DUPLEX)
    exchange.receive(RequestBody(b"body"))
    (decide,) = exchange.receive(RequestTrailers())
    assert decide.body_state is BodyState.COMPLETE
    assert exchange.decided(Routed(POD)) == (
        request_headers_reply(destination=POD),
        StreamedBody(Side.REQUEST, b"body", end_of_stream=False),
        TrailersReply(Side.REQUEST),
    )


def test_duplex_repeats_the_end_of_bodies_over_a_megabyte_and_must_not_get_a_second_answer():
    exchange, _ = opened(DUPLEX)
    exchange.receive(RequestBody(b"body", end_of_stream=True))
    assert exchange.receive(RequestBody(b"", end_of_stream=True)) == (Report(Anomaly.DUPLICATE_END_OF_STREAM),)
    assert len(exchange.decided(Routed(POD))) == 2
    assert exchange.receive(RequestBody(b"", end_of_stream=True)) == (Report(Anomaly.DUPLICATE_END_OF_STREAM),)


@pytest.mark.parametrize("mode", [BUFFERED, PARTIAL])
def test_outside_duplex_every_message_gets_an_answer_even_a_repeated_end(mode):
    exchange, _ = opened(mode)
    exchange.receive(RequestBody(b"body", end_of_stream=True))
    assert exchange.receive(RequestBody(b"", end_of_stream=True)) == (Report(Anomaly.DUPLICATE_END_OF_STREAM),)
    assert exchange.decided(Routed(POD)) == (BodyReply(Side.REQUEST, destination=POD), BodyReply(Side.REQUEST))
    assert exchange.receive(RequestBody(b"", end_of_stream=True)) == (
        Report(Anomaly.DUPLICATE_END_OF_STREAM),
        BodyReply(Side.REQUEST),
    )


def test_a_body_that_mode_none_should_not_send_is_answered_and_reported():
    exchange, _ = opened(NONE)
    exchange.decided(Routed(POD))
    assert exchange.receive(RequestBody(b"x")) == (Report(Anomaly.UNEXPECTED_MESSAGE), BodyReply(Side.REQUEST))


def test_duplex_body_over_the_cap_is_decided_by_its_beginning_and_still_passes_whole():
    exchange, _ = opened(DUPLEX, max_body_bytes=10)
    assert exchange.receive(RequestBody(b"0123456789")) == ()
    report, decide = exchange.receive(RequestBody(b"abc"))
    assert report == Report(Anomaly.BODY_TOO_LARGE)
    assert decide == Decide(HEADERS, b"0123456789abc", BodyState.TRUNCATED, DUPLEX, None)
    assert exchange.receive(RequestBody(b"def")) == ()
    assert exchange.decided(Routed(POD)) == (
        request_headers_reply(destination=POD),
        StreamedBody(Side.REQUEST, b"0123456789abc", end_of_stream=False),
        StreamedBody(Side.REQUEST, b"def", end_of_stream=False),
    )
    assert exchange.receive(RequestBody(b"")) == ()
    assert exchange.receive(RequestBody(b"ghi")) == (StreamedBody(Side.REQUEST, b"ghi", end_of_stream=False),)
    assert exchange.receive(RequestBody(b"", end_of_stream=True)) == (
        StreamedBody(Side.REQUEST, b"", end_of_stream=True),
    )


def test_a_large_duplex_body_that_ends_while_deciding_ends_once():
    exchange, _ = opened(DUPLEX, max_body_bytes=1)
    exchange.receive(RequestBody(b"ab"))
    exchange.receive(RequestBody(b"c", end_of_stream=True))
    assert exchange.decided(Routed(POD)) == (
        request_headers_reply(destination=POD),
        StreamedBody(Side.REQUEST, b"ab", end_of_stream=False),
        StreamedBody(Side.REQUEST, b"c", end_of_stream=True),
    )


def test_trailers_after_the_end_of_a_duplex_body_still_come_last():
    exchange, _ = opened(DUPLEX)
    exchange.receive(RequestBody(b"ab", end_of_stream=True))
    assert exchange.receive(RequestTrailers()) == ()
    assert exchange.decided(Routed(POD))[1:] == (
        StreamedBody(Side.REQUEST, b"ab", end_of_stream=False),
        TrailersReply(Side.REQUEST),
    )


def test_a_duplex_request_without_body_gets_no_body_answer_for_a_repeated_end():
    exchange, _ = opened(DUPLEX, end=True)
    assert exchange.receive(RequestBody(b"", end_of_stream=True)) == (Report(Anomaly.DUPLICATE_END_OF_STREAM),)
    assert exchange.decided(Routed(POD)) == (request_headers_reply(destination=POD),)
    assert exchange.receive(RequestBody(b"", end_of_stream=True)) == (Report(Anomaly.DUPLICATE_END_OF_STREAM),)


def test_a_large_duplex_body_may_end_in_trailers():
    exchange, _ = opened(DUPLEX, max_body_bytes=1)
    exchange.receive(RequestBody(b"ab"))
    exchange.decided(Routed(POD))
    assert exchange.receive(RequestTrailers()) == (TrailersReply(Side.REQUEST),)


def test_the_last_subset_hint_of_the_request_wins():
    for mode in (BUFFERED, DUPLEX):
        exchange, _ = opened(mode, subset=("a:1",))
        (decide,) = exchange.receive(RequestBody(b"{}", end_of_stream=True))
        assert decide.subset == ("a:1",)
        exchange, _ = opened(mode, subset=("a:1",))
        (decide,) = exchange.receive(RequestBody(b"{}", end_of_stream=True, subset=()))
        assert decide.subset == ()


# Control headers a client sends

FORGED = {**HEADERS, "x-gateway-destination-endpoint": b"6.6.6.6:1", "x-prefiller-host-port": b"6.6.6.6:2"}


def test_forged_control_headers_are_removed_in_the_buffered_headers_answer():
    exchange, effects = opened(BUFFERED, headers=FORGED)
    assert effects == (
        Report(Anomaly.CONTROL_HEADER),
        request_headers_reply(remove_headers=("x-gateway-destination-endpoint", "x-prefiller-host-port")),
    )
    (decide,) = exchange.receive(RequestBody(b"", end_of_stream=True))
    assert decide.headers == HEADERS
    assert exchange.decided(Routed(POD)) == (BodyReply(Side.REQUEST, destination=POD),)


@pytest.mark.parametrize("mode", [NONE, DUPLEX])
def test_a_forged_destination_is_overwritten_and_not_removed_in_the_answer_that_sets_it(mode):
    exchange, _ = opened(mode, headers=FORGED, end=True)
    assert exchange.decided(Routed(POD)) == (
        request_headers_reply(remove_headers=("x-prefiller-host-port",), destination=POD),
    )


# The picker's own answers


def test_after_a_refusal_nothing_is_answered():
    exchange, _ = opened(DUPLEX)
    exchange.receive(RequestBody(b"body", end_of_stream=True))
    assert exchange.decided(Refused(429, b"full", (("retry-after", b"1"),), "saturated")) == (
        Immediate(429, b"full", (("retry-after", b"1"),), "saturated"),
    )
    assert exchange.receive(RequestBody(b"", end_of_stream=True)) == ()
    assert exchange.receive(ResponseHeaders(429)) == ()
    assert exchange.receive(StreamEnded()) == ()


def test_a_second_outcome_is_the_callers_error():
    exchange, _ = opened(NONE)
    exchange.decided(Routed(POD))
    with pytest.raises(RuntimeError, match="without a pending Decide"):
        exchange.decided(Routed(POD))


# Responses that overtake the request


def test_buffer_limit_413_comes_as_response_headers_and_never_a_body():
    exchange, _ = opened(BUFFERED)
    assert exchange.receive(ResponseHeaders(413)) == (HeadersReply(Side.RESPONSE),)
    assert exchange.receive(StreamEnded()) == ()


def test_a_local_reply_while_deciding_pays_what_is_owed_and_fails_the_late_pick():
    exchange, _ = opened(BUFFERED)
    exchange.receive(RequestBody(b"{}", end_of_stream=True))
    assert exchange.receive(ResponseHeaders(504, end_of_stream=True)) == (
        BodyReply(Side.REQUEST),
        HeadersReply(Side.RESPONSE),
    )
    assert exchange.decided(Routed(POD)) == (
        Finish(success=False, learned_on=LearnedOn.STREAM_END, status=504, served=None),
    )
    assert exchange.receive(StreamEnded()) == ()


def test_a_2xx_that_overtakes_the_pick_was_not_served_by_it():
    exchange, _ = opened(DUPLEX)
    exchange.receive(RequestBody(b"{}", end_of_stream=True))
    assert exchange.receive(ResponseHeaders(200)) == (HeadersReply(Side.RESPONSE),)
    (finish,) = exchange.decided(Routed(POD))
    assert not finish.success
    assert exchange.receive(RequestTrailers()) == ()


def test_a_refusal_after_a_local_reply_is_void():
    exchange, _ = opened(NONE)
    assert exchange.receive(ResponseHeaders(504)) == (request_headers_reply(), HeadersReply(Side.RESPONSE))
    assert exchange.decided(Refused(503)) == ()


def test_an_informational_response_overtakes_nothing_and_is_not_final():
    exchange, _ = opened(BUFFERED)
    assert exchange.receive(ResponseHeaders(100)) == (HeadersReply(Side.RESPONSE),)
    assert isinstance(exchange.receive(RequestBody(b"{}", end_of_stream=True))[-1], Decide)
    exchange.decided(Routed(POD))
    exchange.receive(ResponseHeaders(103))
    exchange.receive(ResponseHeaders(200))
    (finish,) = exchange.receive(StreamEnded())
    assert (finish.success, finish.status) == (True, 200)


def test_local_replies_may_come_without_any_request_message():
    exchange = Exchange()
    protocol = ProtocolConfig(NONE, DUPLEX)
    assert exchange.receive(ResponseHeaders(404, protocol=protocol)) == (HeadersReply(Side.RESPONSE),)
    assert exchange.receive(ResponseBody(b"no", end_of_stream=True)) == (
        StreamedBody(Side.RESPONSE, b"no", end_of_stream=True),
    )
    assert exchange.receive(RequestHeaders(FORGED)) == (
        Report(Anomaly.UNEXPECTED_MESSAGE),
        request_headers_reply(remove_headers=("x-gateway-destination-endpoint", "x-prefiller-host-port")),
    )


def test_the_stream_may_end_while_deciding():
    exchange, _ = opened(BUFFERED)
    exchange.receive(RequestBody(b"{}", end_of_stream=True))
    assert exchange.receive(StreamEnded()) == ()
    assert exchange.decided(Routed(POD)) == (
        Finish(success=False, learned_on=LearnedOn.STREAM_END, status=None, served=None),
    )


# The response


@pytest.mark.parametrize("mode", [STREAMED, BUFFERED, PARTIAL])
def test_response_bodies_outside_duplex_are_answered_one_for_one(mode):
    exchange = routed(response=mode)
    assert exchange.receive(ResponseHeaders(200))[0] == HeadersReply(Side.RESPONSE)
    assert exchange.receive(ResponseBody(b"data: 1"))[0] == BodyReply(Side.RESPONSE)
    assert exchange.receive(ResponseBody(b"data: 2")) == (BodyReply(Side.RESPONSE),)
    assert exchange.receive(ResponseTrailers())[0] == TrailersReply(Side.RESPONSE)


def test_duplex_response_bodies_are_echoed_at_once_in_pieces():
    exchange = routed(response=DUPLEX)
    exchange.receive(ResponseHeaders(200))
    assert exchange.receive(ResponseBody(b"data: 1"))[0] == StreamedBody(Side.RESPONSE, b"data: 1", end_of_stream=False)
    pieces = exchange.receive(ResponseBody(bytes(62_001)))
    assert [len(piece.data) for piece in pieces] == [62_000, 1]
    last, finish = exchange.receive(ResponseBody(b"", end_of_stream=True))
    assert last == StreamedBody(Side.RESPONSE, b"", end_of_stream=True)
    assert finish.learned_on is LearnedOn.RESPONSE_BODY
    assert exchange.receive(ResponseBody(b"", end_of_stream=True)) == (Report(Anomaly.DUPLICATE_END_OF_STREAM),)


def test_a_response_body_that_mode_none_should_not_send_is_answered_and_reported():
    exchange = routed(response=NONE)
    exchange.receive(ResponseHeaders(200))
    assert exchange.receive(ResponseBody(b"x"))[:2] == (Report(Anomaly.UNEXPECTED_MESSAGE), BodyReply(Side.RESPONSE))


def test_http1_engines_send_no_trailers_so_the_end_of_the_stream_teaches():
    exchange = routed()
    exchange.receive(ResponseHeaders(200, served="10.0.0.2:8000"))
    assert exchange.receive(StreamEnded()) == (
        Finish(success=True, learned_on=LearnedOn.STREAM_END, status=200, served="10.0.0.2:8000"),
    )


def test_response_trailers_teach():
    exchange = routed()
    exchange.receive(ResponseHeaders(200, served="a:1"))
    assert exchange.receive(ResponseTrailers(served="b:1")) == (
        TrailersReply(Side.RESPONSE),
        Finish(success=True, learned_on=LearnedOn.RESPONSE_TRAILERS, status=200, served="b:1"),
    )
    assert exchange.receive(StreamEnded()) == ()


def test_a_response_without_body_ends_with_its_headers():
    exchange = routed()
    assert exchange.receive(ResponseHeaders(204, end_of_stream=True)) == (
        HeadersReply(Side.RESPONSE),
        Answered(204),
        Finish(success=True, learned_on=LearnedOn.RESPONSE_BODY, status=204, served=None),
    )


def test_a_routed_request_tells_once_that_it_is_answered_and_that_its_body_began():
    exchange = routed(response=DUPLEX)
    assert exchange.receive(ResponseHeaders(103)) == (HeadersReply(Side.RESPONSE),)
    headers = {"content-type": b"text/event-stream"}
    answered = exchange.receive(ResponseHeaders(200, headers=headers))
    assert answered == (HeadersReply(Side.RESPONSE), Answered(200, headers, body_follows=True))
    assert exchange.receive(ResponseBody(b"")) == ()
    assert FirstChunk() in exchange.receive(ResponseBody(b"data: 1"))
    assert FirstChunk() not in exchange.receive(ResponseBody(b"data: 2"))


def test_what_envoy_answers_itself_is_no_answer_of_an_endpoint():
    exchange, _ = opened(BUFFERED, BUFFERED)
    exchange.receive(RequestBody(b"{}", end_of_stream=True))
    exchange.receive(ResponseHeaders(504))
    assert exchange.decided(Routed(POD))[-1].success is False
    assert exchange.receive(ResponseBody(b"timeout", end_of_stream=True)) == (BodyReply(Side.RESPONSE),)


@pytest.mark.parametrize("mode", [BUFFERED, PARTIAL])
def test_the_response_body_is_asked_for_with_the_headers_because_envoy_hears_it_nowhere_else(mode):
    exchange, effects = opened(mode, NONE, wants_response_body=True)
    assert effects == (request_headers_reply(modes=ProtocolConfig(mode, STREAMED)),)
    exchange.receive(RequestBody(b"{}", end_of_stream=True))
    assert exchange.decided(Routed(POD)) == (BodyReply(Side.REQUEST, destination=POD),)
    exchange.receive(ResponseHeaders(200))
    assert exchange.receive(ResponseBody(b"data: 1")) == (BodyReply(Side.RESPONSE), FirstChunk())


@pytest.mark.parametrize("mode", [NONE, STREAMED])
def test_the_response_body_is_asked_for_with_the_destination_where_headers_decide(mode):
    exchange, _ = opened(mode, NONE, wants_response_body=True)
    asked = ProtocolConfig(mode, STREAMED)
    assert exchange.decided(Routed(POD)) == (request_headers_reply(destination=POD, modes=asked),)


@pytest.mark.parametrize(
    ("mode", "response", "end"),
    [(DUPLEX, NONE, False), (DUPLEX, DUPLEX, False), (BUFFERED, STREAMED, False), (BUFFERED, NONE, True)],
)
def test_the_response_body_is_not_asked_for_in_full_duplex_or_where_it_comes_or_the_request_has_none(
    mode, response, end
):
    exchange, effects = opened(mode, response, end=end, wants_response_body=True)
    if not end:
        effects += exchange.receive(RequestBody(b"{}", end_of_stream=True))
    answers = (*effects, *exchange.decided(Routed(POD)))
    assert all(answer.modes is None for answer in answers if isinstance(answer, HeadersReply))


@pytest.mark.parametrize("status", [None, 101, 199, 300, 404, 500])
def test_only_2xx_is_success(status):
    exchange = routed(response=BUFFERED)
    exchange.receive(ResponseHeaders(status))
    (*_, finish) = exchange.receive(ResponseBody(b"", end_of_stream=True))
    assert not finish.success


def test_an_abort_before_response_headers_is_no_success():
    assert routed().receive(StreamEnded()) == (
        Finish(success=False, learned_on=LearnedOn.STREAM_END, status=None, served=None),
    )


def test_the_first_final_status_counts():
    exchange = routed()
    exchange.receive(ResponseHeaders(503))
    assert exchange.receive(ResponseHeaders(200)) == (
        Report(Anomaly.UNEXPECTED_MESSAGE),
        HeadersReply(Side.RESPONSE),
    )
    (finish,) = exchange.receive(StreamEnded())
    assert not finish.success


# An Envoy that does not say its modes


def test_a_body_before_the_headers_answer_proves_full_duplex():
    exchange = Exchange(ExchangeSettings(mode_grace_seconds=0.5))
    assert exchange.receive(RequestHeaders(HEADERS)) == (Report(Anomaly.MODE_UNKNOWN), Arm(0.5))
    assert exchange.receive(RequestBody(b"ab")) == ()
    (decide,) = exchange.receive(RequestBody(b"", end_of_stream=True))
    assert decide == Decide(HEADERS, b"ab", BodyState.COMPLETE, DUPLEX, None)
    assert exchange.receive(TimerFired()) == ()
    assert exchange.decided(Routed(POD))[1] == StreamedBody(Side.REQUEST, b"ab", end_of_stream=True)
    exchange.receive(ResponseHeaders(200))
    assert exchange.receive(ResponseBody(b"x"))[0] == StreamedBody(Side.RESPONSE, b"x", end_of_stream=False)


@pytest.mark.parametrize(("end", "state"), [(True, BodyState.COMPLETE), (False, BodyState.TRUNCATED)])
def test_silence_means_that_envoy_waits_for_the_headers_answer(end, state):
    exchange = Exchange()
    exchange.receive(RequestHeaders(HEADERS))
    assert exchange.receive(TimerFired()) == (request_headers_reply(),)
    assert exchange.receive(TimerFired()) == ()
    assert exchange.receive(RequestBody(b"ab", end_of_stream=end)) == (Decide(HEADERS, b"ab", state, BUFFERED, None),)
    assert exchange.decided(Routed(POD)) == (BodyReply(Side.REQUEST, destination=POD),)
    exchange.receive(ResponseHeaders(200))
    assert exchange.receive(ResponseBody(b"x"))[0] == BodyReply(Side.RESPONSE)


def test_the_configured_mode_needs_no_evidence():
    exchange = Exchange(ExchangeSettings(assumed_request_body=DUPLEX))
    assert exchange.receive(RequestHeaders(HEADERS)) == ()
    exchange = Exchange(ExchangeSettings(assumed_request_body=BUFFERED))
    assert exchange.receive(RequestHeaders(HEADERS)) == (request_headers_reply(),)


def test_what_envoy_says_beats_what_is_configured():
    _, effects = opened(BUFFERED, assumed_request_body=DUPLEX)
    assert effects == (request_headers_reply(),)


# Request headers that never come (request_header_mode: SKIP)


def test_a_buffered_body_without_headers_still_gets_a_pick():
    exchange = Exchange()
    report, decide = exchange.receive(
        RequestBody(b"{}", end_of_stream=True, protocol=ProtocolConfig(BUFFERED, NONE)),
    )
    assert report == Report(Anomaly.UNEXPECTED_MESSAGE)
    assert decide == Decide({}, b"{}", BodyState.COMPLETE, BUFFERED, None)
    assert exchange.decided(Routed(POD)) == (BodyReply(Side.REQUEST, destination=POD),)


def test_a_duplex_body_without_headers_passes_because_no_answer_could_carry_a_pick():
    exchange = Exchange()
    assert exchange.receive(RequestBody(b"x", end_of_stream=True, protocol=ProtocolConfig(DUPLEX, NONE))) == (
        Report(Anomaly.UNEXPECTED_MESSAGE),
        StreamedBody(Side.REQUEST, b"x", end_of_stream=True),
    )


def test_repeated_request_headers_are_answered_unless_their_answer_is_still_due():
    exchange, _ = opened(DUPLEX)
    assert exchange.receive(RequestHeaders(HEADERS)) == (Report(Anomaly.UNEXPECTED_MESSAGE),)
    exchange, _ = opened(NONE)
    exchange.decided(Routed(POD))
    assert exchange.receive(RequestHeaders(FORGED)) == (
        Report(Anomaly.UNEXPECTED_MESSAGE),
        request_headers_reply(remove_headers=("x-prefiller-host-port",)),
    )


@pytest.mark.parametrize("mode", list(BodyMode))
def test_a_tunnel_has_no_end_that_could_be_waited_for(mode):
    exchange, effects = opened(mode, headers={":method": b"CONNECT", ":authority": b"10.0.0.1:80"})
    assert effects == (Immediate(405, b"", details="picker_no_tunnel"),)
    assert exchange.receive(StreamEnded()) == ()
