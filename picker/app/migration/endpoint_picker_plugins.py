"""The plugins of the endpoint pickers of llm-d and the Gateway API Inference Extension, and what stands for each here.

Names, parameters and defaults: their documentation and sources, autumn 2026. Scores are 0 .. 1 there and 0 .. 100 here,
so that weights keep their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct

from picker.app.migration.mapped import Mapped
from picker.core.strict import Findings, child, suggest


class Role(Enum):
    """What becomes of a plugin."""

    SCORER = "scorer"
    FILTER = "filter"
    PREFIX = "prefix"
    """A scorer of cached prefixes, by whichever producer knows them."""
    DECIDER = "decider"
    """Says which prompts are computed apart from where they are answered."""
    DETECTOR = "detector"
    """Says when an endpoint is saturated."""
    BUILT_IN = "built in"
    """The picker does it without being told."""
    IGNORED = "ignored"
    """What it does is not done here, and requests are served nevertheless."""
    REFUSED = "refused"
    """Without it requests would go where they must not."""


class Parameter(Struct, frozen=True):
    """A parameter and the argument it becomes: `value * scale`. Without `ours` it has no effect here."""

    ours: str = ""
    scale: int = 1


class Theirs(Struct, frozen=True):
    """A plugin of theirs."""

    role: Role
    ours: str = ""
    """The plugin here, for scorers and filters."""
    remark: str = ""
    """What is different; for a refused one what to do instead."""
    parameters: Mapping[str, Parameter] = {}


_BUILT_IN = Theirs(Role.BUILT_IN)
_PARSER = Theirs(Role.BUILT_IN, remark="requests are told apart by their path")
_ROLES = "the label llm-d.ai/role of endpoints decides"
_NO_ENCODING = "encoding is not separated here: keep it in the endpoints that prefill"
_STICKY = "name the header or cookie of sessions in the picker's own sessionSticky"
_MEASURED = "saturation is told by waiting requests, KV usage and queued tokens: `admission`"
_TURNS = "by priority, then flows take turns, then first come, first served"

PLUGINS: Mapping[str, Theirs] = {
    # scorers
    "queue-scorer": Theirs(Role.SCORER, "queue"),
    "kv-cache-utilization-scorer": Theirs(Role.SCORER, "kv-cache-utilization"),
    "running-requests-size-scorer": Theirs(
        Role.SCORER, "active-request", "counts the requests that this picker has in flight, which are never stale"
    ),
    "active-request-scorer": Theirs(
        Role.SCORER,
        "active-request",
        parameters={
            "idleThreshold": Parameter("idleThreshold"),
            "maxBusyScore": Parameter("maxBusyScore"),
            "requestTimeout": Parameter(),
        },
    ),
    "token-load-scorer": Theirs(
        Role.SCORER, "token-load", parameters={"queueThresholdTokens": Parameter("queueThresholdTokens")}
    ),
    "load-aware-scorer": Theirs(Role.SCORER, "load-aware", parameters={"threshold": Parameter("threshold")}),
    "no-hit-lru-scorer": Theirs(
        Role.SCORER,
        "no-hit-lru",
        parameters={"lruSize": Parameter("lruSize"), "prefixPluginName": Parameter(), "prefixPluginType": Parameter()},
    ),
    "lora-affinity-scorer": Theirs(Role.SCORER, "lora-affinity"),
    "prefix-cache-scorer": Theirs(Role.PREFIX),
    "precise-prefix-cache-scorer": Theirs(Role.PREFIX),
    "session-affinity-scorer": Theirs(Role.IGNORED, remark=_STICKY),
    # filters
    "prefix-cache-affinity-filter": Theirs(
        Role.FILTER,
        "prefix-cache-affinity-filter",
        parameters={
            "affinityThreshold": Parameter("affinityThreshold"),
            "explorationProbability": Parameter("explorationProbability"),
            "maxTTFTPenaltyMs": Parameter("maxTTFTPenaltyMs"),
            "peakPrefillThroughput": Parameter("peakPrefillThroughput"),
            "ttftSource": Parameter(),
            "prefixMatchInfoProducerName": Parameter(),
        },
    ),
    **dict.fromkeys(("decode-filter", "prefill-filter"), Theirs(Role.BUILT_IN, remark=_ROLES)),
    "session-affinity-filter": Theirs(Role.IGNORED, remark=_STICKY),
    "header-based-testing-filter": Theirs(Role.IGNORED, remark="no header of a client names an endpoint"),
    **dict.fromkeys(
        ("label-selector-filter", "by-label", "by-label-selector", "endpoint-attribute-filter", "utilization-filter"),
        Theirs(Role.REFUSED, remark="narrow the pool's selector, or endpoints.kubernetes.selector"),
    ),
    **dict.fromkeys(("encode-filter", "always-disagg-multimodal-decider"), Theirs(Role.REFUSED, remark=_NO_ENCODING)),
    # pickers
    "max-score-picker": Theirs(Role.BUILT_IN, remark="the highest sum wins"),
    **dict.fromkeys(
        ("weighted-random-picker", "random-picker"),
        Theirs(Role.IGNORED, remark="the highest sum wins, by chance only among equals"),
    ),
    # profile handlers
    "single-profile-handler": _BUILT_IN,
    "data-parallel-profile-handler": Theirs(Role.BUILT_IN, remark="each port of a pod is an endpoint of its own"),
    **dict.fromkeys(
        ("disagg-profile-handler", "pd-profile-handler", "disagg-headers-handler", "prefill-header-handler"),
        Theirs(Role.BUILT_IN, remark=_ROLES),
    ),
    "prefix-based-pd-decider": Theirs(Role.DECIDER, parameters={"nonCachedTokens": Parameter("minUncachedTokens")}),
    "always-disagg-pd-decider": Theirs(Role.DECIDER, remark="every prompt is computed by an endpoint for prefill"),
    "header-profile-handler": Theirs(Role.REFUSED, remark="no header of a client chooses a profile: keep one"),
    # producers and data sources
    **dict.fromkeys(
        (
            "approx-prefix-cache-producer",
            "precise-prefix-cache-producer",
            "session-prefix-cache-producer",
            "session-id-producer",
            "inflight-load-producer",
            "metrics-data-source",
            "core-metrics-extractor",
            "models-data-source",
            "model-server-protocol-models",
            "models-extractor",
            "endpoint-notification-source",
            "k8s-notification-source",
            "destination-endpoint-served-verifier",
        ),
        _BUILT_IN,
    ),
    **dict.fromkeys(
        ("token-producer", "tokenizer"),
        Theirs(Role.BUILT_IN, remark="engines tokenize; kvcache-aware's modelDirectory would do it here, and faster"),
    ),
    # parsers
    **dict.fromkeys(("openai-parser", "anthropic-parser", "passthrough-parser"), _PARSER),
    **dict.fromkeys(
        ("vllmhttp-parser", "sglanghttp-parser", "vertexai-parser", "vllmgrpc-parser"),
        Theirs(Role.IGNORED, remark="requests of these protocols are routed by load"),
    ),
    # saturation, admission, fairness
    "utilization-detector": Theirs(
        Role.DETECTOR,
        parameters={
            "queueDepthThreshold": Parameter("maxWaitingRequests"),
            "kvCacheUtilThreshold": Parameter("maxKvUsage"),
            "metricsStalenessThreshold": Parameter(),
            "headroom": Parameter(),
        },
    ),
    "concurrency-detector": Theirs(Role.IGNORED, remark=_MEASURED),
    "probabilistic-admitter": Theirs(Role.IGNORED, remark="sheddable requests are refused while the pool is saturated"),
    **dict.fromkeys(
        (
            "global-strict-fairness-policy",
            "round-robin-fairness-policy",
            "fcfs-ordering-policy",
            "static-usage-limit-policy",
        ),
        Theirs(Role.BUILT_IN, remark=_TURNS),
    ),
    **dict.fromkeys(
        ("edf-ordering-policy", "slo-deadline-ordering-policy", "eviction-sheddable-filter"),
        Theirs(Role.IGNORED, remark=_TURNS),
    ),
    **dict.fromkeys(
        ("predicted-latency-producer", "latency-scorer", "latency-slo-admitter", "slo-headroom-tier-filter"),
        Theirs(Role.REFUSED, remark="there is no latency predictor; score by token-cost in the picker's configuration"),
    ),
}
"""Every plugin that is known, by its type."""

APPROXIMATE: Mapping[str, Parameter] = {
    "hashBlockSize": Parameter("blockSizeToHash"),
    "blockSize": Parameter("blockSizeToHash"),
    "blockSizeTokens": Parameter("blockSizeToHash", 4),
    "maxPrefixBlocksToMatch": Parameter("maxBlocksToMatch"),
    "maxPrefixTokensToMatch": Parameter(),
    "lruCapacityPerServer": Parameter("maxHashCacheSize"),
    "autoTune": Parameter("sizeFromEngine"),
    "prefixMatchInfoProducerName": Parameter(),
    "matchLengthWeight": Parameter(),
    "matchLengthScaleTokens": Parameter(),
}
"""Parameters of the approximate prefix cache, which counts four bytes a token."""


def arguments_of(
    known: Mapping[str, Parameter], given: Mapping[str, Any], path: str, findings: Findings
) -> tuple[dict[str, Any], list[Mapped]]:
    """Parameters as arguments here, and those that have none; an unknown one is a problem."""
    arguments: dict[str, Any] = {}
    mapped: list[Mapped] = []
    for key, value in given.items():
        parameter = known.get(key)
        if parameter is None:
            findings.add(child(path, key), "unknown parameter", value, suggest(key, known))
        elif not parameter.ours:
            mapped.append(Mapped(child(path, key), "", "has no counterpart"))
        else:
            arguments[parameter.ours] = value * parameter.scale if type(value) is int else value
    return arguments, mapped
