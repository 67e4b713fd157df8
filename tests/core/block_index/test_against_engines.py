"""The index against engines so plain that they can be read: numbered blocks, each with the text it holds.

`Engine` is what a paged cache does, `Knowledge` what can be known from the events that arrived. Both compare whole
prefixes, so they share no hash, no mask and no table with the index.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from picker.core.block_index.chains import KeyChains
from picker.core.block_index.index import BlockIndex
from picker.core.block_index.limits import Limits
from picker.core.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

MODEL = "m"
BLOCK_SIZES = {0: 2, 1: 2, 2: 3, 5: 2}
RANKS = {0: (0,), 1: (0, 1), 2: (0,), 5: (0,)}
PLACES = [(slot, rank) for slot, ranks in RANKS.items() for rank in ranks]
EVERYONE = sum(1 << slot for slot in BLOCK_SIZES)

Space = tuple[str | None, str | None]
"""Adapter and cache salt."""
Content = tuple[Space, tuple[int, ...]]
"""All that a block stands for: its prompt up to its end."""


def contents(space: Space, tokens: tuple[int, ...], size: int) -> list[Content]:
    return [(space, tokens[:end]) for end in range(size, len(tokens) + 1, size)]


@dataclass
class Engine:
    """A paged cache of a dozen blocks."""

    size: int
    rng: random.Random
    blocks: dict[int, Content] = field(default_factory=dict)
    names: dict[Content, int] = field(default_factory=dict)

    def name(self, content: Content) -> int:
        return self.names.setdefault(content, self.rng.getrandbits(64))

    def hits(self, space: Space, tokens: tuple[int, ...]) -> int:
        held = set(self.blocks.values())
        wanted = contents(space, tokens, self.size)[: (len(tokens) - 1) // self.size]
        return next((number for number, one in enumerate(wanted) if one not in held), len(wanted))

    def drop(self, block: int) -> BlockRemoved:
        return BlockRemoved((self.name(self.blocks.pop(block)),), "GPU")

    def serve(self, space: Space, tokens: tuple[int, ...], reads: bool, pieces: int) -> list:
        """Compute what is not hit, in so many steps, and evict for it whatever comes."""
        first = self.hits(space, tokens) if reads else 0
        wanted = contents(space, tokens, self.size)
        kept = {self.name(one) for one in wanted[:first]}
        events: list = []
        free = [number for number in range(12) if number not in self.blocks]
        while len(free) < len(wanted) - first:
            evictable = [number for number, held in self.blocks.items() if self.name(held) not in kept]
            block = self.rng.choice(evictable or list(self.blocks))
            events.append(self.drop(block))
            free.append(block)
        bounds = sorted({first, len(wanted), *(self.rng.randint(first, len(wanted)) for _ in range(pieces))})
        for start, end in pairwise(bounds):
            for content in wanted[start:end]:
                self.blocks[free.pop()] = content
            events.append(self.stored(space, tokens, wanted, start, end))
        return events

    def stored(self, space, tokens, wanted, start, end) -> BlockStored:
        adapter, salt = space
        return BlockStored(
            tuple(map(self.name, wanted[start:end])),
            self.name(wanted[start - 1]) if start else None,
            tokens[start * self.size : end * self.size],
            self.size,
            lora_name=adapter,
            extra_keys=tuple(
                tuple(filter(None, (adapter, salt if number == 0 else None))) or None for number in range(start, end)
            ),
        )


@dataclass
class Knowledge:
    """What events said: how many copies of which name, and what names stand for once their parents are known."""

    size: int
    copies: Counter = field(default_factory=Counter)
    said: dict[int, tuple[int | None, Space, tuple[int, ...]]] = field(default_factory=dict)
    held: Counter = field(default_factory=Counter)
    incarnation: object = field(default_factory=object)

    def take(self, events: list) -> None:
        for event in events:
            if isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.copies[name] -= self.copies[name] > 0
                continue
            parent = event.parent
            salt = None
            if parent is None and event.extra_keys[0]:
                salt = ([*event.extra_keys[0], None])[event.lora_name is not None]
            for number, name in enumerate(event.block_hashes):
                tokens = event.token_ids[number * self.size : (number + 1) * self.size]
                self.copies[name] += 1
                self.said[name] = (parent, (event.lora_name, salt), tokens)
                parent = name

    def meaning(self, name: int) -> Content | None:
        parent, space, tokens = self.said[name]
        if parent is None:
            return (space, tokens)
        if parent not in self.said:
            return None
        before = self.meaning(parent)
        return None if before is None else (before[0], before[1] + tokens)

    def blocks(self, space: Space, tokens: tuple[int, ...], held: bool) -> int:
        known = {self.meaning(name) for name, count in self.copies.items() if count}
        if held:
            known |= {content for content, count in self.held.items() if count}
        wanted = contents(space, tokens, self.size)[: (len(tokens) - 1) // self.size]
        return next((number for number, one in enumerate(wanted) if one not in known), len(wanted))


class Fleet(RuleBasedStateMachine):
    """Several engines, ranks, adapters and salts; events lost, engines restarted, endpoints forgotten."""

    holds = Bundle("holds")
    places = st.sampled_from(PLACES)
    spaces = st.tuples(st.sampled_from([None, "a", "b"]), st.sampled_from([None, "a", "s"]))
    prompts = st.lists(st.integers(1, 2), min_size=1, max_size=11).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)
        self.index = BlockIndex(chains=KeyChains(40, page_tokens=4), limits=Limits(tombstones=10_000))
        self.engines = {place: Engine(BLOCK_SIZES[place[0]], self.rng) for place in PLACES}
        self.known: dict[tuple[int, int], Knowledge] = {}
        self.lossless = dict.fromkeys(PLACES, True)
        self.asked: list[tuple[Space, tuple[int, ...]]] = []

    def publish(self, place, events) -> None:
        slot, rank = place
        self.known.setdefault(place, Knowledge(BLOCK_SIZES[slot])).take(events)
        self.index.apply(slot, MODEL, EventBatch(0.0, tuple(events), rank), 0.0)

    def prompt(self, space, tokens, **more):
        return self.index.prompt(MODEL, list(tokens), adapter=space[0], cache_salt=space[1], **more)

    @rule(place=places, space=spaces, tokens=prompts, reads=st.booleans(), pieces=st.integers(0, 3))
    def serve(self, place, space, tokens, reads, pieces):
        events = self.engines[place].serve(space, tokens, reads, pieces)
        self.asked.append((space, tokens))
        self.publish(place, events)

    @rule(place=places, data=st.data())
    def converse(self, place, data):
        """Go on with a prompt that was there before."""
        if self.asked:
            space, tokens = data.draw(st.sampled_from(self.asked))
            more = data.draw(self.prompts)
            self.serve(place, space, (tokens + more)[:23], True, 1)

    @rule(place=places, space=spaces, tokens=prompts, data=st.data())
    def serve_with_stores_lost(self, place, space, tokens, data):
        events = self.engines[place].serve(space, tokens, True, 3)
        kept = [event for event in events if isinstance(event, BlockRemoved) or data.draw(st.booleans())]
        self.lossless[place] &= len(kept) == len(events)
        self.publish(place, kept)

    @rule(place=places, count=st.integers(1, 6))
    def evict(self, place, count):
        engine = self.engines[place]
        gone = self.rng.sample(sorted(engine.blocks), min(count, len(engine.blocks)))
        self.publish(place, [engine.drop(block) for block in gone])

    @rule(place=places)
    def restart(self, place):
        slot, rank = place
        self.engines[place] = Engine(BLOCK_SIZES[slot], self.rng)
        self.lossless[place] = True
        if place in self.known:
            self.known[place] = Knowledge(BLOCK_SIZES[slot])
        self.index.restart(slot, rank)

    @rule(place=places)
    def clear(self, place):
        slot, rank = place
        self.engines[place].blocks.clear()
        self.known[place] = Knowledge(BLOCK_SIZES[slot])
        self.lossless[place] = True
        self.index.apply(slot, MODEL, EventBatch(0.0, (AllBlocksCleared(),), rank), 0.0)

    @rule(slot=st.sampled_from(sorted(BLOCK_SIZES)))
    def forget(self, slot):
        self.index.forget(slot)
        for rank in RANKS[slot]:
            place = (slot, rank)
            self.known.pop(place, None)
            self.engines[place] = Engine(BLOCK_SIZES[slot], self.rng)
            self.lossless[place] = True

    @rule(blocks=st.integers(1, 9))
    def sweep(self, blocks):
        self.index.sweep(blocks)

    @rule(target=holds, slot=st.sampled_from(sorted(BLOCK_SIZES)), space=spaces, tokens=prompts)
    def hold(self, slot, space, tokens):
        parts = []
        for rank in RANKS[slot]:
            known = self.known.get((slot, rank))
            if known is not None and known.said:
                lacking = contents(space, tokens, known.size)[known.blocks(space, tokens, held=False) :]
                known.held.update(lacking)
                parts.append((slot, rank, known.incarnation, lacking))
        return multiple((self.index.hold(slot, self.prompt(space, tokens)), parts))

    @rule(hold=consumes(holds))
    def release(self, hold):
        mine, parts = hold
        self.index.release(mine)
        for slot, rank, incarnation, lacking in parts:
            known = self.known.get((slot, rank))
            if known is not None and known.incarnation is incarnation:
                known.held.subtract(lacking)

    @rule(space=spaces, tokens=prompts)
    def ask(self, space, tokens):
        self.check(space, tokens)

    @invariant()
    def all_that_was_asked_is_predicted(self):
        for space, tokens in self.asked[-6:]:
            self.check(space, tokens)

    def check(self, space, tokens):
        prompt = self.prompt(space, tokens)
        expected: dict[int, list[float]] = {}
        for slot, rank in PLACES:
            known = self.known.get((slot, rank))
            predicted = self.index.predict(prompt, slot, rank).cached_tokens
            size = BLOCK_SIZES[slot]
            assert predicted == (known.blocks(space, tokens, held=False) * size if known else 0)
            truth = self.engines[slot, rank].hits(space, tokens) * size
            if self.lossless[slot, rank]:
                assert predicted == truth
            if known is not None:
                expected.setdefault(slot, []).append(known.blocks(space, tokens, held=True) * size)
        groups: dict[float, int] = {}
        for slot, values in expected.items():
            if mean := sum(values) / len(values):
                groups[mean] = groups.get(mean, 0) | 1 << slot
            least = min(self.index.predict(prompt, slot, rank).cached_tokens for _, rank in self.known_places(slot))
            assert self.index.predict(prompt, slot).cached_tokens == least
        assert self.index.match(prompt, EVERYONE) == sorted(groups.items(), reverse=True)
        assert self.index.match(self.prompt(space, tokens, reads_cache=False), EVERYONE) == []

    def known_places(self, slot):
        return [place for place in self.known if place[0] == slot]

    @invariant()
    def gauges_agree(self):
        blocks = {(one.slot, one.rank): one.blocks for one in self.index.stats()}
        assert blocks == {
            place: sum(count > 0 for count in known.copies.values()) for place, known in self.known.items()
        }

    def teardown(self):
        for slot in BLOCK_SIZES:
            self.index.forget(slot)
        while self.index.sweep(3):
            pass
        assert not any(self.index._planes.values())
        assert not self.index._holds.plane
        assert not self.index._lanes._taken


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
