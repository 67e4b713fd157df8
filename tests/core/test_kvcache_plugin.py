"""`kvcache-aware` without its sources: scores from what an index, owners or hashes say."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.block_hashes.context import HashContext
from picker.core.block_hashes.kthena import standardized
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.kv_events.events import AllBlocksCleared, BlockStored, EventBatch
from picker.core.kv_index.owners import OwnedPrefix
from picker.core.plugins.kvcache_args import IndexMode, KvCacheArgs, TokenizerService, Way
from picker.core.plugins.kvcache_aware import OWNERS, TOKENS, KvCacheProducer
from picker.core.plugins.prefix_cache import PrefixScorer
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Candidates, Request
from picker.core.strict import Findings
from picker.core.tickets import PrefillSignal
from picker.core.tokens.prompt import MultiModalItem, TokenPrompt
from picker.core.usage import Usage

SIZE = 16
SCORER = PrefixScorer("kvcache-aware", "kvcache-aware")
RNG = random.Random(1)


def tokens(count: int, first: int = 0, **more) -> TokenPrompt:
    return TokenPrompt(array("I", range(first, first + count)), "m", **more)


class Fleet:
    def __init__(self, mode: IndexMode = IndexMode.DIRECT, endpoints: int = 3, **args) -> None:
        self.producer = KvCacheProducer(KvCacheArgs(index_mode=mode, **args))
        self.table = EndpointTable()
        self.table.replace(Endpoint(f"p{n}", f"10.0.0.{n + 1}:80") for n in range(endpoints))

    def store(self, slot: int, count: int, first: int = 0, **more) -> None:
        """Whole blocks of consecutive tokens, as an engine with hashes of its own reports them."""
        blocks = count // SIZE
        names = tuple(hash((slot, first, n)) & (2**64 - 1) for n in range(blocks))
        ids = tuple(range(first, first + blocks * SIZE))
        event = BlockStored(names, None, ids, SIZE, **more)
        self.producer.index.apply(slot, "", EventBatch(0.0, (event,)), 1.0)

    def match(self, *prompts: TokenPrompt, owners=None):
        prepared = {TOKENS: prompts} if prompts else {}
        if owners is not None:
            prepared[OWNERS] = owners
        request = Request("id", "/v1/completions", Prompt("m", (b"x",)), prepared)
        return self.producer.match(request, Candidates(self.table, self.table.slots, self.table.mask), RNG)

    def scores(self, *prompts: TokenPrompt, owners=None):
        match = self.match(*prompts, owners=owners)
        if match is None:
            return None
        found = SCORER.score(None, None, match.info, RNG)
        return None if found is None else found.tolist()


def test_no_tokens_no_scores():
    assert Fleet().scores() is None


def test_without_an_answer_of_redis_there_are_no_scores():
    assert Fleet(IndexMode.REDIS).scores(tokens(100)) is None


def test_a_prompt_of_less_than_a_block_has_no_scores():
    fleet = Fleet()
    fleet.store(0, 16)
    assert fleet.scores(tokens(16)) is None
    assert fleet.scores(tokens(17)) == [100, 0, 0]


def test_scores_are_shares_of_the_blocks_that_can_match():
    fleet = Fleet()
    fleet.store(0, 16 * 29)
    fleet.store(1, 16 * 50)
    # 50 whole blocks and a partial one that never matches. 29 / 50 * 100 is 57.99... as Kthena's floats have it.
    assert fleet.scores(tokens(16 * 50 + 5)) == [57, 100, 0]
    # The block with the last token is always computed: 49 blocks can match.
    assert fleet.scores(tokens(16 * 50)) == [59, 100, 0]


def test_only_blocks_from_the_first_on_count():
    fleet = Fleet()
    fleet.store(0, 64)
    assert fleet.scores(tokens(65, first=16)) == [0, 0, 0]


def test_prompts_of_a_batch_count_together():
    fleet = Fleet()
    fleet.store(0, 160)
    fleet.store(1, 160, first=1000)
    assert fleet.scores(tokens(161), tokens(81, first=1000)) == [66, 33, 0]


@pytest.mark.parametrize(
    "other", [{"lora": "a"}, {"cache_salt": "s"}, {"multimodal": (MultiModalItem("image", 0, 4),)}]
)
def test_what_engines_keep_apart_does_not_match(other):
    fleet = Fleet()
    fleet.store(0, 64)
    assert fleet.scores(tokens(65, **other)) == [0, 0, 0]


def test_an_adapter_matches_its_own_blocks():
    fleet = Fleet()
    fleet.store(2, 64, lora_name="a", extra_keys=(("a",),) * 4)
    assert fleet.scores(tokens(65, lora="a")) == [0, 0, 100]
    assert fleet.scores(tokens(65)) == [0, 0, 0]


def test_a_request_that_reads_no_cache_has_no_scores_but_fills_it():
    fleet = Fleet()
    fleet.store(0, 64)
    match = fleet.match(tokens(65, reads_cache=False))
    assert SCORER.score(None, None, match.info, RNG) is None
    learning = match.picked(0)
    learning.undo()


def test_a_pick_is_visible_until_it_is_over():
    fleet = Fleet()
    fleet.store(0, 16, first=5000)  # its blocks are known to have 16 tokens
    for end in ("confirm", "undo"):
        learning = fleet.match(tokens(65)).picked(0)
        assert fleet.scores(tokens(65)) == [100, 0, 0]
        learning.confirm(1) if end == "confirm" else learning.undo()
        assert fleet.scores(tokens(65)) == [0, 0, 0]
    learning = fleet.match(tokens(65)).picked(0)
    fleet.store(0, 64)
    learning.confirm(0)
    assert fleet.scores(tokens(65)) == [100, 0, 0]


def test_a_pick_of_another_picker_is_visible_until_it_is_over():
    here, there = Fleet(), Fleet()
    for fleet in (here, there):
        fleet.store(0, 64)
        fleet.store(1, 16, first=5000)
    match = there.match(tokens(161))
    told = match.shared(0)
    assert len(told) < 6 * 8 + 8, "6 of 10 blocks are missing"
    for end in ("confirm", "undo"):
        learning = here.producer.adopt(0, told, 1.0)
        assert here.scores(tokens(161)) == [100, 0, 0]
        learning.confirm(0) if end == "confirm" else learning.undo()
        assert here.scores(tokens(161)) == [40, 0, 0]
    assert here.producer.adopt(1, match.shared(1), 1.0) is not None
    assert here.scores(tokens(161)) == [40, 100, 0]
    assert here.producer.adopt(2, told, 1.0) is None, "no events, no size of blocks"
    assert match.shared(2) == b""
    here.producer.forget(0)
    assert here.producer.adopt(0, told, 1.0) is None


def test_several_prompts_are_not_shared_nor_what_is_held():
    fleet = Fleet()
    fleet.store(0, 160)
    assert fleet.match(tokens(161), tokens(81, first=1000)).shared(0) == b""
    assert fleet.match(tokens(161)).shared(0) == b""


@pytest.mark.parametrize(
    "shared",
    [b"", b"\xc1", msgspec.msgpack.encode((SIZE, b"1234567")), msgspec.msgpack.encode((SIZE, b"")),
     msgspec.msgpack.encode((32, b"12345678")), msgspec.msgpack.encode((SIZE, b"12345678" * 20_000)),
     msgspec.msgpack.encode((SIZE, "12345678"))],
)  # fmt: skip
def test_what_another_picker_could_not_have_sent_is_refused(shared):
    fleet = Fleet()
    fleet.store(0, 64)
    assert fleet.producer.adopt(0, shared, 1.0) is None


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=6))
def test_keys_that_are_none_are_taken_back_without_a_trace(lists):
    fleet = Fleet()
    fleet.store(0, 16, first=5000)
    _, packed = msgspec.msgpack.decode(fleet.match(tokens(97)).shared(0))
    real = array("Q", packed)
    learnings = []
    for positions in lists:
        shared = (SIZE, array("Q", [real[position] for position in positions]).tobytes())
        learnings.append(fleet.producer.adopt(0, msgspec.msgpack.encode(shared), 1.0))
    for learning in learnings:
        learning.undo()
    assert fleet.scores(tokens(97)) == [0, 0, 0]


def test_a_forgotten_endpoint_holds_nothing():
    fleet = Fleet()
    fleet.store(0, 64)
    fleet.producer.hashes.store(1, "m", [1], [1.0])
    fleet.producer.forget(0)
    fleet.producer.forget(1)
    assert fleet.scores(tokens(65)) == [0, 0, 0]


def test_a_restart_in_metrics_is_left_to_events():
    fleet = Fleet()
    fleet.store(0, 64)
    fleet.producer.restarted(0)
    assert fleet.scores(tokens(65)) == [100, 0, 0]
    fleet.producer.index.apply(0, "", EventBatch(0.0, (AllBlocksCleared(),)), 2.0)
    assert fleet.scores(tokens(65)) == [0, 0, 0]


def hashes(count: int) -> list[int]:
    return standardized(array("I", range(count)), SIZE, HashContext())


def test_standardized_hashes_of_a_sidecar():
    fleet = Fleet(IndexMode.MEMORY)
    fleet.producer.hashes.store(1, "m", hashes(48), [1.0] * 3)
    assert fleet.scores(tokens(97)) == [0, 50, 0]
    # They cover tokens only, so that what is kept apart must not be looked up.
    assert fleet.scores(tokens(97, cache_salt="s")) == [0, 0, 0]
    assert fleet.scores(tokens(97, lora="a")) == [0, 0, 0]
    fleet.producer.hashes.store(2, "a", hashes(96), [1.0] * 6)
    assert fleet.scores(tokens(97, lora="a")) == [0, 0, 100]
    fleet.producer.restarted(1)
    assert fleet.scores(tokens(97)) == [0, 0, 0]


def test_owners_in_redis():
    fleet = Fleet(IndexMode.REDIS)
    owners = [OwnedPrefix([(6, 0b001), (3, 0b110)], {2: 1.5})]
    assert fleet.scores(tokens(97), owners=owners) == [100, 50, 25]
    assert fleet.scores(tokens(97), owners=[None]) == [0, 0, 0]


@pytest.mark.parametrize("mode", [IndexMode.REDIS, IndexMode.MEMORY])
def test_blocks_after_the_limit_are_ignored(mode):
    fleet = Fleet(mode, max_blocks_to_match=4)
    owners = [OwnedPrefix([(4, 0b001)], {})] if mode is IndexMode.REDIS else None
    fleet.producer.hashes.store(0, "m", hashes(320), [1.0] * 20)
    assert fleet.scores(tokens(321), owners=owners) == [100, 0, 0]


def test_direct_knows_no_limit():
    fleet = Fleet(max_blocks_to_match=4)
    fleet.store(0, 64)
    fleet.store(1, 320)
    assert fleet.scores(tokens(321)) == [20, 100, 0]


def test_a_pick_without_events_is_visible_where_the_block_size_is_told():
    fleet = Fleet(IndexMode.REDIS)
    fleet.producer.index.open(0, "", 1.0, block_size=SIZE)
    learning = fleet.match(tokens(97), owners=[OwnedPrefix([(2, 0b010)], {})]).picked(0)
    assert fleet.scores(tokens(97), owners=[OwnedPrefix([(2, 0b010)], {})]) == [100, 33, 0]
    learning.confirm(0)
    assert fleet.scores(tokens(97), owners=[OwnedPrefix([(2, 0b010)], {})]) == [0, 33, 0]


def test_the_same_arguments_keep_the_index_and_others_do_not():
    spec = SchedulerSpec((), (("kvcache-aware", 1.0),), {"kvcache-aware": KvCacheArgs(index_mode=IndexMode.DIRECT)})
    first, notes = build_scheduler(spec, None, lambda *_: None)
    index = first.producers[0].index
    second, notes = build_scheduler(spec, first, lambda *_: None)
    assert not notes
    assert second.producers[0].index is index
    third, notes = build_scheduler(SchedulerSpec((), spec.scorers, {}), second, lambda *_: None)
    assert notes == ["kvcache-aware: the index starts empty, because of its new arguments"]
    assert third.producers[0].index is not index


@given(held=st.lists(st.integers(0, 40), min_size=3, max_size=3), length=st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_scores_are_kthenas_over_blocks_that_can_match(held, length):
    fleet = Fleet()
    for slot, blocks in enumerate(held):
        fleet.store(slot, blocks * SIZE)
    total = (length - 1) // SIZE
    expected = [int(min(blocks, total) / total * 100) for blocks in held] if total else None
    assert fleet.scores(tokens(length)) == expected


@pytest.mark.parametrize(
    ("args", "ways"),
    [
        (KvCacheArgs(), (Way.ENGINE,)),
        (KvCacheArgs(model_directory="/m"), (Way.LOCAL, Way.ENGINE)),
        (KvCacheArgs(tokenizer_service=TokenizerService(enabled=True)), (Way.SERVICE, Way.ENGINE)),
        (KvCacheArgs(tokenizer_service=TokenizerService(enabled=True, fallback_to_engine=False)), (Way.SERVICE,)),
        (KvCacheArgs(tokenizers=(Way.RENDER, Way.ENGINE)), (Way.RENDER, Way.ENGINE)),
    ],
)
def test_the_ways_to_tokenize(args, ways):
    assert args.ways == ways


def test_arguments_that_do_not_fit_together():
    findings = Findings()
    args = KvCacheArgs(tokenizers=(Way.LOCAL, Way.LOCAL), zmq_port=65_535, zmq_ranks=2)
    args.check("args", findings)
    assert [problem.path for problem in findings.problems] == ["args.tokenizers", "args.modelDirectory", "args.zmqPort"]


class Ticket:
    """What a director would be told of a prefill."""

    def __init__(self) -> None:
        self.done: list[float] = []
        self.signals: list[tuple[PrefillSignal, float]] = []

    def progress(self, tokens: float, now: float) -> None:  # noqa: ARG002
        self.done.append(tokens)

    def prefilled(self, now: float, signal: PrefillSignal) -> None:
        self.signals.append((signal, now))


def test_blocks_that_are_stored_tell_how_far_a_prefill_is():
    fleet = Fleet()
    fleet.store(0, 32)
    ticket = Ticket()
    learning = fleet.match(tokens(165)).picked(0)
    learning.watch(ticket)
    fleet.store(1, 160)  # another engine's
    fleet.store(0, 96)  # chunks repeat what was there
    fleet.store(0, 96)
    assert (ticket.done, ticket.signals) == ([64], [])
    fleet.store(0, 160)
    assert (ticket.done, ticket.signals) == ([64], [(PrefillSignal.KV_EVENTS, 1.0)])
    learning.confirm(0)
    fleet.store(0, 160)
    assert len(ticket.signals) == 1
    assert fleet.producer.index.watches.blocks == 0


def test_a_request_of_several_prompts_is_over_with_the_last_one():
    fleet = Fleet()
    fleet.store(0, 16, first=5000)
    ticket = Ticket()
    learning = fleet.match(tokens(32), tokens(48, first=1000), tokens(8, first=2000)).picked(0)
    learning.watch(ticket)
    fleet.store(0, 48, first=1000)
    assert (ticket.done, ticket.signals) == ([48], [])
    fleet.store(0, 32)
    assert (ticket.done, len(ticket.signals)) == ([48], 1)
    learning.undo()


@pytest.mark.parametrize("end", ["confirm", "undo", "forget"])
def test_nothing_is_told_when_it_is_over(end):
    fleet = Fleet()
    fleet.store(0, 16)
    ticket = Ticket()
    learning = fleet.match(tokens(64)).picked(0)
    learning.watch(ticket)
    fleet.producer.forget(0) if end == "forget" else learning.confirm(0) if end == "confirm" else learning.undo()
    fleet.store(0, 64)
    assert (ticket.done, ticket.signals) == ([], [])


def test_a_cached_prompt_has_nothing_to_wait_for():
    fleet = Fleet()
    fleet.store(0, 64)
    fleet.match(tokens(70)).picked(0).watch(Ticket())
    assert fleet.producer.index.watches.blocks == 0


def compared(fleet: Fleet, learning, cached: int | None, served: int | None = 0) -> dict[str, int]:
    learning.confirm(served, Usage(prompt_tokens=100, cached_tokens=cached))
    return dict(+fleet.producer.agreement.outcomes)


def test_predictions_are_compared_with_what_engines_report():
    fleet = Fleet()
    fleet.store(0, 64)
    pick = lambda count: fleet.match(tokens(count)).picked(0)  # noqa: E731
    assert compared(fleet, pick(65), None) == {}
    assert compared(fleet, pick(65), 64) == {"exact": 1}
    assert compared(fleet, pick(64), 64) == {"exact": 1, "under": 1}
    assert compared(fleet, pick(165), 0) == {"exact": 1, "under": 1, "over": 1}
    # Predicted minus reported: 0, -16 and 64, by the bounds -4096, -512, -64, -1, 0, 64, 512, 4096.
    assert fleet.producer.agreement.errors == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    streak = fleet.producer.agreement.streaks[0]
    assert (streak.requests, streak.error) == (2, 48)
    assert compared(fleet, pick(65), 64)["exact"] == 2
    assert fleet.producer.agreement.streaks == {}


def test_what_cannot_be_compared():
    fleet = Fleet()
    fleet.store(0, 64)
    first, second = (fleet.match(tokens(165)).picked(0) for _ in range(2))
    # The blocks of the first may come in time for the second, or not.
    assert compared(fleet, second, 160) == {"not_comparable": 1}
    assert compared(fleet, first, 64) == {"not_comparable": 1, "exact": 1}
    elsewhere = fleet.match(tokens(165)).picked(0)
    assert compared(fleet, elsewhere, 0, served=1) == {"not_comparable": 2, "exact": 1}
    assert compared(fleet, fleet.match(tokens(65)).picked(0), 0, served=None) == {"not_comparable": 2, "exact": 1}


def test_an_endpoint_that_may_hold_more_is_not_blamed_for_it():
    fleet = Fleet()
    fleet.store(0, 64)
    fleet.producer.index.mark_incomplete(0, 0, 1.0)
    assert compared(fleet, fleet.match(tokens(165)).picked(0), 160) == {"incomplete": 1}
    assert compared(fleet, fleet.match(tokens(165)).picked(0), 0) == {"incomplete": 1, "over": 1}


def test_what_redis_and_hashes_say_is_compared_up_to_their_limit():
    fleet = Fleet(IndexMode.REDIS, max_blocks_to_match=4)
    pick = lambda blocks, **more: fleet.match(tokens(97, **more), owners=[blocks]).picked(0)  # noqa: E731
    assert compared(fleet, pick(OwnedPrefix([(3, 0b011)], {})), 48) == {"exact": 1}
    assert compared(fleet, pick(OwnedPrefix([(3, 0b010)], {})), 48) == {"exact": 1, "under": 1}
    assert compared(fleet, pick(OwnedPrefix([(4, 0b001)], {})), 96)["not_comparable"] == 1
    assert compared(fleet, pick(None, cache_salt="s"), 96)["not_comparable"] == 2
    fleet = Fleet(IndexMode.MEMORY, max_blocks_to_match=4)
    fleet.producer.hashes.store(0, "m", hashes(48), [1.0] * 3)
    assert compared(fleet, fleet.match(tokens(97)).picked(0), 48) == {"exact": 1}
    fleet.producer.hashes.store(0, "m", hashes(97), [1.0] * 6)
    assert compared(fleet, fleet.match(tokens(97)).picked(0), 96) == {"exact": 1, "not_comparable": 1}
