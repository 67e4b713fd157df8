"""Configurations of other routers are used as they are; what is different about them is said."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from picker.app import check
from picker.app.config import ConfigError, Loaded, load
from picker.app.migration.endpoint_picker_plugins import APPROXIMATE, PLUGINS, Role
from picker.core.plugins.registry import PLUGINS as OURS

DATA = Path(__file__).parents[1] / "data/config"
HEADER = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
ENDPOINTS = {"endpoints": {"static": [{"address": "10.0.0.1:8000"}]}}


def translated(document: str) -> Loaded:
    return load(document, ENDPOINTS)


def scorers(loaded: Loaded) -> dict[str, float]:
    return dict(loaded.spec.scorers)


def arguments(loaded: Loaded, name: str) -> dict[str, object]:
    return msgspec.to_builtins(loaded.spec.args[name])


def problems(document: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        translated(document)
    return [str(problem) for problem in caught.value.problems]


# Kthena


KTHENA = {
    "the chart's": (
        (DATA / "kthena.yaml").read_text(),
        ("least-request",),
        {"least-request": 1, "gpu-usage": 1, "least-latency": 1, "prefix-cache": 1},
    ),
    "with kvcache-aware and Redis": (
        """
        scheduler:
          pluginConfig:
          - name: least-request
            args:
              maxWaitingRequests: 10
          - name: kvcache-aware
            args:
              blockSizeToHash: 16
              maxBlocksToMatch: 128
          plugins:
            Filter:
              enabled:
                - least-request
            Score:
              enabled:
                - name: least-request
                  weight: 1
                - name: kvcache-aware
                  weight: 1
        """,
        ("least-request",),
        {"least-request": 1, "kvcache-aware": 1},
    ),
    "with the sections of later versions": (
        """
        scheduler:
          pluginConfig:
          - {name: kvcache-aware, args: {indexMode: memory, runtimePort: 8900, maxBlocksPerPod: 1048576,
             vllmTokenizerPort: 8000, sglangTokenizerPort: 30000, tokenizerService: {enabled: false}}}
          plugins:
            Filter: {enabled: [], disabled: [lora-affinity]}
            Score: {enabled: [{name: least-request, weight: 1}, {name: kvcache-aware, weight: 2}]}
        auth: {issuer: "", audiences: [], jwksUri: ""}
        sessionSticky: {}
        """,
        (),
        {"least-request": 1, "kvcache-aware": 2},
    ),
}


@pytest.mark.parametrize(("document", "filters", "weights"), KTHENA.values(), ids=KTHENA)
def test_a_router_configuration_is_used_as_it_is(document, filters, weights):
    loaded = translated(document)
    assert loaded.spec.filters == filters
    assert scorers(loaded) == weights


def test_the_arguments_of_a_router_configuration_are_obeyed():
    loaded = translated(KTHENA["with the sections of later versions"][0])
    found = arguments(loaded, "kvcache-aware")
    assert (found["indexMode"], found["runtimePort"], found["maxBlocksPerPod"]) == ("memory", 8900, 1 << 20)


def test_authentication_that_would_be_missing_is_refused():
    (problem,) = problems('scheduler: {}\nauth: {issuer: "https://issuer", audiences: [a]}\n')[:1]
    assert problem.startswith('auth.issuer: "https://issuer": would not be obeyed')
    assert "SecurityPolicy" in problem


# llm-d and the Gateway API Inference Extension


DEFAULT = f"""{HEADER}
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
- type: max-score-picker
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: queue-scorer, weight: 2}}
  - {{pluginRef: kv-cache-utilization-scorer, weight: 2}}
  - {{pluginRef: prefix-cache-scorer, weight: 3}}
  - {{pluginRef: max-score-picker}}
