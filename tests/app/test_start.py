"""What keeps the picker from starting, and how it says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from picker.app.config import ConfigError, load, load_file
from picker.io.transport.tls import SelfSigned


def picker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    return subprocess.run(
        [sys.executable, "-m", "picker", *arguments],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env=inherited | environment,
    )


def write(directory: Path, **listen: object) -> Path:
    path = directory / "picker.yaml"
    ports = dict.fromkeys(("extproc", "admin", "http"), "127.0.0.1:0")
    path.write_text(yaml.safe_dump({"listen": {**ports, **listen}}))
    return path


def encrypted(key: bytes) -> bytes:
    return load_pem_private_key(key, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    ours, other = SelfSigned().certificate(), SelfSigned().certificate()
    contents = {
        "chain": ours.chain,
        "key": ours.key,
        "other": other.key,
        "encrypted": encrypted(ours.key),
        "garbage": b"\xff\x00 no PEM",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: str(tmp_path / name) for name in (*contents, "absent")}


@pytest.mark.parametrize(
    ("certificate", "key", "found"),
    [
        ("absent", "key", ["listen.tls.certificate: ", "absent does not exist; name the PEM file"]),
        ("chain", "absent", ["listen.tls.key: ", "absent does not exist; name the PEM file"]),
        ("garbage", "key", ["listen.tls.certificate: ", "has no PEM certificate"]),
        ("key", "key", ["listen.tls.certificate: ", "has no PEM certificate"]),
        ("chain", "chain", ["listen.tls.key: ", "has no PEM private key"]),
        ("chain", "encrypted", ["listen.tls.key: ", "is encrypted; store the private key without a password"]),
        ("chain", "other", ["listen.tls.key: ", "cannot be used with listen.tls.certificate: ", "name the key that"]),
    ],
)
def test_certificates_that_cannot_be_used(certificate, key, found, files, tmp_path):
    path = write(tmp_path, tls={"mode": "files", "certificate": files[certificate], "key": files[key]})
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    (problem,) = map(str, caught.value.problems)
    assert problem.startswith(found[0])
    for words in found[1:]:
        assert words in problem
    load(path.read_text())  # as a reload does, which leaves the certificate alone


def test_both_files_are_looked_at(files, tmp_path):
    path = write(tmp_path, tls={"mode": "files", "certificate": files["absent"], "key": files["garbage"]})
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    assert [problem.path for problem in caught.value.problems] == ["listen.tls.certificate", "listen.tls.key"]


def test_certificates_that_can_be_used(files, tmp_path):
    load_file(write(tmp_path, tls={"mode": "files", "certificate": files["chain"], "key": files["key"]}))


def test_check_and_serve_refuse_the_same_certificate(files, tmp_path):
    path = write(tmp_path, tls={"mode": "files", "certificate": files["chain"], "key": files["other"]})
    for command in ("check", "serve"):
        run = picker(command, "-c", str(path))
        assert (run.returncode, run.stdout) == (2, "")
        assert "listen.tls.key" in run.stderr
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize("name", ["extproc", "admin", "http"])
def test_a_port_that_is_taken_is_named_with_its_setting(name, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = picker("serve", "-c", str(write(tmp_path, **{name: address})))
    assert (run.returncode, run.stdout) == (1, "")
    *_, last = map(json.loads, run.stderr.splitlines())  # gRPC's own lines, which are no JSON, are not there
    assert last["event"] == "The picker cannot start"
    assert last["error"].startswith(f"listen.{name}: {address}: cannot listen; free the port or use another (")


def test_a_configuration_that_is_not_there(tmp_path):
    run = picker("check", "-c", str(tmp_path / "absent.yaml"))
    assert run.returncode == 2
    assert "absent.yaml does not exist; name the configuration file with -c" in run.stderr


def test_output_that_nobody_reads_to_its_end_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "picker", "check", "--config-text", "{}"],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
