"""Settings of `kvcache-aware`, of endpoints that it follows, and of predictions."""

from __future__ import annotations

import pytest
import yaml

from picker.app.config import ConfigError, effective, load
from picker.core.endpoints import KvEvents
from picker.core.plugins.kvcache_args import IndexMode, KvCacheArgs

KTHENA = """
scheduler:
  pluginConfig:
  - name: least-request
    args:
      maxWaitingRequests: 10
  - name: kvcache-aware
    args:
      indexMode: memory
      blockSizeToHash: 16
      maxBlocksToMatch: 128
      runtimePort: 8900
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
"""
ENDPOINT = "endpoints: {static: [{address: '10.0.0.1:8000'}]}\n"


def args_of(text: str) -> KvCacheArgs:
    args = load(ENDPOINT + f"scheduler: {{pluginConfig: [{{name: kvcache-aware, args: {text}}}]}}").spec.args
    return args["kvcache-aware"]


def problems(document: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(document)
    return [str(problem) for problem in caught.value.problems]


def test_a_configuration_of_kthena_pastes_in():
    loaded = load(ENDPOINT + KTHENA)
    assert loaded.warnings == ()
    assert loaded.spec.scorers == (("least-request", 1.0), ("kvcache-aware", 1.0))
    args = loaded.spec.args["kvcache-aware"]
    assert args == KvCacheArgs(index_mode=IndexMode.MEMORY, runtime_port=8900)
    assert load(yaml.safe_dump(effective(loaded.config))).config == loaded.config


def test_the_documented_defaults():
    args = args_of("{}")
    assert (args.index_mode, args.block_size_to_hash, args.max_blocks_to_match) == ("redis", 16, 128)
    assert (args.vllm_tokenizer_port, args.sglang_tokenizer_port, args.runtime_port) == (8000, 30000, 9000)
    assert args.max_blocks_per_pod == 1048576
    assert not args.tokenizer_service.enabled
    assert args.tokenizer_service.fallback_to_engine


def test_whole_numbers_of_zero_or_less_mean_the_default():
    assert args_of("{blockSizeToHash: 0, runtimePort: -1, maxBlocksPerPod: 0}") == KvCacheArgs()


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ("{blockSize: 32}", "blockSize: 32: unknown argument"),
        ("{indexMode: both}", 'indexMode: "both": is none of redis, memory, direct'),
        ("{hashProtocol: llmd-xxh64}", 'hashProtocol: "llmd-xxh64": is none of kthena, llm-d-cbor-fnv'),
        ("{hashSed: x}", 'hashSed: "x": unknown argument of "kvcache-aware"; did you mean "hashSeed"?'),
        ("{redis: {address: redis}}", 'redis.address: "redis": is not where a server is'),
        ("{redis: {password: x}}", 'redis.password: "x": unknown key'),
        ("{tokenizers: [local]}", "modelDirectory: is missing"),
        ("{tokenizers: [engine, engine]}", "tokenizers: "),
        ("{tierWeights: {GPU: -1}}", "tierWeights.GPU: -1: must be at least 0"),
        ("{tokenizerService: {endpoint: somewhere}}", "tokenizerService.endpoint"),
        ("{zmqPort: 70000}", "zmqPort: 70000: must be at most 65535"),
    ],
)
def test_arguments_that_cannot_be(args, problem):
    (found,) = problems(f"scheduler: {{pluginConfig: [{{name: kvcache-aware, args: {args}}}]}}")
    assert found.startswith(f"scheduler.pluginConfig[0].args.{problem}")


def test_alone_it_leaves_load_out_of_sight():
    loaded = load(ENDPOINT + "scheduler: {plugins: {Score: {enabled: [{name: kvcache-aware, weight: 1}]}}}")
    (warning,) = loaded.warnings
    assert warning.startswith("scheduler.plugins.Score.enabled: no plugin looks at load")


def test_where_an_endpoint_is_heard():
    entry = """{address: "10.0.0.1:8000", runtime: "sidecar:9000",
                kvEvents: {endpoint: "tcp://10.0.0.1:5557", replayEndpoint: "tcp://10.0.0.1:5558", topic: t}}"""
    (static,) = load(f"endpoints: {{static: [{entry}]}}").config.endpoints.static
    endpoint = static.endpoint()
    assert endpoint.runtime == "sidecar:9000"
    assert endpoint.kv_events == KvEvents("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", "t")


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ('runtime: "10.0.0.1"', 'runtime: "10.0.0.1": is not where a server is'),
        ('kvEvents: {endpoint: "tcp://*:5557"}', 'kvEvents.endpoint: "tcp://*:5557": is not where an engine publishes'),
        (
            'kvEvents: {replay: "tcp://a:1"}',
            'kvEvents.replay: "tcp://a:1": unknown key; did you mean "replayEndpoint"?',
        ),
    ],
)
def test_where_an_endpoint_cannot_be_heard(field, problem):
    (found,) = problems(f"endpoints: {{static: [{{address: '10.0.0.1:8000', {field}}}]}}")
    assert found.startswith(f"endpoints.static[0].{problem}")


@pytest.mark.parametrize(
    ("predict", "warns"),
    [
        ("{}", False),
        ('{listen: "0.0.0.0:9091"}', True),
        ('{listen: "[::]:9091"}', True),
        ('{listen: "[::1]:9091"}', False),
        ('{listen: "0.0.0.0:9091", tokenEnvironment: TOKEN}', False),
        ('{listen: "0.0.0.0:9091", enabled: false}', False),
    ],
)
def test_predictions_for_other_machines_want_a_token(predict, warns):
    warnings = load(ENDPOINT + f"predict: {predict}").warnings
    assert [warning.startswith("predict.listen: ") for warning in warnings] == [True] * warns