"""


def test_the_default_of_the_endpoint_picker_is_our_profile_of_that_name():
    ours = load("scheduler: {profile: llm-d}", ENDPOINTS)
    theirs = translated(DEFAULT)
    assert theirs.spec.filters == ours.spec.filters == ()
    assert scorers(theirs) == scorers(ours) == {"queue": 2, "kv-cache-utilization": 2, "prefix-cache": 3}
    assert theirs.spec.args["prefix-cache"] == ours.spec.args["prefix-cache"]


def test_the_guide_of_the_endpoint_picker_is_our_profile_of_that_name():
    ours = load("scheduler: {profile: llm-d-guide}", ENDPOINTS)
    theirs = translated(f"""{HEADER}
plugins:
- type: approx-prefix-cache-producer
- type: prefix-cache-affinity-filter
- type: token-load-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-affinity-filter
  - pluginRef: token-load-scorer
  - pluginRef: max-score-picker
""")
    assert theirs.spec.filters == ours.spec.filters
    assert theirs.spec.scorers == ours.spec.scorers
    assert theirs.spec.producers == ours.spec.producers
    assert dict(theirs.spec.args) == dict(ours.spec.args)


def test_without_profiles_every_plugin_is_used_with_weight_1():
    loaded = translated(
        f"{HEADER}plugins: [{{type: queue-scorer}}, {{type: load-aware-scorer, parameters: {{threshold: 64}}}}]"
    )
    assert scorers(loaded) == {"queue": 1, "load-aware": 1}
    assert arguments(loaded, "load-aware") == {"threshold": 64}


@pytest.mark.parametrize(
    "version",
    ["inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1alpha1", "llm-d.ai/v1"],
)
def test_every_api_version(version):
    document = DEFAULT.replace("llm-d.ai/v1alpha1", version)
    assert scorers(translated(document)) == scorers(translated(DEFAULT))


def test_plugins_may_have_names():
    loaded = translated(f"""{HEADER}
plugins: [{{type: queue-scorer, name: waiting}}]
schedulingProfiles: [{{name: p, plugins: [{{pluginRef: waiting, weight: 5}}]}}]
""")
    assert scorers(loaded) == {"queue": 5}


PREFIX = {
    "by bytes": ({"hashBlockSize": 5, "maxPrefixBlocksToMatch": 256, "lruCapacityPerServer": 1000}, (5, 256, 1000)),
    "by tokens": ({"blockSizeTokens": 128}, (512, 2048, 31_250)),
    "by too few tokens": ({"blockSizeTokens": 16}, (256, 2048, 31_250)),
    "by tokens in all": ({"blockSizeTokens": 64, "maxPrefixTokensToMatch": 6400}, (256, 100, 31_250)),
}


@pytest.mark.parametrize(("parameters", "expected"), PREFIX.values(), ids=PREFIX)
def test_the_approximate_prefix_cache_covers_as_much_text(parameters, expected):
    """A token is four bytes there, and a block at least 64 of them."""
    plugins = [{"type": "prefix-cache-scorer", "parameters": parameters}, {"type": "queue-scorer"}]
    found = arguments(translated(HEADER + yaml.safe_dump({"plugins": plugins})), "prefix-cache")
    assert (found["blockSizeToHash"], found["maxBlocksToMatch"], found["maxHashCacheSize"]) == expected


def test_parameters_of_a_producer_of_its_own_are_found():
    plugins = [
        {"type": "approx-prefix-cache-producer", "parameters": {"lruCapacityPerServer": 77, "autoTune": False}},
        {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "approx-prefix-cache-producer"}},
        {"type": "queue-scorer"},
    ]
    found = arguments(translated(HEADER + yaml.safe_dump({"plugins": plugins})), "prefix-cache")
    assert (found["maxHashCacheSize"], found["sizeFromEngine"]) == (77, False)


PRECISE = {
    "producer and scorer": [
        {"type": "token-producer", "parameters": {"backend": "vllm", "modelName": "m"}},
        {
            "type": "precise-prefix-cache-producer",
            "parameters": {
                "tokenProcessorConfig": {"blockSizeTokens": 64},
                "kvEventsConfig": {
                    "topicFilter": "kv@",
                    "podDiscoveryConfig": {"socketPort": 6557, "replaySocketPort": 6558},
                },
            },
        },
        {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"}},
    ],
    "all in one": [
        {
            "type": "precise-prefix-cache-scorer",
            "parameters": {
                "tokenProcessorConfig": {"blockSize": 64, "hashSeed": "42"},
                "kvEventsConfig": {
                    "topicFilter": "kv@",
                    "podDiscoveryConfig": {"socketPort": 6557, "replaySocketPort": 6558},
                },
            },
        }
    ],
}


@pytest.mark.parametrize("plugins", PRECISE.values(), ids=PRECISE)
def test_the_precise_prefix_cache_follows_the_engines_events(plugins):
    loaded = translated(HEADER + yaml.safe_dump({"plugins": [*plugins, {"type": "queue-scorer"}]}))
    assert scorers(loaded) == {"kvcache-aware": 1, "queue": 1}
    found = arguments(loaded, "kvcache-aware")
    assert (found["indexMode"], found["zmqPort"], found["zmqReplayPort"], found["topic"]) == (
        "direct",
        6557,
        6558,
        "kv@",
    )


def test_engines_that_connect_to_the_endpoint_picker_are_refused_with_what_to_do():
    (problem,) = problems(f"""{HEADER}
