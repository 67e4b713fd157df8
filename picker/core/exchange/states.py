"""The states of one ext_proc stream and the transitions between them: the table that `machine` carries out.

Theory of operation
-------------------
Envoy opens one stream for each HTTP request and tells it as messages: request headers, request body, request trailers,
then the same of the response. What it waits for, and in which shape, depends on the *body mode* of each half:

    mode of the request body   what comes                     what Envoy waits for            where the destination goes
    NONE                       headers                        an answer to each message       headers answer
    STREAMED                   headers, then each chunk       an answer to each message       headers answer (body unseen)
    BUFFERED                   headers, then the whole body   an answer to each message       body answer
    BUFFERED_PARTIAL           as BUFFERED, up to a limit     an answer to each message       body answer
    FULL_DUPLEX_STREAMED       headers and chunks at once     one headers answer, then every  headers answer, given when
                                                              byte of the body back           the body is known

So outside full duplex the rule is "one message, one answer": withholding the headers answer until the body came would
wait for ever, as Envoy sends the body after that answer. Inside full duplex an answer per message would be an error.
A body that ends in trailers may end without end_of_stream: in BUFFERED such a message is still the whole body.

The request half walks through the table below; a `Decide` effect leads into DECIDING (answers are owed, in order, and
the first one carries the destination) or DECIDING_DUPLEX (the body is kept, to be flushed after the headers answer),
and `Exchange.decided` leads out. The response half needs no states of its own: each message is answered at once.

A response that overtakes the decision comes from Envoy itself (413, a timeout) or from another filter, never from an
endpoint, for none was told. It makes the request half moot: what is owed is answered plainly, no `Decide` follows, and
a decision still pending ends in `Finish(success=False)` whatever the status. Informational responses (1xx) overtake
nothing.

A response body that Envoy would not send can be asked for, in the answer to the request headers and nowhere else, by
naming all body modes anew. Envoy grants it where it is configured to, and never in full duplex; whether it did shows
when a body comes, so that from then on either is right.

An Envoy too old to state its modes (`protocol` is None) is told apart by evidence when configuration does not say
(`assumed_request_body`): while the headers answer is withheld, only full duplex goes on sending. PROBING waits for that,
for a short time, then takes the mode for BUFFERED. Evidence for the response half does not exist; it is taken to be full
duplex if the request half is, as full duplex is configured for both or not at all by gateways of that age.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from picker.core.exchange.events import (
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamEnded,
    TimerFired,
)


class State(StrEnum):
    """How far the request half has come."""

    START = "start"
    PROBING = "probing"
    """The mode is unknown; the headers answer is withheld for a moment."""
    BUFFERING = "buffering"
    """The headers are answered; Envoy collects the body and sends it whole."""
    COLLECTING = "collecting"
    """Full duplex: nothing is answered, we collect the body."""
    DECIDING = "deciding"
    DECIDING_DUPLEX = "deciding_duplex"
    PASSING = "passing"
    """Not full duplex: whatever comes is answered and passes."""
    ECHOING = "echoing"
    """Full duplex, headers answered: the rest of the body goes back as it comes."""
    SETTLED = "settled"
    """Full duplex: the whole body went back, and no body message gets an answer any more."""
    MOOT = "moot"
    """Full duplex, or perhaps: a response overtook the headers answer, so the request gets no answer any more."""
    SILENT = "silent"
    """The stream ended, or we answered the client ourselves: nothing gets an answer any more."""


_S = State
_Actions = Mapping[type, tuple[str, tuple[State, ...]]]

_END: Final[_Actions] = {StreamEnded: ("end", (_S.SILENT,))}


def _overtaken(*leads_to: State) -> _Actions:
    early = ("overtaken", leads_to)
    return {ResponseHeaders: early, ResponseBody: early, ResponseTrailers: early, **_END}


_ANSWERED: Final[_Actions] = {
    ResponseHeaders: ("response_headers", ()),
    ResponseBody: ("response_body", ()),
    ResponseTrailers: ("response_trailers", ()),
    **_END,
}

# For each state and event: the action, and the states it may lead to besides staying. Events left out do nothing.
TRANSITIONS: Final[Mapping[State, _Actions]] = {
    _S.START: {
        RequestHeaders: ("open", (_S.DECIDING, _S.BUFFERING, _S.COLLECTING, _S.PROBING)),
        RequestBody: ("body_without_headers", (_S.DECIDING, _S.ECHOING, _S.SETTLED, _S.PASSING)),
        RequestTrailers: ("unexpected_trailers", (_S.PASSING,)),
        **_overtaken(_S.PASSING, _S.MOOT),
    },
    _S.PROBING: {
        RequestHeaders: ("headers_while_withheld", ()),
        RequestBody: ("duplex_by_evidence", (_S.COLLECTING, _S.DECIDING_DUPLEX)),
        RequestTrailers: ("duplex_by_evidence", (_S.DECIDING_DUPLEX,)),
        TimerFired: ("buffered_by_silence", (_S.BUFFERING,)),
        **_overtaken(_S.MOOT),
    },
    _S.BUFFERING: {
        RequestHeaders: ("headers_again", ()),
        RequestBody: ("whole_body", (_S.DECIDING,)),
        RequestTrailers: ("trailers_for_body", (_S.DECIDING,)),
        **_overtaken(_S.PASSING),
    },
    _S.COLLECTING: {
        RequestHeaders: ("headers_while_withheld", ()),
        RequestBody: ("collect", (_S.DECIDING_DUPLEX,)),
        RequestTrailers: ("collected_by_trailers", (_S.DECIDING_DUPLEX,)),
        **_overtaken(_S.MOOT),
    },
    _S.DECIDING: {
        RequestHeaders: ("headers_while_withheld", ()),
        RequestBody: ("owe_body", ()),
        RequestTrailers: ("owe_trailers", ()),
        **_overtaken(_S.PASSING, _S.MOOT),
    },
    _S.DECIDING_DUPLEX: {
        RequestHeaders: ("headers_while_withheld", ()),
        RequestBody: ("keep", ()),
        RequestTrailers: ("keep_trailers", ()),
        **_overtaken(_S.MOOT),
    },
    _S.PASSING: {
        RequestHeaders: ("headers_again", ()),
        RequestBody: ("pass_body", ()),
        RequestTrailers: ("pass_trailers", ()),
        **_ANSWERED,
    },
    _S.ECHOING: {
        RequestHeaders: ("headers_again", ()),
        RequestBody: ("echo", (_S.SETTLED,)),
        RequestTrailers: ("echoed_by_trailers", (_S.SETTLED,)),
        **_ANSWERED,
    },
    _S.SETTLED: {
        RequestHeaders: ("headers_again", ()),
        RequestBody: ("settled_body", ()),
        RequestTrailers: ("unexpected_trailers", ()),
        **_ANSWERED,
    },
    _S.MOOT: _ANSWERED,
    _S.SILENT: {},
}

DECIDED: Final[Mapping[State, tuple[State, ...]]] = {
    _S.DECIDING: (_S.PASSING, _S.SETTLED, _S.SILENT),
    _S.DECIDING_DUPLEX: (_S.ECHOING, _S.SETTLED, _S.SILENT),
}
"""Where the outcome of a decision leads to."""
