"""`prefix-cache-scorer`: the share of the prompt that the named producer says an endpoint holds."""

import random

import msgspec
import numpy as np
import pytest

from picker.core.endpoints import Endpoint, EndpointTable
from picker.core.plugins.prefix_cache_scorer import PrefixCacheScorer, PrefixCacheScorerArgs
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Candidates, MatchInfo, Request

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
