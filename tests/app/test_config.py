"""The configuration: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentParser
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from picker.app import check
from picker.app.config import Config, ConfigError, effective, in_force, load, load_file, needs_restart
from picker.app.config_settings import AssumedBody, FileEndpoints
from picker.core.exchange.events import BodyMode
from picker.core.plugins.least_request_args import LeastRequestArgs
from picker.core.plugins.prefix_cache_args import PrefixCacheArgs
from picker.core.plugins.registry import build_scheduler
from picker.core.plugins.token_cost import TokenCostArgs

KTHENA = Path(__file__).parents[1] / "data/config/kthena.yaml"
ADDRESS = "endpoints: {static: [{address: '10.0.0.1:8000'}]}\n"


def problems(document: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(document)
    return [str(problem) for problem in caught.value.problems]


@dataclasses.dataclass
class Checked:
    status: int
    out: str
    err: str


@pytest.fixture
def picker_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(document: str) -> Checked:
        path = tmp_path / "picker.yaml"
        path.write_text(document)
        parser = ArgumentParser()
        check.add_arguments(parser)
        status = check.run(parser.parse_args(["-c", str(path)]))
        printed = capsys.readouterr()
        return Checked(status, printed.out, printed.err)

    return run


# What a misspelt configuration gets to hear


@pytest.mark.parametrize(
    ("document", "path", "value", "name"),
    [
        (
            "scheduler: {pluginConfig: [{name: prefix-cache, args: {blockSizeToHahs: 64}}]}",
            "scheduler.pluginConfig[0].args.blockSizeToHahs",
            "64",
            '"blockSizeToHash"',
        ),
        (
            "scheduler: {plugins: {Score: {enabled: [{name: prefix-cache, weight: 0}]}}}",
            "scheduler.plugins.Score.enabled[0].weight",
            "0",
            "greater than 0; remove the entry to disable the plugin",
        ),
        (
            'scheduler: {pluginConfig: [{name: prefix-cache, args: {maxHashCacheSize: "many"}}]}',
            "scheduler.pluginConfig[0].args.maxHashCacheSize",
            '"many"',
            "expected int",
        ),
        ("schedulr: {plugins: {}}", "schedulr", '{"plugins": {}}', '"scheduler"'),
    ],
)
def test_check_refuses_with_path_value_and_remedy(picker_check, document: str, path: str, value: str, name: str):
    checked = picker_check(document)
    assert checked.status == 2
    assert checked.out == ""
    (line,) = checked.err.splitlines()
    assert f"picker.yaml: {path}: {value}: " in line
    assert name in line


def test_all_problems_are_said_at_once():
    found = problems("""
        auth: {issuer: x}
        listen: {extproc: "localhost:9002", transport: http, drainSeconds: .nan}
        exchange: {fallbacks: true, retryAfterSeconds: 1.5}
        scrape: {intervalSeconds: "0.2", timeoutSeconds: 0, path: metrics}
        endpoints: {static: [{address: "pod-a:8000"}, {name: b}], consul: {}}
        scheduler:
          pluginConfig: [{name: kvcache-awar, args: {}}, {name: random, args: {seed: 1}}, {args: {}}]
          plugins:
            Filter: {enabled: [least-requests, prefix-cache]}
            Score: {enabled: [{name: endpoint-health, weight: 1}, {name: gpu-usage}, least-latency]}
    """)
    starts = [
        'auth.issuer: "x": would not be obeyed',
        'listen.extproc: "localhost:9002": is not an IP address; host names need discovery: write ip:port',
        'listen.transport: "http": is none of http2, grpcio; did you mean "http2"?',
        "listen.drainSeconds: NaN: is not finite; write a plain number",
        "exchange.fallbacks: true: expected int, got a boolean",
        "exchange.retryAfterSeconds: 1.5: expected int, got a number",
        'scrape.intervalSeconds: "0.2": expected a number, got text; write plain decimal digits',
        "scrape.timeoutSeconds: 0: must be at least 0.01",
        'scrape.path: "metrics": does not match ^/[!-~]*$; start it with "/"',
        "endpoints.consul: {}: unknown key; known: file, kubernetes, static",
        'endpoints.static[0].address: "pod-a:8000": is not an IP address',
        "endpoints.static[1].address: is missing",
        'scheduler.pluginConfig[0].name: "kvcache-awar": unknown plugin; did you mean "kvcache-aware"?',
        'scheduler.pluginConfig[1].args.seed: 1: unknown argument of "random"; remove it',
        "scheduler.pluginConfig[2].name: is missing",
        'scheduler.plugins.Filter.enabled[0]: "least-requests": unknown plugin; did you mean "least-request"?',
        'scheduler.plugins.Filter.enabled[1]: "prefix-cache": is not a filter; enable it under Score',
        'scheduler.plugins.Score.enabled[0].name: "endpoint-health": does not score; enable it under Filter',
        "scheduler.plugins.Score.enabled[1].weight: is missing",
        'scheduler.plugins.Score.enabled[2]: "least-latency": expected a mapping, got text',
    ]
    assert len(found) == len(starts)
    for start in starts:
        assert any(line.startswith(start) for line in found), start


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("- listen", '["listen"]: expected a mapping, got a list'),
        ("a: [1", "line 2, column 1: is not YAML: while parsing a flow sequence"),
        ("log:\n\tlevel: info", "line 2, column 1: is not YAML: while scanning for the next token"),
        ("log: {}\nlog: {}", 'line 2, column 1: "log": duplicate key; keep one of them'),
        ("log: &x {}", "line 1, column 6: anchors and aliases are not supported"),
        ("log: *x", "line 1, column 6: anchors and aliases are not supported"),
        ("log: !!map {}", "line 1, column 6: tags are not supported"),
        ("!!python/object/apply:os.system [ls]", "line 1, column 1: tags are not supported"),
        ("{}\n---\n{}", "line 2, column 1: a second document"),
        ("? [a]\n: b", "line 1, column 3: a key that is not text"),
        ("[" * 50, "line 1, column 33: nested deeper than 32"),
        ("[" * 100_000, "line 1, column 1001: is not YAML: while increasing flow level"),
        ("log: \x00", "line 1, column 6: is not YAML: control characters"),
        (b"\xff\xfel\x00o\x00g\x00", "byte 0: is not UTF-8"),
        ("log: \ud800", "byte 5: is not UTF-8"),
        ("#" * (1024 * 1024 + 1), "is larger than 1048576 bytes: 1048577"),
        ("endpoints: {static: [], file: {path: x}}", "endpoints: has both static and file; keep exactly one of them"),
        ("endpoints: {file: {pollSeconds: 1}}", "endpoints.file.path: is missing"),
        ("endpoints: {file: }", "endpoints.file: null: expected a mapping, got null"),
        ("log: {level: }", "log.level: null: expected one of debug, info, warning, error, got null"),
        ("exchange: {maxBodyBytes: 99999999999999999999}", "exchange.maxBodyBytes: "),
        ("exchange: {maxBodyBytes: 9999999999999999999}", "exchange.maxBodyBytes: 9999999999999999999: does not fit"),
        ("exchange: {maxBodyBytes: 0x10000}", 'exchange.maxBodyBytes: "0x10000": expected int, got text'),
        ("scrape: {enabled: yes}", 'scrape.enabled: "yes": expected true or false, got text'),
        ("scrape: {staleSeconds: 0.2}", "scrape.staleSeconds: 0.2: must be greater than intervalSeconds, 0.2"),
        ("listen: {admin: '0.0.0.0:9002'}", 'listen.admin: "0.0.0.0:9002": is the address of listen.extproc too'),
        ("listen: {tls: {mode: files, key: k.pem}}", "listen.tls.certificate: is missing; name a PEM file"),
        (
            "scheduler: {plugins: {Filter: {enabled: [least-request, least-request]}}}",
            'scheduler.plugins.Filter.enabled[1]: "least-request": is enabled twice',
        ),
        (
            "scheduler: {plugins: {Score: {enabled: [{name: random, weight: 1}, {name: random, weight: 2}]}}}",
            'scheduler.plugins.Score.enabled[1]: "random": is enabled twice',
        ),
        (
            "scheduler: {plugins: {Score: {enabled: [{name: random, weight: .inf}]}}}",
            "scheduler.plugins.Score.enabled[0].weight: Infinity: is not finite; write a plain number",
        ),
        (
            "scheduler: {pluginConfig: [{name: least-latency, args: {TTFTTPOTWeightFactor: 1.5}}]}",
            "scheduler.pluginConfig[0].args.TTFTTPOTWeightFactor: 1.5: must be at most 1",
        ),
        ('"\\x1b[31m": 1', '"\\u001b[31m": 1: unknown key'),
    ],
)
def test_refused(document: str | bytes, problem: str):
    (found,) = problems(document)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("10.0.0.1", "has no port"),
        ("10.0.0.1:", "has no port"),
        ("10.0.0.1:http", "has no port"),
        ("10.0.0.1:٣", "has no port"),
        ("10.0.0.1:65536", "the port must be at most 65535"),
        ("10.0.0.1:0", "port 0 is no server's"),
        ("010.0.0.1:80", "is not an IP address"),
        ("::1:80", "is not an IP address with a port"),
        ("[::1]", "has no port"),
        ("[10.0.0.1]:80", "is not an IP address with a port"),
        ("[fe80::1%eth0]:80", "is not an IP address with a port"),
        ("0.0.0.0:80", "is not an address of one server"),
        ("[ff02::1]:80", "is not an address of one server"),
        ("10.0.0.1:80,10.0.0.2:80", "is not an IP address"),
    ],
)
def test_addresses_of_endpoints_are_ip_and_port(address: str, problem: str):
    (found,) = problems(json.dumps({"endpoints": {"static": [{"address": address}]}}))
    assert found.startswith(f"endpoints.static[0].address: {json.dumps(address)}: {problem}")


def test_reading_ends_after_a_hundred_problems():
    found = problems("".join(f"key{number}: 1\n" for number in range(50_000)))
    assert len(found) == 101
    assert found[-1] == "too many problems; the rest is not shown"


# What a good configuration means


def test_what_is_none_of_the_choices_hears_them_once():
    assert problems("log: {level: loud}") == ['log.level: "loud": is none of debug, info, warning, error']


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("admission: {objectiveHeaders: ['X Tier']}", 'admission.objectiveHeaders[0]: "X Tier": is not the name'),
        ("admission: {fairnessHeaders: ['']}", 'admission.fairnessHeaders[0]: "": is not the name'),
        ("admission: {priorityHeader: 5}", "admission.priorityHeader: 5: is not the name"),
        (f"admission: {{priorityHeader: {'x' * 128}}}", "is not the name"),
        ("scheduler: {disaggregation: {header: ''}}", 'scheduler.disaggregation.header: "": is not the name'),
        ("scheduler: {disaggregation: {header: ':path'}}", 'scheduler.disaggregation.header: ":path": is not the name'),
        ("scheduler: {disaggregation: {header: Content-Length}}", "has a meaning of its own"),
        ("scheduler: {disaggregation: {header: X-Gateway-Destination-Endpoint}}", "has a meaning of its own"),
        ("models: {rewrites: [{name: '', targets: [{model: b}]}]}", 'models.rewrites[0].name: "": is empty'),
        (
            "models: {rewrites: [{name: a, targets: [{model: ''}]}]}",
            'models.rewrites[0].targets[0].model: "": is empty',
        ),
    ],
)
def test_names_that_cannot_be_are_refused(document: str, problem: str):
    (found,) = problems(ADDRESS + document)
    assert problem in found


@pytest.mark.parametrize(("queue", "warned"), [("", 0), ("enabled: true, ", 1)])
def test_waits_that_the_shipped_envoy_does_not_allow_are_warned_about(queue: str, warned: int):
    # envoy/buffered.yaml has a max_message_timeout of 120 s, past which Envoy ignores what it is asked for.
    assert load(ADDRESS + f"admission: {{queue: {{{queue}maxSeconds: 119}}}}").warnings == ()
    warnings = load(ADDRESS + f"admission: {{queue: {{{queue}maxSeconds: 119.5}}}}").warnings
    assert len(warnings) == warned
    assert all("admission.queue.maxSeconds" in text and "120.5s" in text for text in warnings)


def test_names_of_headers_are_found_however_they_are_written():
    config = load(
        ADDRESS + "admission: {objectiveHeaders: [X-Tier], priorityHeader: X-Priority}\n"
        "scheduler: {disaggregation: {header: X-Prefill-At}}"
    ).config
    assert config.admission.objective_headers == ("x-tier",)
    assert config.admission.priority_header == "x-priority"
    assert config.scheduler.disaggregation.header == "x-prefill-at"


@pytest.mark.parametrize("document", ["", "# nothing\n", "---\n", "null"])
def test_a_document_without_content_is_refused(document: str):
    assert problems(document) == ["is empty; write {} for the defaults"]


@pytest.mark.parametrize("document", ["{}", "scheduler:\nlisten:\nendpoints:\n"])
def test_everything_has_a_default(document: str):
    loaded = load(document)
    assert loaded.config.listen.extproc == "0.0.0.0:9002"
    assert loaded.config.exchange.assume_request_body.body_mode is None
    assert loaded.spec.filters == ("endpoint-health",)
    assert loaded.spec.scorers == (("token-cost", 1.0),)
    assert loaded.spec.producers == ("prefix-cache",)
    assert loaded.spec.args["token-cost"] == TokenCostArgs(2.0, 200.0, 8192.0)
    whole = loaded.spec.args["prefix-cache"]
    assert isinstance(whole, PrefixCacheArgs)
    assert whole.blockSizeToHash * whole.maxBlocksToMatch > loaded.config.exchange.max_body_bytes
    assert loaded.warnings == ("endpoints: there are none, so every request is refused; add some under static",)


def test_kthenas_profile_is_what_its_router_does_without_a_configuration():
    loaded = load(ADDRESS + "scheduler: {profile: kthena}")
    assert loaded.spec.filters == ("least-request",)
    assert loaded.spec.scorers == (("least-request", 1.0), ("least-latency", 1.0), ("prefix-cache", 1.0))
    assert loaded.spec.producers == ()
    assert loaded.spec.args["least-request"] == LeastRequestArgs(10)
    assert loaded.spec.args["prefix-cache"] == PrefixCacheArgs(64, 128, 50_000, 5)


def test_llm_ds_profiles_are_those_of_its_binary_and_of_its_guides():
    loaded = load(ADDRESS + "scheduler: {profile: llm-d}")
    assert loaded.spec.filters == ()
    assert loaded.spec.scorers == (("queue", 2.0), ("kv-cache-utilization", 2.0), ("prefix-cache", 3.0))
    assert loaded.spec.producers == ()
    args = loaded.spec.args["prefix-cache"]
    assert isinstance(args, PrefixCacheArgs)
    assert (args.blockSizeToHash, args.maxBlocksToMatch, args.maxHashCacheSize) == (64 * 4, 131_072 // 64, 31_250)
    guide = load(ADDRESS + "scheduler: {profile: llm-d-guide}")
    assert guide.spec.filters == ("prefix-cache-affinity-filter",)
    assert guide.spec.scorers == (("token-load", 1.0),)
    assert guide.spec.producers == ("prefix-cache",)
    precise = load(
        ADDRESS + "scheduler: {profile: llm-d-guide, pluginConfig: [{name: kvcache-aware, args: {indexMode: direct}}]}"
    )
    scheduler, _ = build_scheduler(precise.spec, None, lambda _model, _blocks: None)
    assert [producer.name for producer in scheduler.producers] == ["kvcache-aware", "prefix-cache"]


def test_what_a_profile_lists_can_be_replaced_one_by_one():
    loaded = load(ADDRESS + "scheduler: {profile: kthena, plugins: {Score: {enabled: [{name: gpu-usage, weight: 2}]}}}")
    assert loaded.spec.filters == ("least-request",)
    assert loaded.spec.scorers == (("gpu-usage", 2.0),)


def test_token_cost_goes_by_the_producers_that_have_arguments():
    loaded = load(ADDRESS + "scheduler: {pluginConfig: [{name: kvcache-aware, args: {indexMode: direct}}]}")
    assert loaded.spec.scorers == (("token-cost", 1.0),)
    assert set(loaded.spec.producers) == {"kvcache-aware", "prefix-cache"}
    scheduler, _ = build_scheduler(loaded.spec, None, lambda _model, _blocks: None)
    assert [producer.name for producer in scheduler.producers] == ["kvcache-aware", "prefix-cache"]
    assert scheduler.counts_work


def test_router_configuration_of_kthena_pastes_in():
    loaded = load(KTHENA.read_text() + ADDRESS)
    assert loaded.warnings == ()
    assert loaded.spec.filters == ("least-request",)
    assert loaded.spec.scorers == tuple(
        (name, 1.0) for name in ("least-request", "gpu-usage", "least-latency", "prefix-cache")
    )
    scheduler, notes = build_scheduler(loaded.spec, None, lambda _: None)
    assert [scorer.name for scorer, _ in scheduler.scorers] == [name for name, _ in loaded.spec.scorers]
    assert notes == []


def test_endpoints_get_names_and_canonical_addresses():
    entries = [
        {"address": "[0:0::1]:8000", "engine": "sglang", "labels": {"app": "x"}},
        {"address": "10.0.0.1:8000", "name": "a"},
    ]
    config = load(json.dumps({"endpoints": {"static": entries}})).config
    first, second = (entry.endpoint() for entry in config.endpoints.static)
    assert (first.address, first.name, first.engine, first.labels) == (
        "[::1]:8000",
        "[::1]:8000",
        "sglang",
        {"app": "x"},
    )
    assert (second.address, second.name, second.namespace) == ("10.0.0.1:8000", "a", "default")


def test_off_is_text_and_modes_are_those_of_the_protocol():
    config = load("listen: {tls: {mode: off}}\nexchange: {assumeRequestBody: full-duplex}").config
    assert config.listen.tls.mode == "off"
    assert config.exchange.assume_request_body.body_mode is BodyMode.FULL_DUPLEX_STREAMED
    assert AssumedBody.NONE.body_mode is BodyMode.NONE


def test_zero_means_the_default_of_a_plugin_as_in_kthena():
    loaded = load(ADDRESS + "scheduler: {pluginConfig: [{name: prefix-cache, args: {topKMatches: 0}}]}")
    assert loaded.spec.args["prefix-cache"] == PrefixCacheArgs()
    assert loaded.warnings == ("scheduler.pluginConfig[0].args.topKMatches: 0 means the default, 5",)


@pytest.mark.parametrize(
    ("scores", "scorers", "warning"),
    [
        ("[{name: random, weight: 1}]", ["random"], None),
        ("[{name: random, weight: 1}, {name: gpu-usage, weight: 2}]", ["gpu-usage"], "random is dropped"),
        ("[{name: prefix-cache, weight: 1}]", ["prefix-cache"], "no plugin looks at load"),
        ("[]", [], "is empty: endpoints are picked by chance"),
    ],
)
def test_odd_scorers_are_warned_about(scores: str, scorers: list[str], warning: str | None):
    loaded = load(ADDRESS + f"scheduler: {{plugins: {{Score: {{enabled: {scores}}}}}}}")
    assert [name for name, _ in loaded.spec.scorers] == scorers
    wanted = [f"scheduler.plugins.Score.enabled: {warning}"] if warning else []
    assert len(loaded.warnings) == len(wanted)
    assert all(found.startswith(start) for found, start in zip(loaded.warnings, wanted, strict=True))


def test_disabled_has_no_effect_and_that_is_said():
    disabled = "[{name: least-request, weight: 1}, kvcache-aware]"
    loaded = load(ADDRESS + f"scheduler: {{profile: kthena, plugins: {{Score: {{disabled: {disabled}}}}}}}")
    assert [name for name, _ in loaded.spec.scorers] == ["least-request", "least-latency", "prefix-cache"]
    (warning,) = loaded.warnings
    assert warning.startswith('scheduler.plugins.Score.disabled: does not disable "least-request"')


def test_a_later_plugin_entry_wins():
    entries = "[{name: least-request, args: {maxWaitingRequests: 3}}, {name: least-request, args: {}}]"
    loaded = load(ADDRESS + f"scheduler: {{pluginConfig: {entries}}}")
    assert loaded.spec.args["least-request"] == LeastRequestArgs(10)
    assert loaded.warnings == ('scheduler.pluginConfig[1]: replaces an earlier entry of "least-request"',)


def test_needs_restart_names_what_a_reload_cannot_change():
    old = load(ADDRESS).config
    new = load("""
        listen: {http: "0.0.0.0:9999", tls: {mode: self-signed}, leaveSeconds: 1, drainSeconds: 5}
        predict: {requestsPerSecond: 7}
        log: {level: debug, format: console}
        exchange: {fallbacks: 1}
        scrape: {enabled: false}
    """).config
    assert needs_restart(old, new) == ["listen.http", "listen.tls.mode", "predict.requestsPerSecond", "log.format"]
    assert needs_restart(new, new) == []
    force = in_force(old, new)
    assert (force.listen.http, force.listen.tls.mode, force.log.format) == ("0.0.0.0:9090", "off", "json")
    assert (force.listen.leave_seconds, force.listen.drain_seconds) == (1, 5)  # read when the picker stops
    assert (force.log.level, force.exchange.fallbacks, force.scrape.enabled) == ("debug", 1, False)


# Round trips


def test_check_prints_a_configuration_that_means_the_same(picker_check):
    checked = picker_check(KTHENA.read_text() + ADDRESS)
    assert (checked.status, checked.err) == (0, "")
    assert load(checked.out) == load(KTHENA.read_text() + ADDRESS)


def test_check_reads_the_file_of_endpoints_too(picker_check, tmp_path: Path):
    document = json.dumps({"endpoints": {"file": {"path": str(tmp_path / "endpoints.yaml")}}})
    absent = picker_check(document)
    assert absent.status == 0
    assert "endpoints.yaml does not exist" in absent.err
    (tmp_path / "endpoints.yaml").write_text("[{address: nowhere}]")
    bad = picker_check(document)
    assert bad.status == 2
    assert "endpoints[0].address" in bad.err


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path):
    for path, problem in ((tmp_path, "is not a regular file"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(ConfigError, match=problem):
            load_file(path)


names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "off",
        "no",
        "1e3",
        "0x1",
        "1_000",
        "0o7",
        "12:30",
        "~",
        "null",
        ".5",
        "-.5",
        "1.",
        "2020-01-01",
        "=",
        "<<",
        "1.e+3",
    ]
)
seconds = st.floats(0.01, 3600)
labels = st.dictionaries(texts, texts, max_size=3)
addresses = st.builds(
    lambda ip, port: f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}",
    st.ip_addresses().filter(lambda ip: not ip.is_unspecified and not ip.is_multicast and "%" not in str(ip)),
    st.integers(1, 65535),
)
entries = st.fixed_dictionaries(
    {"address": addresses},
    optional={
        "name": names,
        "namespace": names,
        "engine": st.sampled_from(["vllm", "sglang"]),
        "model": texts,
        "labels": labels,
    },
)
scorers = st.sampled_from(["least-request", "least-latency", "gpu-usage", "random", "prefix-cache"])
documents = st.fixed_dictionaries(
    {},
    optional={
        "listen": st.fixed_dictionaries(
            {},
            optional={
                "transport": st.sampled_from(["http2", "grpcio"]),
                "tls": st.fixed_dictionaries({"mode": st.sampled_from(["off", "self-signed"])}),
                "drainSeconds": st.integers(0, 3600) | st.floats(0, 3600),
            },
        ),
        "exchange": st.fixed_dictionaries({}, optional={"modeGraceSeconds": st.floats(0, 10)}),
        "endpoints": st.fixed_dictionaries(
            {
                "static": st.lists(
                    entries,
                    max_size=4,
                    unique_by=(lambda entry: entry["address"], lambda entry: entry.get("name", entry["address"])),
                )
            }
        )
        | st.fixed_dictionaries({"file": st.fixed_dictionaries({"path": names, "pollSeconds": seconds})}),
        "scrape": st.fixed_dictionaries({}, optional={"timeoutSeconds": seconds, "enabled": st.booleans()}),
        "scheduler": st.fixed_dictionaries(
            {},
            optional={
                "pluginConfig": st.lists(
                    st.fixed_dictionaries(
                        {
                            "name": st.just("prefix-cache"),
                            "args": st.dictionaries(st.just("topKMatches"), st.integers(-2, 9)),
                        }
                    )
                    | st.fixed_dictionaries({"name": scorers}),
                    max_size=4,
                ),
                "plugins": st.fixed_dictionaries(
                    {},
                    optional={
                        "Filter": st.fixed_dictionaries({"enabled": st.sampled_from([[], ["lora-affinity"]])}),
                        "Score": st.fixed_dictionaries(
                            {
                                "enabled": st.lists(
                                    st.fixed_dictionaries({"name": scorers, "weight": st.floats(1e-9, 1e9)}),
                                    max_size=3,
                                    unique_by=lambda entry: entry["name"],
                                )
                            }
                        ),
                    },
                ),
            },
        ),
    },
)


@settings(max_examples=150, deadline=None)
@given(documents)
def test_the_effective_configuration_reads_back_as_itself(document: dict):
    loaded = load(yaml.dump(document, allow_unicode=True))
    plain = effective(loaded.config)
    again = load(yaml.dump(plain))
    assert again.config == loaded.config
    assert again.spec == loaded.spec
    assert effective(again.config) == plain == json.loads(json.dumps(plain))
    assert isinstance(loaded.config.endpoints, FileEndpoints) == ("file" in plain["endpoints"])
    assert msgspec.structs.asdict(loaded.config).keys() == {field.name for field in msgspec.structs.fields(Config)}


# Hostile documents

keys = st.sampled_from(
    [
        "listen",
        "exchange",
        "endpoints",
        "scrape",
        "scheduler",
        "log",
        "debug",
        "static",
        "file",
        "path",
        "tls",
        "mode",
        "names",
        "pluginConfig",
        "plugins",
        "Filter",
        "Score",
        "enabled",
        "disabled",
        "name",
        "weight",
        "args",
        "address",
        "labels",
        "engine",
        "blockSizeToHash",
        "level",
        "sampleDecisions",
        "auth",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | scorers
data = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | texts, inner, max_size=4),
    max_leaves=25,
)


def only_loads_or_refuses(document: str | bytes) -> None:
    try:
        loaded = load(document)
    except ConfigError as refused:
        error = refused
    else:
        assert load(yaml.dump(effective(loaded.config))).config == loaded.config
        return
    assert error.problems
    assert all("\n" not in str(problem) and len(str(problem)) < 1000 for problem in error.problems)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(keys, data, max_size=4))
def test_arbitrary_data_is_loaded_or_refused(document: dict):
    only_loads_or_refuses(yaml.dump(document, allow_unicode=True))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60) | st.text("{}[]:,-?&*!|>'\"%@`#~<= \n\tab1.", max_size=60))
@example(b"\xef\xbb\xbflog: {}")
@example("a: &a [*a]")
@example("- " * 1000)
@example("? " * 1000)
@example("a: !!int many")
@example("a: !!binary ====")
@example("<<: {log: {}}")
@example("x: " + "9" * 5000)
@example("x: " + "1" * 5000 + ".5")
@example("%YAML 9.9\n--- {}")
def test_arbitrary_text_is_loaded_or_refused(document: str | bytes):
    only_loads_or_refuses(document)
