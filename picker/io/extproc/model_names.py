"""Responses that name the model which a client asked for, where its request went to another."""

from __future__ import annotations

from collections import Counter

import msgspec

from picker.core.exchange.effects import Answered, BodyReply, Effect, HeadersReply, Side, StreamedBody, TrailersReply
from picker.core.exchange.events import BodyMode, ResponseBody
from picker.core.models import ModelRestorer, Rewritten

_LENGTH = ("content-length",)


class RestoredNames:
    """Changes the effects of one stream so that its response says the client's name. `counts` is told what became of it.

    A response that Envoy does not show, or that is compressed, passes as it is.
    """

    def __init__(self, rewritten: Rewritten, counts: Counter[str]) -> None:
        self._restorer = ModelRestorer(rewritten.target, rewritten.name)
        self._counts = counts
        self._active = False
        self._duplex = False

    def _answered(self, answered: Answered, mode: BodyMode | None) -> None:
        encoding = answered.headers.get("content-encoding", b"")
        if mode in (None, BodyMode.NONE):
            self._counts["body_not_seen"] += 1
        elif encoding.strip().lower() not in (b"", b"identity"):
            self._counts["compressed"] += 1
        else:
            self._counts["restored"] += 1
            self._active = True
            self._duplex = mode is BodyMode.FULL_DUPLEX_STREAMED

    def apply(self, effects: tuple[Effect, ...], event: object, mode: BodyMode | None) -> tuple[Effect, ...]:
        """The effects of an event, with the name restored in what goes to the client; `mode` is how bodies come."""
        for effect in effects:
            if isinstance(effect, Answered):
                self._answered(effect, mode)
        if not self._active:
            return effects
        changed: list[Effect] = []
        for effect in effects:
            if isinstance(effect, TrailersReply) and self._duplex and (rest := self._restorer.feed(b"", end=True)):
                changed.append(StreamedBody(Side.RESPONSE, rest, end_of_stream=False))
            changed.append(self._changed(effect, event))
        return tuple(changed)

    def _changed(self, effect: Effect, event: object) -> Effect:
        if isinstance(effect, HeadersReply) and effect.side is Side.RESPONSE:
            return msgspec.structs.replace(effect, remove_headers=effect.remove_headers + _LENGTH)
        if isinstance(effect, StreamedBody) and effect.side is Side.RESPONSE:
            data = self._restorer.feed(effect.data, end=effect.end_of_stream)
            return StreamedBody(Side.RESPONSE, data, effect.end_of_stream)
        if isinstance(effect, BodyReply) and effect.side is Side.RESPONSE and isinstance(event, ResponseBody):
            return BodyReply(Side.RESPONSE, body=self._restorer.feed(event.data, end=event.end_of_stream))
        return effect
