"""The shipped configurations and everything made from them are valid, and hold what their comments promise."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from picker.app.envoy import EnvoyError, Template, bootstrap, connection_manager, find_envoy, load, start_envoy
from picker.core.exchange.events import BodyMode
from picker.core.headers import CLIENT_FORBIDDEN

SHIPPED = sorted((Path(__file__).parents[2] / "envoy").glob("*.yaml"))
ADDRESSES = {"picker": "127.0.0.1:9002", "endpoints": ["127.0.0.1:8001", "[::1]:8002"]}


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    command = [find_envoy(), "--mode", "validate", "-l", "warning", "-c", path]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)


def types_in(node):
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "@type")
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from types_in(child)


def test_every_shipped_file_is_a_template():
    assert {path.stem for path in SHIPPED} == set(Template)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_envoy_accepts_the_shipped_file_without_a_warning(path):
    result = validate(path)
    assert result.returncode == 0, result.stderr
    assert "[warning]" not in result.stderr


BODY_MODES = {
    f"buffered-{request.name}-{response.name}": (
        Template.BUFFERED,
        {"request_body": request, "response_body": response},
    )
    for request, response in itertools.product(BodyMode, BodyMode)
}
OTHERS = {
    f"{template}-{name}": (template, changes)
    for template in Template
    for name, changes in {
        "no-picker": {"picker": None, "fallback_policy": "round_robin"},
        "everything-else": {
            "message_timeout": 0.25,
            "buffer_limit": 65536,
            "failure_mode_allow": False,
            "graceful_close": True,
            "allow_mode_override": True,
            "subset": ["127.0.0.1:8001"],
            "fallback_policy": "round_robin",
            "http1_trailers": True,
            "access_log": True,
        },
    }.items()
}
VARIANTS = BODY_MODES | OTHERS


@pytest.mark.parametrize(("template", "changes"), VARIANTS.values(), ids=VARIANTS.keys())
def test_envoy_accepts_every_variant(template, changes, tmp_path):
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(bootstrap(template, **{**ADDRESSES, **changes})))
    result = validate(path)
    assert result.returncode == 0, result.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("template", Template)
def test_an_independent_implementation_of_the_messages_knows_every_field(template):
    config = load(template)
    for name in set(types_in(config)):
        module = name.rpartition("/")[2].rpartition(".")[0]
        importlib.import_module(f"envoy_data_plane.{module}")
    messages = importlib.import_module("envoy_data_plane.envoy.config.bootstrap.v3")
    typed = messages.Bootstrap.from_dict(config)
    assert messages.Bootstrap.parse(bytes(typed)) == typed
    assert {cluster.name for cluster in typed.static_resources.clusters} == {"inference", "picker"}


@pytest.mark.parametrize("template", Template)
def test_every_control_header_is_stripped_before_the_filters(template):
    (extension,) = connection_manager(load(template))["early_header_mutation_extensions"]
    removed = [mutation["remove"] for mutation in extension["typed_config"]["mutations"]]
    assert sorted(removed) == sorted(CLIENT_FORBIDDEN)


@pytest.mark.parametrize("template", Template)
def test_the_admin_interface_is_on_loopback_only(template):
    assert load(template)["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"


@pytest.mark.parametrize("template", Template)
def test_no_timer_ends_a_long_answer(template):
    manager = connection_manager(load(template))
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert route["route"]["timeout"] == "0s"
    assert manager["stream_idle_timeout"] == "1800s"
    assert manager["http_filters"][0]["typed_config"]["grpc_service"]["timeout"] == "0s"


@pytest.mark.parametrize("template", Template)
def test_without_a_picker_nothing_of_it_is_left(template):
    config = json.dumps(bootstrap(template, picker=None, endpoints=["127.0.0.1:8001"]))
    assert "picker" not in config.replace("x-picker-fallbacks", "")


def test_the_observing_filter_waits_for_nothing_and_changes_nothing_else():
    config, recommended = load(Template.OBSERVABILITY), load(Template.BUFFERED)
    filters = connection_manager(config)["http_filters"]
    observing = filters.pop(1)["typed_config"]
    assert config == recommended
    assert observing["observability_mode"]
    assert observing["failure_mode_allow"]
    assert observing["grpc_service"]["timeout"] == "0s"


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:", "127.0.0.1:http", ""])
def test_an_address_without_a_port_is_named(address):
    with pytest.raises(ValueError, match="is not ip:port"):
        bootstrap(Template.BUFFERED, picker=address)


def test_envoy_is_found_in_its_package():
    version = subprocess.run([find_envoy(), "--version"], capture_output=True, text=True, check=True, timeout=20)
    assert "/1.40." in version.stdout


def test_envoy_is_found_on_the_path_where_the_package_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvoyError, match=r"pip install -e '\.\[demo\]'"):
        find_envoy()
    (tmp_path / "envoy").write_text("#!/bin/sh\n")
    (tmp_path / "envoy").chmod(0o755)
    assert find_envoy() == tmp_path / "envoy"


async def test_what_envoy_says_about_a_bad_bootstrap_is_in_the_error():
    with pytest.raises(EnvoyError, match=r"exited with code 1: (?s:.)*nonsense"):
        await start_envoy({"nonsense": 1})
