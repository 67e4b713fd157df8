"""One picker's view of the others: their requests on the way count here, and what they learn is learnt here.

Batches carry numbers. One that is missing means that picks were lost: the others are then asked for what they have on its
way, and until they have answered their further batches wait. A picker that says nothing for a second is gone, and its
requests with it. Time is a parameter; messages go out through `flush`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from enum import StrEnum

from picker.core.director import Director
from picker.core.scheduling.api import Producer
from picker.core.sharing.messages import (
    Ask,
    Batch,
    Ended,
    Known,
    Leaving,
    Message,
    OnItsWay,
    Picked,
    Prefilled,
    decode,
    encode,
    sent_by,
)
from picker.core.sharing.peers import Peer, RemotePick
from picker.core.sharing.telling import ALIVE_SECONDS, Telling

GONE_SECONDS = 0.9
"""A picker that is silent for so long is gone: within a second, since `expire` is not called all the time."""
ASK_AGAIN_SECONDS = 1.0
MOST_HELD = 1_000
"""Batches of another picker that wait for its answer."""
MOST_PICKERS = 64
MOST_PICKS = 200_000
"""Requests of one other picker."""


class Heard(StrEnum):
    """What came of a message; the label of a counter."""

    TAKEN = "taken"
    OWN = "own"
    NOT_FOR_US = "not_for_us"
    HELD = "held"
    REPEATED = "repeated"
    MALFORMED = "malformed"
    TOO_MANY = "too_many"


class Replicas(Telling):
    """What is told to others, and what is heard from them."""

    def __init__(self, director: Director, name: str) -> None:
        super().__init__(name)
        self._encoded_name = encode(name)
        self.heard: Counter[Heard] = Counter()
        self.gaps = 0
        self._director = director
        self._peers: dict[str, Peer] = {}
        self._asks: deque[Ask] = deque()
        self._asked = False
        """Whether somebody waits for what we have on its way."""
        self._known: dict[str, Iterator[Known]] = {}
        """What is left to tell of prompts, by who asked."""
        self._warm = False
        self._silent: dict[str, bool] = {}
        """Pickers that fell silent, the last ones: what they learn of prompts meanwhile is not heard here."""

    @property
    def peers(self) -> int:
        return len(self._peers)

    @property
    def settled(self) -> bool:
        """Whether no other picker owes us an answer, or what it knows of prompts."""
        return all(peer.asked_at is None and not peer.warm for peer in self._peers.values())

    @property
    def remote_requests(self) -> int:
        """Requests of others that count here."""
        return sum(map(len, (peer.picks for peer in self._peers.values())))

    # What goes out

    @property
    def pending(self) -> bool:
        """Whether there is something to tell, but for being alive."""
        return bool(self._news or self._events or self._asked or self._asks or self._known)

    def flush(self, now: float) -> list[bytes]:
        """The messages that are due."""
        out = self._batches(now)
        if self._asked:
            # Right after the batch that it is as of: the next one has to come later, or everybody sees a gap.
            self._asked = False
            out.append(self._on_its_way())
        while self._asks:
            out.append(encode(self._asks.popleft()))
        if self._known:
            # Slowly: what is known of prompts can be many megabytes, and what happens now comes first.
            to, pieces = next(iter(self._known.items()))
            known = next(pieces, None)
            if known is None or not known.producer:
                # At once: who misses a piece asks again when the last one comes.
                del self._known[to]
            if known is not None:
                out.append(encode(known))
        if not out and now - self._told_at >= ALIVE_SECONDS:
            out.append(self._batch((), now))
        return out

    def leave(self) -> bytes:
        """The last message."""
        return encode(Leaving(self.name))

    def expire(self, now: float) -> None:
        """Drop pickers that fell silent, and ask again those that owe an answer. To be called often."""
        for name, peer in list(self._peers.items()):
            if now - peer.heard_at > GONE_SECONDS:
                self._drop(name, now)
                self._silent[name] = True
                if len(self._silent) > MOST_PICKERS:
                    del self._silent[next(iter(self._silent))]
            elif peer.asked_at is not None:
                if now - peer.asked_at > ASK_AGAIN_SECONDS:
                    self._ask(name, peer, now)
            elif peer.warm and now - peer.warmed_at > ASK_AGAIN_SECONDS:
                self._ask(name, peer, now)

    # What comes in

    def receive(self, data: bytes, now: float) -> Heard:
        """Take in a message of whatever origin. Never raises."""
        heard = Heard.OWN if sent_by(data, self._encoded_name) else self._read(data, now)
        self.heard[heard] += 1
        return heard

    def _read(self, data: bytes, now: float) -> Heard:
        try:
            message = decode(data)
        except ValueError:
            return Heard.MALFORMED
        return self._take(message, now)

    def _take(self, message: Message, now: float) -> Heard:
        if isinstance(message, Batch):
            return self._take_batch(message, now)
        if isinstance(message, Leaving):
            self._drop(message.sender, now)
            return Heard.TAKEN
        if isinstance(message, OnItsWay):
            return self._take_picks(message, now)
        if message.to != self.name:
            return Heard.NOT_FOR_US
        if isinstance(message, Ask):
            self._answer(message)
        else:
            self._learn(message, now)
        return Heard.TAKEN

    def _take_batch(self, batch: Batch, now: float) -> Heard:
        peer = self._peers.get(batch.sender)
        if peer is None:
            if len(self._peers) >= MOST_PICKERS:
                return Heard.TOO_MANY
            peer = self._peers[batch.sender] = Peer(batch.sequence - 1, now)
            silent = self._silent.pop(batch.sender, False)
            if batch.sequence > 1:
                # It was there before us, or we were away: the first that we meet tells what it knows. If it was away
                # itself, that is more than the others can tell.
                peer.warm, self._warm = silent or not self._warm, True
                self._ask(batch.sender, peer, now)
        peer.heard_at = now
        if peer.asked_at is not None:
            if len(peer.held) >= MOST_HELD:
                peer.held.clear()
            peer.held.append(batch)
            return Heard.HELD
        if batch.sequence <= peer.sequence:
            return Heard.REPEATED
        if batch.sequence > peer.sequence + 1:
            self.gaps += 1
            peer.warm = True
            peer.held.append(batch)
            self._ask(batch.sender, peer, now)
            return Heard.HELD
        self._apply(peer, batch, now)
        return Heard.TAKEN

    def _apply(self, peer: Peer, batch: Batch, now: float) -> None:
        peer.sequence = batch.sequence
        picks, producers = peer.picks, self._producers()
        for event in batch.events:
            if type(event) is Picked:
                self._add(picks, event, producers, now)
            elif type(event) is Prefilled:
                pick = picks.get(event.number)
                if pick is not None:
                    pick.prefilled(now)
            elif type(event) is Ended:
                pick = picks.pop(event.number, None)
                if pick is not None:
                    pick.end(self._director.table.slot_of(event.served), now, event.told, well=bool(event.served))

    def _add(
        self, picks: dict[int, RemotePick | None], event: Picked, producers: Mapping[str, Producer], now: float
    ) -> None:
        slot = self._director.table.slot_of(event.address)
        if event.number in picks or len(picks) >= MOST_PICKS:
            return
        if slot is None:
            picks[event.number] = None  # an endpoint that we do not know, yet or any more
            return
        learnings = []
        for name, shared in event.shared:
            producer = producers.get(name)
            learning = None if producer is None else producer.adopt(slot, shared, now)
            if learning is not None:
                learnings.append((name, learning))
        picks[event.number] = RemotePick(self._director, slot, event.tokens, learnings, now)

    def _take_picks(self, told: OnItsWay, now: float) -> Heard:
        peer = self._peers.get(told.sender)
        if peer is None or peer.asked_at is None:
            return Heard.NOT_FOR_US
        peer.heard_at = now
        self._forget_picks(peer, now)
        producers = self._producers()
        for pick in told.picks:
            self._add(peer.picks, pick, producers, now)
        peer.sequence, peer.asked_at = told.sequence, None
        held, peer.held = peer.held, deque()
        for batch in held:
            self._take_batch(batch, now)
        return Heard.TAKEN

    def _answer(self, ask: Ask) -> None:
        self._asked = True
        if ask.warm and ask.sender not in self._known and len(self._known) < MOST_PICKERS:
            self._known[ask.sender] = self._all_known(ask.sender)
        self.wake()

    def _all_known(self, to: str) -> Iterator[Known]:
        number = 0
        for number, (name, address, shared) in enumerate(self._exported(), 1):
            yield Known(self.name, to, name, address, shared, number - 1)
        yield Known(self.name, to, number=number)

    def _exported(self) -> Iterator[tuple[str, str, bytes]]:
        """What producers know, by name and address."""
        table = self._director.table
        for name, producer in self._producers().items():
            export = getattr(producer, "export", None)
            if export is None:
                continue
            for slot in table.slots.tolist():
                for shared in export(slot):
                    yield name, table.endpoints[slot].address, shared
            if (export_names := getattr(producer, "export_names", None)) is not None:
                for shared in export_names():
                    yield name, "", shared

    def _learn(self, known: Known, now: float) -> None:
        if (peer := self._peers.get(known.sender)) is not None:
            self._count_piece(peer, known, now)
        if not known.producer:
            return
        producer = self._producers().get(known.producer)
        if not known.address:
            if (adopt_names := getattr(producer, "adopt_names", None)) is not None:
                adopt_names(known.shared)
            return
        slot = self._director.table.slot_of(known.address)
        if producer is not None and slot is not None:
            learning = producer.adopt(slot, known.shared, now)
            if learning is not None:
                learning.confirm(slot)

    def _count_piece(self, peer: Peer, known: Known, now: float) -> None:
        """Notice pieces that are missing. With the last one, all is known, or asked for again."""
        peer.missed = known.number != 0 and (peer.missed or known.number != peer.pieces)
        peer.pieces, peer.warmed_at = known.number + 1, now
        if not known.producer and peer.warm:
            peer.warm, peer.pieces = peer.missed, 0
            if peer.warm:
                self._ask(known.sender, peer, now)

    def _ask(self, name: str, peer: Peer, now: float) -> None:
        peer.asked_at = peer.warmed_at = now
        self._asks.append(Ask(self.name, name, peer.warm))
        self.wake()

    def _drop(self, name: str, now: float) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        self._forget_picks(peer, now)
        if not self._peers:
            self._warm = False
        elif peer.warm:
            # It was about to tell what it knows of prompts: another one is to.
            name, peer = next(iter(self._peers.items()))
            peer.warm = True
            self._ask(name, peer, now)

    @staticmethod
    def _forget_picks(peer: Peer, now: float) -> None:
        picks, peer.picks = peer.picks, {}
        for pick in picks.values():
            if pick is not None:
                pick.end(None, now, well=False)

    def _producers(self) -> dict[str, Producer]:
        return {producer.name: producer for producer in self._director.scheduler.producers}
