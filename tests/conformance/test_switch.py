"""`exchange.conformance`: what it lets clients do, and that without it they can do nothing of that."""

from __future__ import annotations

import subprocess
import sys

import pytest

from picker.app.config import load
from picker.app.envoy import Template, bootstrap
from picker.app.kubernetes import pool_name
from tests.conformance.gateways import telling_who_served
from tests.conformance.servers import BACKEND
from tests.support.bodies import chat
from tests.support.http_client import send
from tests.support.picker_process import until

SELECTION = "test-epp-endpoint-selection"
REPORTS = {
    "x-conformance-test-served-endpoint",
    "x-conformance-test-selected-endpoint",
    "x-conformance-test-epp-pool",
}
TEMPLATES = [Template.BUFFERED, Template.FULL_DUPLEX]
PROMPT = chat("Once upon a time " * 99)
CONFORMANCE = "exchange: {conformance: true}"
SESSION = pytest.mark.asyncio(loop_scope="session")


def without_switch(pool):
    exchange = {**pool.configuration["exchange"], "conformance": False}
    return {**pool.configuration, "exchange": exchange}


def test_it_is_off_unless_it_is_turned_on():
    assert load("{}").config.exchange.conformance is False
    assert load("exchange: {conformance: false}").warnings == load("{}").warnings


def test_the_configuration_is_said_to_be_odd():
    (warning,) = set(load(CONFORMANCE).warnings) - set(load("{}").warnings)
    assert warning.startswith("exchange.conformance: lets clients choose the endpoint")


def test_picker_check_warns(tmp_path):
    path = tmp_path / "picker.yaml"
    path.write_text(CONFORMANCE)
    command = [sys.executable, "-m", "picker", "check", "-c", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0
    assert f"{path}: warning: exchange.conformance: lets clients choose the endpoint" in done.stderr


SUITE_ARGUMENTS = (
    *("--pool-name", "primary-inference-pool", "--pool-namespace", "inference-conformance-app-backend"),
    *("--v", "4", "--zap-encoder", "json", "--grpc-port", "9002", "--grpc-health-port", "9003"),
)
"""Those of the picker Deployments in the suite's manifests, up to `--config-file`."""


@pytest.mark.parametrize("flag", ["--config-file", "--config-text"])
def test_the_suites_arguments_are_understood_beside_it(tmp_path, flag):
    path = tmp_path / "conformance-plugins.yaml"
    path.write_text(CONFORMANCE)
    given = str(path) if flag == "--config-file" else CONFORMANCE
    command = [sys.executable, "-m", "picker", "check", *SUITE_ARGUMENTS, flag, given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    config = load(done.stdout).config
    assert config.exchange.conformance
    assert (config.listen.extproc, config.listen.admin) == ("0.0.0.0:9002", "0.0.0.0:9003")
    assert config.listen.tls.mode == "self-signed"
    assert pool_name(config.endpoints.kubernetes) == "inference-conformance-app-backend/primary-inference-pool"


@SESSION
@pytest.mark.parametrize("template", TEMPLATES)
async def test_without_it_a_client_chooses_nothing_and_is_told_nothing(primary, pickers, envoys, template):
    picker = await pickers(without_switch(primary))

    async def known():
        return (await picker.metrics())("endpoints") == 3

    await until(known)
    envoy = await envoys(bootstrap(template, picker=picker.address, endpoints=primary.addresses))
    cached = (await send(envoy.port, PROMPT)).headers[BACKEND]
    others = [address for address in primary.addresses if address != cached]
    for wanted in (*others, ",".join(others), others[0].rpartition(":")[0], "192.0.2.1", ""):
        answer = await send(envoy.port, PROMPT, headers=[(SELECTION, wanted)])
        assert answer.status == 200
        assert answer.headers[BACKEND] == cached  # as without the header
        assert not answer.headers.keys() & REPORTS


@SESSION
async def test_with_it_the_log_says_so(primary, picker_of):
    picker = await picker_of(primary)
    (warning,) = [line["warning"] for line in picker.events("The configuration is odd")]
    assert warning.startswith("exchange.conformance: ")


@SESSION
async def test_it_can_be_turned_off_while_the_picker_runs(primary, start_picker, start_envoy_here):
    picker = await start_picker(primary.configuration)
    envoy = await start_envoy_here(bootstrap(Template.BUFFERED, picker=picker.address, endpoints=primary.addresses))
    wanted = primary.addresses[0]

    async def obeyed():
        answer = await send(envoy.port, PROMPT, headers=[(SELECTION, wanted)])
        return bool(answer.headers.keys() & REPORTS)

    async def ignored():
        return not await obeyed()

    await until(obeyed)
    picker.write({**picker.config, "exchange": {"conformance": False}})
    await until(ignored)
    elsewhere = await send(envoy.port, PROMPT, headers=[(SELECTION, "192.0.2.1")])
    assert elsewhere.status == 200


@SESSION
@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_selection_never_widens_what_the_gateway_allows(primary, picker_of, envoys, template):
    picker = await picker_of(primary)
    first, second, third = primary.addresses
    config = bootstrap(template, picker=picker.address, endpoints=primary.addresses, subset=[first, second])
    envoy = await envoys(config)
    for wanted, served in ((f"{second},{third}", second), (primary.pods[0].ip, first)):
        assert (await send(envoy.port, PROMPT, headers=[(SELECTION, wanted)])).headers[BACKEND] == served
    answer = await send(envoy.port, PROMPT, headers=[(SELECTION, third)])
    assert (answer.status, answer.seen["error"]["type"]) == (503, "none_in_subset")


@SESSION
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("wanted", ["192.0.2.1", "192.0.2.1:8000,nobody", ",", "\x80"], ids=repr)
async def test_a_selection_of_nobody_is_refused(primary, picker_of, envoys, template, wanted):
    """So that a test that steers wrongly fails."""
    picker = await picker_of(primary)
    envoy = await envoys(bootstrap(template, picker=picker.address, endpoints=primary.addresses))
    for body in (PROMPT, b""):
        answer = await send(envoy.port, body, headers=[(SELECTION, wanted)])
        assert (answer.status, answer.seen["error"]["type"]) == (503, "none_in_subset")


@SESSION
@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_gateway_that_does_not_say_who_served_is_found_out(primary, picker_of, envoys, template):
    picker = await picker_of(primary)
    config = telling_who_served(bootstrap(template, picker=picker.address, endpoints=primary.addresses))
    (host,) = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"][
        "route_config"
    ]["virtual_hosts"]
    del host["response_headers_to_add"]
    answer = await send((await envoys(config)).port, PROMPT)
    assert answer.status == 200
    assert answer.headers["x-conformance-test-served-endpoint"].startswith("fail: missing")
    assert answer.headers["x-conformance-test-selected-endpoint"] == answer.headers[BACKEND]


@SESSION
@pytest.mark.parametrize("template", TEMPLATES)
async def test_it_opens_no_other_control_header(primary, picker_of, envoys, template):
    picker = await picker_of(primary)
    config = bootstrap(template, picker=picker.address, endpoints=primary.addresses)
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["early_header_mutation_extensions"]
    envoy = await envoys(config)
    prompt = chat(f"A prompt that only one endpoint has in its cache, by way of {template}. " * 99)
    cached = (await send(envoy.port, prompt)).headers[BACKEND]
    for other in primary.addresses:
        names = ("x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset")
        answer = await send(envoy.port, prompt, headers=[(name, other) for name in names])
        assert answer.headers[BACKEND] == cached
