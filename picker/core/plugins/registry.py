"""Configuration names of plugins, and how a scheduler is built from them.

A new plugin is one file and one line in `PLUGINS`; configuration, checks and the reference documentation follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from picker.core.plugins.active_request import ActiveRequestArgs, ActiveRequestScorer
from picker.core.plugins.args import NoArgs
from picker.core.plugins.endpoint_health import EndpointHealthFilter
from picker.core.plugins.gpu_usage import GpuUsageScorer
from picker.core.plugins.kv_cache_utilization import KvCacheUtilizationScorer
from picker.core.plugins.kvcache_args import KvCacheArgs
from picker.core.plugins.kvcache_aware import KvCacheProducer
from picker.core.plugins.least_latency import LeastLatencyArgs, LeastLatencyScorer
from picker.core.plugins.least_request import LeastRequestFilter, LeastRequestScorer
from picker.core.plugins.least_request_args import LeastRequestArgs
from picker.core.plugins.load_aware import LoadAwareArgs, LoadAwareScorer
from picker.core.plugins.lora_affinity import LoraAffinityFilter, LoraAffinityScorer
from picker.core.plugins.no_hit_lru import NoHitLruArgs, NoHitLruScorer
from picker.core.plugins.prefix_cache import PrefixCacheProducer, PrefixScorer
from picker.core.plugins.prefix_cache_affinity import PrefixCacheAffinityArgs, PrefixCacheAffinityFilter
from picker.core.plugins.prefix_cache_args import PrefixCacheArgs
from picker.core.plugins.prefix_cache_scorer import NAME as PREFIX_CACHE_SCORER
from picker.core.plugins.prefix_cache_scorer import PrefixCacheScorer, PrefixCacheScorerArgs
from picker.core.plugins.queue import QueueScorer
from picker.core.plugins.random_score import RandomScorer
from picker.core.plugins.session_prefix_cache import NAME as SESSION_PREFIX_CACHE
from picker.core.plugins.session_prefix_cache import SessionPrefixCacheArgs, SessionPrefixCacheProducer
from picker.core.plugins.token_cost import NAME as TOKEN_COST
from picker.core.plugins.token_cost import TokenCostArgs, TokenCostScorer
from picker.core.plugins.token_load import TokenLoadArgs, TokenLoadScorer
from picker.core.scheduling.api import Filter, MatchFilter, Producer, Scorer
from picker.core.scheduling.disaggregation import DisaggregationSettings, PrefillDecode
from picker.core.scheduling.scheduler import Scheduler

OnEvict = Callable[[str, int], None]


class Plugin(Struct, frozen=True):
    """What stands behind a configuration name: any of a filter, a scorer and a producer, with common arguments."""

    args: type[Struct] = NoArgs
    filter: Callable[[Any], Filter | MatchFilter] | None = None
    scorer: Callable[[Any], Scorer] | None = None
    producer: Callable[[Any, OnEvict], Producer] | None = None
    counts_work: bool = False
    """Whether it goes by what the prompt means to endpoints, `Candidates.work`, or the match of who knows most."""


PLUGINS: Mapping[str, Plugin] = {
    "least-request": Plugin(LeastRequestArgs, filter=LeastRequestFilter, scorer=LeastRequestScorer),
    "least-latency": Plugin(LeastLatencyArgs, scorer=LeastLatencyScorer),
    "gpu-usage": Plugin(scorer=GpuUsageScorer),
    "random": Plugin(scorer=RandomScorer),
    "lora-affinity": Plugin(filter=LoraAffinityFilter, scorer=LoraAffinityScorer),
    "prefix-cache": Plugin(
        PrefixCacheArgs,
        scorer=lambda _: PrefixScorer("prefix-cache", "prefix-cache"),
        producer=PrefixCacheProducer,
    ),
    TOKEN_COST: Plugin(TokenCostArgs, scorer=TokenCostScorer, counts_work=True),
    "queue": Plugin(scorer=QueueScorer),
    "kv-cache-utilization": Plugin(scorer=KvCacheUtilizationScorer),
    "active-request": Plugin(ActiveRequestArgs, scorer=ActiveRequestScorer),
    "token-load": Plugin(TokenLoadArgs, scorer=TokenLoadScorer, counts_work=True),
    "load-aware": Plugin(LoadAwareArgs, scorer=LoadAwareScorer),
    "no-hit-lru": Plugin(NoHitLruArgs, scorer=NoHitLruScorer, counts_work=True),
    "prefix-cache-affinity-filter": Plugin(PrefixCacheAffinityArgs, filter=PrefixCacheAffinityFilter, counts_work=True),
    "endpoint-health": Plugin(filter=EndpointHealthFilter),
    "kvcache-aware": Plugin(
        KvCacheArgs,
        scorer=lambda _: PrefixScorer("kvcache-aware", "kvcache-aware"),
        producer=KvCacheProducer,
    ),
    SESSION_PREFIX_CACHE: Plugin(SessionPrefixCacheArgs, producer=SessionPrefixCacheProducer),
    PREFIX_CACHE_SCORER: Plugin(PrefixCacheScorerArgs, scorer=PrefixCacheScorer),
}


_BEST_FIRST = ("kvcache-aware", SESSION_PREFIX_CACHE, "prefix-cache")
"""Producers, from the one that knows most to the one that knows least."""


class SchedulerSpec(Struct, frozen=True):
    """A checked scheduler configuration: names are known, weights positive, arguments of the right type."""

    filters: tuple[str, ...]
    scorers: tuple[tuple[str, float], ...]
    args: Mapping[str, Struct] = {}
    producers: tuple[str, ...] = ()
    """Producers that are wanted although no scorer is bound to them."""
    disaggregation: DisaggregationSettings = DisaggregationSettings()

    @property
    def plugins(self) -> frozenset[str]:
        """All plugins in force."""
        return frozenset((*self.filters, *(name for name, _ in self.scorers), *self.producers))


def build_scheduler(spec: SchedulerSpec, previous: Scheduler | None, on_evict: OnEvict) -> tuple[Scheduler, list[str]]:
    """Build a scheduler, taking over from `previous` what its producers know.

    Returns it with one sentence for each thing that could not be taken over. `on_evict(model, entries)` is told
    what a producer drops because it is full.
    """
    notes: list[str] = []
    old = {producer.name: producer for producer in previous.producers} if previous else {}

    def args(name: str) -> Struct:
        return spec.args.get(name) or PLUGINS[name].args()

    filters = [make(args(name)) for name in spec.filters if (make := PLUGINS[name].filter)]
    scorers = [(rate(args(name)), weight) for name, weight in spec.scorers if (rate := PLUGINS[name].scorer)]
    bound = {scorer.producer for scorer, _ in scorers} - {None}
    producers: list[Producer] = []
    for name in (name for name in _BEST_FIRST if name in bound or name in spec.producers):
        make_producer = PLUGINS[name].producer
        if make_producer is None:
            continue
        if name in old:
            producers.append(old[name])
            if not old[name].reconfigure(args(name)):
                notes.append(f"{name}: the index starts empty, because of its new arguments")
        else:
            producers.append(make_producer(args(name), on_evict))
    counts = any(PLUGINS[name].counts_work for name in spec.plugins)
    apart = PrefillDecode(spec.disaggregation)
    return Scheduler(filters, producers, scorers, counts_work=counts, disaggregation=apart), notes