plugins: [{{type: precise-prefix-cache-scorer, parameters: {{kvEventsConfig: {{zmqEndpoint: "tcp://0.0.0.0:5557"}}}}}}]
""")
    assert problem.startswith("plugins[0].parameters.kvEventsConfig.zmqEndpoint: ")
    assert 'publish at "tcp://*:5557"' in problem


DISAGGREGATED = f"""{HEADER}
plugins:
- type: disagg-headers-handler
- type: prefix-cache-scorer
- type: queue-scorer
- type: prefill-filter
- type: decode-filter
- type: max-score-picker
- {{type: prefix-based-pd-decider, parameters: {{nonCachedTokens: 16}}}}
- {{type: disagg-profile-handler, parameters: {{deciders: {{prefill: prefix-based-pd-decider}}}}}}
schedulingProfiles:
- name: prefill
  plugins: [{{pluginRef: prefill-filter}}, {{pluginRef: max-score-picker}}, {{pluginRef: prefix-cache-scorer, weight: 2}},
            {{pluginRef: queue-scorer, weight: 1}}]
- name: decode
  plugins: [{{pluginRef: decode-filter}}, {{pluginRef: max-score-picker}}, {{pluginRef: prefix-cache-scorer, weight: 2}},
            {{pluginRef: queue-scorer, weight: 1}}]
