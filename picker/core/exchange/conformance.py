"""What the public conformance suite asks of a picker beyond the protocol: clients steer, and are told who served.

That undoes the first rule of routing, that clients do not choose, so it belongs in clusters that test gateways. Source:
the headers of the suite of the Gateway API Inference Extension, and what its own picker does with them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from msgspec.structs import replace

from picker.core.exchange.effects import Decide, Effect, HeadersReply, Side
from picker.core.exchange.events import Event, ResponseHeaders
from picker.core.exchange.machine import Exchange
from picker.core.exchange.outcomes import Refused, Routed
from picker.core.exchange.response import Effects
from picker.core.exchange.settings import DEFAULTS, ExchangeSettings

SELECTION: Final = "test-epp-endpoint-selection"
"""Request header: the endpoints to choose from, as "ip" or "ip:port", separated by commas."""
SERVED: Final = "x-conformance-test-served-endpoint"
"""Response header: the endpoint that answered, as Envoy told the picker, or what is wrong with what it told."""
SELECTED: Final = "x-conformance-test-selected-endpoint"
"""Response header: the endpoint that was picked; not there when none was."""
POOL: Final = "x-conformance-test-epp-pool"
"""Response header: the InferencePool of the picker, as "namespace/name"; not there when it has none."""

NOT_SERVED: Final = b"fail: missing destination endpoint served metadata"


class ConformanceExchange(Exchange):
    """An exchange that chooses from what the client names, and reports to the client.

    `pool` is the "namespace/name" to report. What the client names never widens a subset hint: where both are there,
    only what is in both is chosen from.
    """

    __slots__ = ("_pool", "_selected")

    def __init__(self, settings: ExchangeSettings = DEFAULTS, pool: str = "") -> None:
        super().__init__(settings)
        self._pool = pool
        self._selected = ""

    def receive(self, event: Event) -> Effects:
        """Take in one event."""
        effects = super().receive(event)
        served = event.served if type(event) is ResponseHeaders else None
        return tuple(self._adapted(effect, served) for effect in effects)

    def decided(self, outcome: Routed | Refused) -> Effects:
        """Take in the outcome of the `Decide` effect, as `Exchange` does."""
        if isinstance(outcome, Routed):
            self._selected = outcome.destination.partition(",")[0]
        return super().decided(outcome)

    def _adapted(self, effect: Effect, served: str | None) -> Effect:
        if isinstance(effect, Decide):
            return _selecting(effect)
        if isinstance(effect, HeadersReply) and effect.side is Side.RESPONSE:
            return replace(effect, set_headers=self._report(served))
        return effect

    def _report(self, served: str | None) -> tuple[tuple[str, bytes], ...]:
        told = ((SELECTED, self._selected), (POOL, self._pool))
        return (
            (SERVED, NOT_SERVED if served is None else served.encode()),
            *((name, value.encode()) for name, value in told if value),
        )


def _selecting(asked: Decide) -> Decide:
    named = asked.headers.get(SELECTION)
    if named is None:
        return asked
    selection = tuple(place for part in named.decode("latin-1").split(",") if (place := part.strip()))
    return replace(asked, subset=selection if asked.subset is None else in_both(selection, asked.subset))


def in_both(one: Collection[str], other: Collection[str]) -> tuple[str, ...]:
    """The places, each "ip" (all its ports) or "ip:port", that both collections name."""
    return (*_within(one, other), *_within(other, one))


def _within(places: Collection[str], allowed: Collection[str]) -> list[str]:
    known = {place.strip("[]") for place in allowed}
    return [place for place in places if place.strip("[]") in known or _host(place) in known]


def _host(place: str) -> str | None:
    """The host of "ip:port"; None of a host alone, of which one of version 6 has colons of its own."""
    host, colon, _ = place.rpartition(":")
    return host.strip("[]") if colon and (host.endswith("]") or ":" not in host) else None
