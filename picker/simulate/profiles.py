"""What is compared: schedulers by name, each with how fresh its view of engines is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from picker.core.admission.settings import AdmissionSettings
from picker.core.plugins.args import NoArgs
from picker.core.plugins.kvcache_args import IndexMode, KvCacheArgs
from picker.core.plugins.kvcache_aware import KvCacheProducer
from picker.core.plugins.prefix_cache import PrefixCacheProducer
from picker.core.plugins.prefix_cache_args import WHOLE_PROMPT
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.random_score import RandomScorer
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.plugins.token_cost import TokenCostArgs, TokenCostScorer
from picker.core.scheduling.api import Producer, Scorer
from picker.core.scheduling.scheduler import Scheduler
from picker.simulate.policies import Product, RoundRobin


class Profile(Struct, frozen=True):
    """A way to choose endpoints. `build(block_size)` makes a scheduler that knows nothing yet."""

    name: str
    summary: str
    build: Callable[[int], Scheduler]
    scrape_seconds: float = 0.2
    """Between two readings of engines' metrics."""
    event_lag: float = 0.05
    """From the end of an engine's step to its KV events in the index, in seconds; for schedulers that use them."""
    admission: AdmissionSettings = AdmissionSettings()
    """When the engines are saturated, so that sheddable requests are refused. Nobody waits in front of them."""


def configured(
    name: str,
    summary: str,
    spec: SchedulerSpec,
    scrape_seconds: float = 0.2,
    admission: AdmissionSettings = AdmissionSettings(),  # noqa: B008  frozen
) -> Profile:
    """A profile with the scheduler of a configuration.

    Where it asks for `kvcache-aware`, the index follows the simulated engines' own KV events, as in `direct` mode.
    """

    def build(block_size: int) -> Scheduler:
        args: dict[str, Struct] = dict(spec.args)
        for plugin, held in args.items():
            if isinstance(held, KvCacheArgs):
                args[plugin] = msgspec.structs.replace(held, index_mode=IndexMode.DIRECT, block_size_to_hash=block_size)
        return build_scheduler(msgspec.structs.replace(spec, args=args), None, lambda *_: None)[0]

    return Profile(name, summary, build, scrape_seconds, admission=admission)


def _named(name: ProfileName, summary: str, scrape_seconds: float = 0.2) -> Profile:
    profile = PROFILES[name]
    spec = SchedulerSpec(profile.filters, profile.scorers, profile.args, profile.producers)
    return configured(str(name), summary, spec, scrape_seconds)


def _prefix_cache() -> Producer:
    return PrefixCacheProducer(WHOLE_PROMPT, lambda *_: None)


def _by_work(name: str, summary: str, make: Callable[[], Scorer]) -> Profile:
    """A policy that goes by what the picker itself sent where, as `token-cost` does."""
    return Profile(name, summary, lambda _: Scheduler((), (_prefix_cache(),), ((make(), 1.0),), counts_work=True))


def _exact(block_size: int) -> Scheduler:
    producer = KvCacheProducer(KvCacheArgs(index_mode=IndexMode.DIRECT, block_size_to_hash=block_size))
    return Scheduler((), (producer,), ((TokenCostScorer(TokenCostArgs()), 1.0),), counts_work=True)


_ALL = (
    _named(ProfileName.TOKEN_COST, "the default: tokens of prefill that a request costs, by what was sent where"),
    Profile("token-cost-events", "the same, by engines' KV events", _exact),
    _named(ProfileName.KTHENA, "what Kthena's router does by default", 1.0),
    _named(ProfileName.LLM_D, "what llm-d's endpoint picker does by default", 0.05),
    _named(ProfileName.LLM_D_GUIDE, "what llm-d's guides configure", 0.05),
    _by_work("lmetric", "tokens that a prompt lacks, times requests", lambda: Product(queued=False)),
    _by_work("lmetric-queued", "tokens that a prompt lacks or that wait, times requests", lambda: Product(queued=True)),
    Profile("least-request", "fewest in flight", lambda _: Scheduler((), (), ())),
    Profile("round-robin", "one after the other", lambda _: Scheduler((), (), ((RoundRobin(), 1.0),))),
    Profile("random", "by chance", lambda _: Scheduler((), (), ((RandomScorer(NoArgs()), 1.0),))),
)
BUILT_IN = {profile.name: profile for profile in _ALL}
"""Profiles by name."""
DEFAULT = (*map(str, ProfileName), "least-request", "round-robin")
"""Those that are compared where none are named."""