"""


def test_prefill_and_decode_apart():
    loaded = translated(DISAGGREGATED)
    assert scorers(loaded) == {"prefix-cache": 2, "queue": 1}
    assert loaded.spec.disaggregation.min_uncached_tokens == 16
    assert loaded.spec.disaggregation.role_label == "llm-d.ai/role"
    assert loaded.warnings == ()


def test_profiles_that_score_differently_are_said():
    different = DISAGGREGATED.replace("weight: 2", "weight: 7", 1)
    (warning,) = translated(different).warnings
    assert warning.startswith("schedulingProfiles[0]: has no effect: endpoints are chosen as decode says")


def test_more_endpoints_become_fallbacks():
    document = DEFAULT.replace(
        "- type: max-score-picker", "- {type: max-score-picker, parameters: {maxNumOfEndpoints: 4}}"
    )
    assert translated(document).config.exchange.fallbacks == 3


def test_adapters_by_whether_they_are_loaded():
    loaded = translated(f"{HEADER}plugins: [{{type: lora-affinity-scorer}}, {{type: queue-scorer}}]")
    assert loaded.spec.filters == ()
    assert scorers(loaded) == {"lora-affinity": 1, "queue": 1}


# What is different, and what is wrong


def test_a_plugin_that_does_nothing_here_is_a_warning():
    (warning,) = translated(DEFAULT.replace("max-score-picker", "weighted-random-picker")).warnings
    assert warning.startswith("schedulingProfiles[0].plugins[3]: weighted-random-picker has no effect: ")


SATURATION = {
    "by default": ("", {"max_waiting_requests": 5, "max_kv_usage": 0.8}),
    "as the section says": (
        "saturationDetector: {queueDepthThreshold: 7, kvCacheUtilThreshold: 0.9, metricsStalenessThreshold: 200ms}",
        {"max_waiting_requests": 7, "max_kv_usage": 0.9},
    ),
    "and a plugin": (
        "saturationDetector: {pluginRef: utilization-detector}",
        {"max_waiting_requests": 9, "max_kv_usage": 0.8},
    ),
}


@pytest.mark.parametrize(("section", "expected"), SATURATION.values(), ids=SATURATION)
def test_saturation_is_what_it_is_there(section, expected):
    plugin = "- {type: utilization-detector, parameters: {queueDepthThreshold: 9}}\n"
    document = DEFAULT.replace(
        "- type: max-score-picker\n", plugin + "- type: max-score-picker\n", "pluginRef" in section
    )
    admission = translated(f"{document}{section}\n").config.admission
    assert {name: getattr(admission, name) for name in expected} == expected
    assert not admission.queue.enabled


@pytest.mark.parametrize(
    ("sections", "waits", "most"),
    [
        ("featureGates: [flowControl]", 60.0, 1000),
        ("featureGates: [flowControl=true]\nflowControl: {maxRequests: 50, defaultRequestTTL: 1m30s}", 90.0, 50),
    ],
)
def test_requests_wait_where_flow_control_is_on(sections, waits, most):
    queue = translated(f"{DEFAULT}{sections}\n").config.admission.queue
    assert (queue.enabled, queue.max_seconds, queue.max_requests) == (True, waits, most)


def test_sizes_are_those_of_kubernetes():
    document = f"{DEFAULT}featureGates: [flowControl]\nflowControl: {{maxBytes: 64Mi}}\n"
    assert translated(document).config.admission.queue.max_bytes == 64 * 1024 * 1024


def test_sessions_by_their_producer():
    plugins = [
        {"type": "session-prefix-cache-producer"},
        {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "session-prefix-cache-producer"}},
        {"type": "queue-scorer"},
    ]
    loaded = translated(HEADER + yaml.safe_dump({"plugins": plugins}))
    assert scorers(loaded) == {"prefix-cache-scorer": 1, "queue": 1}
    named = arguments(loaded, "prefix-cache-scorer")["prefixMatchInfoProducerName"]
    assert named == "session-prefix-cache-producer"


@pytest.mark.parametrize(
    "section",
    [
        "featureGates: [flowControl=false, haPopulateNonLeaderDatastore=true]",
        "flowControl: {maxBytes: 1000}",
        "dataLayer: {sources: [{pluginRef: metrics-data-source}]}",
        "requestHandler: {parsers: [{pluginRef: openai-parser}]}",
    ],
)
def test_what_is_done_anyway_is_silent(section):
    assert translated(f"{DEFAULT}{section}\n").warnings == ()


@pytest.mark.parametrize(
    ("document", "starts", "has"),
    [
        (
            "plugins: [{type: queue-scoer}]",
            'plugins[0].type: "queue-scoer": is a plugin that is not known here',
            'did you mean "queue-scorer"?',
        ),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: d, plugins: [{pluginRef: queue-scorr}]}]",
            'schedulingProfiles[0].plugins[0].pluginRef: "queue-scorr": is not under plugins',
            'did you mean "queue-scorer"?',
        ),
        (
            "plugins: [{type: load-aware-scorer, parameters: {treshold: 1}}]",
            "plugins[0].parameters.treshold: 1: unknown parameter",
            'did you mean "threshold"?',
        ),
        ("plugins: [{type: by-label-selector}]", "plugins[0].type", "narrow the pool's selector"),
        ("plugins: [{type: encode-filter}]", "plugins[0].type", "encoding is not separated here"),
        ("plugins: [{type: latency-scorer}]", "plugins[0].type", "there is no latency predictor"),
        ("plugins: [{type: queue-scorer}]\nplugin: []", "plugin: []: unknown key", 'did you mean "plugins"?'),
        ("plugins: [{type: queue-scorer}, {type: queue-scorer}]", "plugins[1]", "give it a name of its own"),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: d, plugins: [{pluginRef: queue-scorer, weight: -1}]}]",
            "schedulingProfiles[0].plugins[0].weight: -1.0: must be at least 0",
            "",
        ),
        ("featureGates: [flowControll]", 'featureGates[0]: "flowControll"', 'did you mean "flowControl"?'),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a}, {name: b}]",
            "schedulingProfiles",
            "keep one, or prefill and decode",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_is_near(document, starts, has):
    (problem,) = problems(HEADER + document)
    assert problem.startswith(starts)
    assert has in problem


def test_an_unknown_version_is_refused():
    (problem,) = problems(DEFAULT.replace("llm-d.ai/v1alpha1", "llm-d.ai/v1alpha9"))
    assert problem.startswith('apiVersion: "llm-d.ai/v1alpha9": is not known')


def test_every_plugin_of_the_table_has_a_counterpart_that_there_is():
    for theirs in PLUGINS.values():
        if theirs.role in {Role.SCORER, Role.FILTER}:
            ours = OURS[theirs.ours]
            assert ours.scorer if theirs.role is Role.SCORER else ours.filter
            known = {field.encode_name for field in msgspec.structs.fields(ours.args)}
            assert {parameter.ours for parameter in theirs.parameters.values()} - {""} <= known
        if theirs.role in {Role.IGNORED, Role.REFUSED}:
            assert theirs.remark
    known = {field.encode_name for field in msgspec.structs.fields(OURS["prefix-cache"].args)}
    assert {parameter.ours for parameter in APPROXIMATE.values()} - {""} <= known


@given(
    st.dictionaries(
        st.sampled_from(["plugins", "schedulingProfiles", "featureGates", "dataLayer", "flowControl", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.sampled_from([*PLUGINS, "name", ""]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["type", "name", "parameters", "plugins", "pluginRef", "weight", "kvEventsConfig"]),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=20,
        ),
    )
)
def test_whatever_it_is_is_loaded_or_refused(document):
    with suppress(ConfigError):
        translated(HEADER + yaml.safe_dump(document))


# picker check --explain


def explained(document: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    path = tmp_path / "config.yaml"
    path.write_text(document)
    parser = ArgumentParser()
    check.add_arguments(parser)
    status = check.run(parser.parse_args(["-c", str(path), "--explain"]))
    printed = capsys.readouterr()
    return status, re.sub(r" +", " ", printed.out), printed.err


def test_check_explains_what_became_of_each_plugin(tmp_path, capsys):
    status, out, _ = explained(DISAGGREGATED, tmp_path, capsys)
    assert status == 0
    assert "prefix-cache-scorer, weight 2 │ prefix-cache, weight 2" in out
    assert "scheduler.disaggregation.minUncachedTokens: 16" in out
    assert "decode-filter │ - │ the label llm-d.ai/role of endpoints decides" in out
    assert "queue │ 1 │ defaults" in out


def test_check_explains_a_router_configuration(tmp_path, capsys):
    status, out, err = explained(KTHENA["with the sections of later versions"][0], tmp_path, capsys)
    assert status == 0
    assert "auth │ - │ is empty" in out
    assert "kvcache-aware │ 2 │ indexMode: memory, runtimePort: 8900" in out
    assert "auth" not in err
