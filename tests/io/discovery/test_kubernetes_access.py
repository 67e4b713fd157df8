"""Credentials, as pods and kubeconfigs have them."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import ssl

import aiohttp
import pytest
import yaml
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from picker.core.kubernetes.pools import Selection
from picker.io.discovery.kubernetes import KubernetesDiscovery, KubernetesSettings
from picker.io.discovery.kubernetes_access import Access, AccessError, from_kubeconfig, in_cluster
from tests.io.discovery.conftest import QUICK

PEM = serialization.Encoding.PEM


class Identity:
    """A certificate and its key, signed by `issuer`, or by itself."""

    def __init__(self, name, issuer=None):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = dt.datetime.now(dt.UTC)
        signer = issuer or self
        made = (
            x509.CertificateBuilder()
            .subject_name(self._subject)
            .issuer_name(signer._subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .sign(signer._key, hashes.SHA256())
        )
        self.certificate = made.public_bytes(PEM).decode()
        format_ = serialization.PrivateFormat.PKCS8
        self.key = self._key.private_bytes(PEM, format_, serialization.NoEncryption()).decode()


@pytest.fixture
async def server(tmp_path):
    """An HTTPS server that asks for a certificate, and answers with who it saw."""
    authority = Identity("authority")
    identity = Identity("server", authority)
    for name, text in (("ca", authority.certificate), ("crt", identity.certificate), ("key", identity.key)):
        (tmp_path / f"server.{name}").write_text(text)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "server.ca")
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.verify_mode = ssl.CERT_OPTIONAL

    async def answer(request):
        shown = request.transport.get_extra_info("peercert") or {}
        name = dict(pair for (pair,) in shown.get("subject", ())).get("commonName", "")
        return web.json_response([name, request.headers.get("authorization", "")])

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield authority, f"https://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def seen(access):
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=access.tls())) as session,
        session.get(access.server + "/", headers=access.headers(), server_hostname=access.server_name) as response,
    ):
        return await response.json()


def kubeconfig(path, server, *, cluster=None, user=None, context=None):
    document = {
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", **(context or {})}},
            {"name": "there", "context": {"cluster": "c", "user": "u", "namespace": "models"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": server, **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def encoded(text):
    return base64.b64encode(text.encode()).decode()


async def test_a_token_inside_the_cluster(server, tmp_path):
    authority, url = server
    for name, text in (("token", "secret\n"), ("ca.crt", authority.certificate), ("namespace", "models")):
        (tmp_path / name).write_text(text)
    host, port = url.removeprefix("https://").split(":")
    access = in_cluster({"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}, tmp_path)
    assert access.namespace == "models"
    assert await seen(access) == ["", "Bearer secret"]
    (tmp_path / "token").write_text("renewed")
    assert await seen(access) == ["", "Bearer renewed"]


def test_an_api_server_over_ipv6(tmp_path):
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    access = in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path)
    assert (access.server, access.namespace) == ("https://[fd00::1]:443", "default")


async def test_a_certificate_in_a_kubeconfig(server, tmp_path):
    authority, url = server
    me = Identity("me", authority)
    user = {"client-certificate-data": encoded(me.certificate), "client-key-data": encoded(me.key)}
    path = kubeconfig(
        tmp_path / "config", url, cluster={"certificate-authority-data": encoded(authority.certificate)}, user=user
    )
    assert await seen(from_kubeconfig(path)) == ["me", ""]
    assert from_kubeconfig(path).namespace == "default"
    assert from_kubeconfig(path, "there").namespace == "models"


async def test_files_are_found_beside_the_kubeconfig(server, tmp_path):
    authority, url = server
    me = Identity("me", authority)
    (tmp_path / "files").mkdir()
    for name, text in (("crt", me.certificate), ("key", me.key), ("ca", authority.certificate), ("token", "t")):
        (tmp_path / "files" / name).write_text(text)
    user = {"client-certificate": "files/crt", "client-key": "files/key", "tokenFile": "files/token", "token": "old"}
    path = kubeconfig(tmp_path / "config", url + "/", cluster={"certificate-authority": "files/ca"}, user=user)
    assert await seen(from_kubeconfig(path)) == ["me", "Bearer t"]


async def test_a_server_that_nobody_vouches_for_is_refused(server, tmp_path):
    _, url = server
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await seen(from_kubeconfig(kubeconfig(tmp_path / "config", url)))
    trusting = kubeconfig(tmp_path / "config", url, cluster={"insecure-skip-tls-verify": True}, user={"token": "t"})
    assert await seen(from_kubeconfig(trusting)) == ["", "Bearer t"]


async def test_the_name_in_the_certificate_can_be_told(server, tmp_path):
    authority, url = server
    trusted = {"certificate-authority-data": encoded(authority.certificate)}
    named = kubeconfig(
        tmp_path / "config", url.replace("127.0.0.1", "localhost"), cluster={**trusted, "tls-server-name": "127.0.0.1"}
    )
    assert await seen(from_kubeconfig(named)) == ["", ""]


@pytest.mark.parametrize(
    ("environment", "files", "problem"),
    [
        (
            {},
            (),
            "KUBERNETES_SERVICE_HOST is not set, so this is no pod of a cluster; outside of a cluster name a kubeconfig",
        ),
        ({"KUBERNETES_SERVICE_HOST": "h"}, (), "automountServiceAccountToken: true"),
        ({"KUBERNETES_SERVICE_HOST": "h"}, ("token",), "the certificate authority cannot be read"),
    ],
)
def test_what_a_pod_lacks(tmp_path, environment, files, problem):
    for name in files:
        (tmp_path / name).write_text("x")
    with pytest.raises(AccessError, match=problem):
        in_cluster(environment, tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "current-context is not text"),
        ("[]", "current-context is not text"),
        ("{}", "has no current-context"),
        ("a: [", "is no YAML"),
        ("current-context: x", "has no context 'x' in contexts; run kubectl config view"),
        ("current-context: x\ncontexts: [{name: x, context: {}}]", "has no cluster '' in clusters"),
    ],
)
def test_what_is_no_kubeconfig(tmp_path, text, problem):
    (tmp_path / "config").write_text(text)
    with pytest.raises(AccessError, match=problem):
        from_kubeconfig(tmp_path / "config")


@pytest.mark.parametrize(
    ("cluster", "user", "problem"),
    [
        ({"server": "ftp://x"}, {}, "is no URL; write https://host:port"),
        ({"server": 7}, {}, "server is not text"),
        ({"proxy-url": "http://p"}, {}, "proxy-url is not done here"),
        ({"certificate-authority-data": "???"}, {}, "certificate-authority-data is no base64"),
        ({"certificate-authority": "missing"}, {}, "certificate-authority cannot be read"),
        ({}, {"exec": {"command": "aws"}}, "authenticates by exec, which is not done here; write a tokenFile"),
        ({}, {"client-certificate-data": encoded("no"), "client-key-data": encoded("no")}, "cannot be used"),
        ({"certificate-authority-data": encoded("no")}, {}, "cannot be used"),
        ({}, {"tokenFile": "missing"}, "the token cannot be read"),
    ],
)
def test_what_a_kubeconfig_cannot_have(tmp_path, cluster, user, problem):
    path = kubeconfig(tmp_path / "config", "https://127.0.0.1:1", cluster=cluster, user=user)

    def use():
        access = from_kubeconfig(path)
        access.headers()
        access.tls()

    with pytest.raises(AccessError, match=problem):
        use()


def test_a_token_never_becomes_another_header(tmp_path):
    (tmp_path / "token").write_text("a\nx-other: b")
    with pytest.raises(AccessError, match="is no token"):
        Access(server="http://x", token_file=tmp_path / "token").headers()


async def test_access_that_comes_late_is_enough(cluster, tmp_path, background, until):
    path = tmp_path / "kubeconfig"
    discovery = KubernetesDiscovery(
        KubernetesSettings(source=Selection("app=model", (8000,)), kubeconfig=str(path), watch=QUICK)
    )
    told = []
    background(discovery.run(told.append))
    await until(lambda: discovery.failures["no_access"] > 1)
    assert discovery.problem == f"the kubeconfig cannot be read: {path} does not exist"
    assert discovery.staleness() == float("inf")
    path.write_text(cluster.kubeconfig())
    await until(lambda: told == [[]])
    assert discovery.problem == ""
