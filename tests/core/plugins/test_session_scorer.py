"""`prefix-cache-scorer`: the share of the prompt that the named producer says an endpoint holds."""

import json
import random

import msgspec
import numpy as np
import pytest

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.exchange.events import BodyMode
from picker.core.plugins.prefix_cache_scorer import PrefixCacheScorer, PrefixCacheScorerArgs, ProducerName
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.plugins.session_prefix_cache import SessionPrefixCacheArgs
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Candidates, MatchInfo, Request
from picker.core.usage import Usage

PRODUCERS = ["prefix-cache", "kvcache-aware", "session-prefix-cache-producer"]


def scorer(**args: str) -> PrefixCacheScorer:
    return PrefixCacheScorer(msgspec.convert(args, PrefixCacheScorerArgs))


@pytest.mark.parametrize("name", PRODUCERS)
def test_it_is_bound_to_the_producer_that_is_named(name):
    assert scorer(prefixMatchInfoProducerName=name).producer == name


def test_without_a_name_it_is_the_prefix_cache():
    assert scorer().producer == "prefix-cache"


@pytest.mark.parametrize("name", ["", "session", "approx-prefix-cache-producer", None, 5])
def test_other_names_are_refused(name):
    with pytest.raises(msgspec.ValidationError):
        scorer(prefixMatchInfoProducerName=name)


@pytest.mark.parametrize(
    ("matched", "total", "scores"),
    [([0, 24, 32], 32, [0, 75, 100]), ([1, 0, 2], 3, [100 / 3, 0, 200 / 3]), ([0, 0, 0], 7, [0, 0, 0])],
)
def test_scores_are_shares(matched, total, scores):
    table = EndpointTable()
    table.replace(Endpoint(f"p{i}", f"10.0.0.{i + 1}:8000") for i in range(3))
    candidates = Candidates(table, table.slots, table.mask)
    request, rng = Request("id", "/v1/completions", Prompt("m", (b"x",))), random.Random(1)
    info = MatchInfo(np.array(matched), total, "blocks")
    assert scorer().score(request, candidates, info, rng).tolist() == pytest.approx(scores)
    assert scorer().score(request, candidates, None, rng) is None
    assert scorer().score(request, candidates, MatchInfo(np.zeros(3, np.int64), 0, "blocks"), rng) is None


def test_several_producers_are_scored_at_once_each_with_its_weight():
    spec = SchedulerSpec(
        filters=(),
        scorers=(("prefix-cache", 1.0), ("prefix-cache-scorer", 3.0), ("least-request", 1.0)),
        args={
            "prefix-cache-scorer": PrefixCacheScorerArgs(ProducerName.SESSION),
            "session-prefix-cache-producer": SessionPrefixCacheArgs(cache_tokens=5000),
        },
    )
    scheduler, _ = build_scheduler(spec, None, lambda _model, _entries: None)
    assert [producer.name for producer in scheduler.producers] == ["session-prefix-cache-producer", "prefix-cache"]
    table = EndpointTable()
    director = Director(scheduler, table, fallbacks=0, rng=random.Random(1), timer=lambda: 1_000_000_000)
    director.replace_endpoints(Endpoint(f"p{i}", f"10.0.0.{i + 1}:8000") for i in range(4))

    def decide(*messages):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        headers = {":method": b"POST", ":path": b"/v1/chat/completions"}
        return director.decide(Decide(headers, body, BodyState.COMPLETE, BodyMode.BUFFERED, None))

    question, reply = {"role": "user", "content": "q" * 4000}, "r" * 4000
    first = decide(question)
    ticket = director.route(first)
    assert decide(question).slot == first.slot
    done = Finish(success=True, learned_on=LearnedOn.RESPONSE_BODY, status=200, served=None)
    ticket.finish(done, Usage(prompt_tokens=1000, reply=reply.encode()))
    turn = decide(question, {"role": "assistant", "content": reply}, {"role": "user", "content": "?"})
    assert turn.slot == first.slot
    scores = {plugin.name: plugin.scores[turn.order[0]] for plugin in turn.plugins}
    assert 45 <= scores["prefix-cache"] < 50  # the question alone
    assert scores["prefix-cache-scorer"] > 99
    assert turn.totals[turn.order[0]] == pytest.approx(
        scores["prefix-cache"] + 3 * scores["prefix-cache-scorer"] + scores["least-request"]
    )
    again, notes = build_scheduler(spec, scheduler, lambda _model, _entries: None)
    assert (again.producers[0], notes) == (scheduler.producers[0], [])
