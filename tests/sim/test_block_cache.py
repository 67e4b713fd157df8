"""The cache against a naive model that keeps whole prefixes in lists, and against its own event stream."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from picker.sim.block_cache import BlockCache, KeyedTokens, key_tokens
from picker.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

SIZE = 2
Prefix = tuple[str, tuple[int, ...]]  # namespace, tokens from the start of the prompt to the end of a block


class NaiveCache:
    """The rules of the pool, written without any index: what each block holds, and one list of free blocks."""

    def __init__(self, blocks: int) -> None:
        self.holds: dict[int, Prefix | None] = dict.fromkeys(range(1, blocks))
        self.since: dict[int, int] = {}
        self.references = dict.fromkeys(range(1, blocks), 0)
        self.free = list(range(1, blocks))
        self.clock = 0

    def longest(self, namespace: str, tokens: tuple[int, ...]) -> list[int]:
        hit: list[int] = []
        for end in range(SIZE, len(tokens), SIZE):  # the last token is never hit
            having = [block for block, prefix in self.holds.items() if prefix == (namespace, tokens[:end])]
            if not having:
                break
            hit.append(min(having, key=self.since.__getitem__))
        return hit

    def take(self, hit: list[int], count: int) -> list[int]:
        for block in hit:
            self.references[block] += 1
            if block in self.free:
                self.free.remove(block)
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.holds[block] = None
            self.references[block] = 1
        return taken

    def put(self, block: int, prefix: Prefix) -> None:
        self.clock += 1
        self.holds[block], self.since[block] = prefix, self.clock

    def give_back(self, table: list[int]) -> None:
        for block in table:
            self.references[block] -= 1
        freed = [block for block in reversed(table) if not self.references[block]]
        self.free = (
            [block for block in freed if self.holds[block] is None]
            + self.free
            + [block for block in freed if self.holds[block] is not None]
        )


class Pool(RuleBasedStateMachine):
    @initialize(blocks=st.integers(2, 9))
    def start(self, blocks: int) -> None:
        self.events: list[KvEvent] = []
        self.published: Counter[int] = Counter()
        self.cache = BlockCache(blocks, SIZE, self.events.append)
        self.naive = NaiveCache(blocks)
        self.prefix_of: dict[int, Prefix] = {}
        self.tables: list[tuple[list[int], KeyedTokens, str, int]] = []  # table, tokens, namespace, stored

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple),
        adapter=st.sampled_from([None, "a"]),
        salt=st.sampled_from([None, "a"]),
    )
    def admit(self, tokens: tuple[int, ...], adapter: str | None, salt: str | None) -> None:
        content = key_tokens(tokens, SIZE, lora_name=adapter, cache_salt=salt)
        namespace = f"{adapter=} {salt=}"
        hit = self.cache.match(content.keys, len(tokens))
        assert hit == self.naive.longest(namespace, tokens)
        missing = -(-len(tokens) // SIZE) - len(hit)
        room = self.cache.free - self.cache.unreferenced(hit)
        assert room == len([block for block in self.naive.free if block not in hit])
        if missing > room:
            with pytest.raises(ValueError, match="are free"):
                self.cache.allocate(self.cache.free + 1)
            return
        self.cache.reference(hit)
        fresh = self.cache.allocate(missing)
        assert fresh == self.naive.take(hit, missing), "reused in another order"
        self.tables.append((hit + fresh, content, namespace, len(hit)))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), count=st.integers(1, 4))
    def compute(self, which: int, count: int) -> None:
        table, content, namespace, stored = self.tables[which % len(self.tables)]
        last = min(stored + count, len(content.keys))
        if last == stored:
            return
        for block in range(stored, last):
            prefix = namespace, tuple(content.tokens[: (block + 1) * SIZE])
            self.prefix_of[content.keys[block]] = prefix
            self.naive.put(table[block], prefix)
        self.cache.store(table, content, stored, last)
        self.tables[which % len(self.tables)] = table, content, namespace, last

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        table, *_ = self.tables.pop(which % len(self.tables))
        self.cache.release(table)
        self.naive.give_back(table)

    @rule()
    def reset(self) -> None:
        done = self.cache.reset()
        assert done == (not self.tables)
        if done:
            self.naive.holds = dict.fromkeys(self.naive.holds)

    @invariant()
    def same_as_the_naive_model(self) -> None:
        holds = Counter(prefix for prefix in self.naive.holds.values() if prefix is not None)
        assert Counter({self.prefix_of[key]: n for key, n in self.cache.copies().items()}) == holds
        assert self.cache.free == len(self.naive.free)
        assert self.cache.used == sum(count > 0 for count in self.naive.references.values()) <= self.cache.usable
        assert min(self.naive.references.values()) >= 0

    @invariant()
    def events_tell_the_content(self) -> None:
        for event in self.events:
            if isinstance(event, BlockStored):
                self.published.update(event.block_hashes)
                assert len(event.token_ids) == SIZE * len(event.block_hashes)
                start = len(self.prefix_of[event.block_hashes[0]][1]) - SIZE
                assert (event.parent_block_hash is None) == (start == 0)
            elif isinstance(event, BlockRemoved):
                self.published.subtract(event.block_hashes)
            else:
                assert event == AllBlocksCleared()
                self.published.clear()
        self.events.clear()
        assert min(self.published.values(), default=0) >= 0
        assert +self.published == Counter(self.cache.copies())


Pool.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


def run(cache: BlockCache, tokens: list[int]) -> int:
    """Serve one prompt; return the tokens it hit."""
    content = key_tokens(tokens, cache.block_size)
    hit = cache.match(content.keys, len(tokens))
    cache.reference(hit)
    table = hit + cache.allocate(-(-len(tokens) // cache.block_size) - len(hit))
    cache.store(table, content, len(hit), len(content.keys))
    cache.release(table)
    return len(hit) * cache.block_size


def test_a_repeated_prompt_of_exactly_k_blocks_hits_one_less_and_stores_the_last_again() -> None:
    # Measured on vLLM 0.32: 96 tokens in blocks of 32 hit 0, then 64, and the third block is stored a second time.
    events: list[KvEvent] = []
    cache = BlockCache(10, 32, events.append)
    assert [run(cache, list(range(96))), run(cache, list(range(96)))] == [0, 64]
    first, second = (event for event in events if isinstance(event, BlockStored))
    assert second.block_hashes == first.block_hashes[2:]
    assert second.parent_block_hash == first.block_hashes[1]
    assert second.token_ids == tuple(range(64, 96))


def test_extra_keys_name_the_adapter_in_every_block_and_the_salt_in_the_first() -> None:
    # Measured on vLLM 0.32 with a LoRA adapter and a salt: [["ad-a", "sss"], ["ad-a"]]; null without both.
    both = key_tokens(range(4), 2, lora_name="ad-a", cache_salt="sss")
    assert [both.extra_keys(0), both.extra_keys(1)] == [("ad-a", "sss"), ("ad-a",)]
    salted = key_tokens(range(4), 2, cache_salt="tenant-1")
    assert [salted.extra_keys(0), salted.extra_keys(1)] == [("tenant-1",), None]


@pytest.mark.parametrize(("blocks", "size", "field"), [(1, 16, "num_gpu_blocks"), (2, 0, "block_size")])
def test_sizes_without_a_usable_block_are_refused(blocks: int, size: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        BlockCache(blocks, size)
