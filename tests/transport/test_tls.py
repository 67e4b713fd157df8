"""TLS on both transports: made-up certificates, files, and files that change."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

import grpc
import grpc.aio
import pytest
from cryptography import x509

from picker.io.transport.tls import CertificateFiles, SelfSigned


@pytest.fixture(params=["http2", "grpcio"])
def transport(request):
    return request.param


def write(directory, certificate):
    """Lay a certificate out as Kubernetes does: files are links through `..data`, which is replaced in one step."""
    version = directory / f"..{time.monotonic_ns()}"
    version.mkdir()
    (version / "tls.crt").write_bytes(certificate.chain)
    (version / "tls.key").write_bytes(certificate.key)
    link = directory / "..new"
    link.symlink_to(version.name)
    link.rename(directory / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")


async def presented(port):
    """The certificate that a new handshake gets, and the protocol agreed on."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    session = writer.get_extra_info("ssl_object")
    try:
        return ssl.DER_cert_to_PEM_cert(
            session.getpeercert(binary_form=True)
        ).encode(), session.selected_alpn_protocol()
    finally:
        writer.close()


def test_self_signed_certificate_names_what_it_is_asked_to():
    certificate = x509.load_pem_x509_certificate(
        SelfSigned(["10.1.2.3", "picker.svc", "localhost"]).certificate().chain
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "picker.svc"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.1.2.3"]


async def test_self_signed(start, dial):
    source = SelfSigned()
    _, port = await start(certificates=source)
    channel = dial(port, grpc.ssl_channel_credentials(source.certificate().chain))
    assert await channel.unary_unary("/test.Test/Unary")(b"ab" * 100_000) == b"ba" * 100_000
    stream = channel.stream_stream("/test.Test/Echo")()
    for size in (0, 1, 1024 * 1024):
        await stream.write(bytes(size))
        assert await stream.read() == bytes(size)
    await stream.done_writing()
    assert await stream.code() is grpc.StatusCode.OK
    certificate, protocol = await presented(port)
    assert (certificate.strip(), protocol) == (source.certificate().chain.strip(), "h2")


async def test_changed_files_are_used_by_new_handshakes(start, dial, tmp_path):
    first, second = SelfSigned().certificate(), SelfSigned().certificate()
    write(tmp_path, first)
    now = 0.0
    source = CertificateFiles(tmp_path / "tls.crt", tmp_path / "tls.key", clock=lambda: now)
    _, port = await start(certificates=source)
    channel = dial(port, grpc.ssl_channel_credentials(first.chain))
    assert await channel.unary_unary("/test.Test/Unary")(b"ab") == b"ba"
    write(tmp_path, second)
    now = 0.5
    assert (await presented(port))[0].strip() == first.chain.strip()
    now = 2.0
    assert (await presented(port))[0].strip() == second.chain.strip()
    assert (source.reloads, source.refused) == (1, 0)
    assert await channel.unary_unary("/test.Test/Unary")(b"ab") == b"ba"
    fresh = dial(port, grpc.ssl_channel_credentials(second.chain))
    assert await fresh.unary_unary("/test.Test/Unary")(b"ab") == b"ba"


@pytest.mark.parametrize("damage", ["other key", "no certificate", "missing", "locked key"])
def test_bad_files_are_refused_once_and_the_old_certificate_stays(tmp_path, logs, damage):
    first, second = SelfSigned().certificate(), SelfSigned().certificate()
    write(tmp_path, first)
    now = 0.0
    source = CertificateFiles(tmp_path / "tls.crt", tmp_path / "tls.key", clock=lambda: now)
    context = source.context()
    if damage == "other key":
        (tmp_path / "..data" / "tls.key").write_bytes(second.key)
    elif damage == "no certificate":
        (tmp_path / "..data" / "tls.crt").write_bytes(b"nonsense")
    elif damage == "missing":
        (tmp_path / "..data" / "tls.key").unlink()
    else:
        (tmp_path / "..data" / "tls.key").write_bytes(locked(first.key))
    for _ in range(3):
        now += 2.0
        assert source.context() is context
        assert source.certificate() == first
    assert (source.reloads, source.refused) == (0, 1)
    assert str(tmp_path / "tls.key") in logs[0]["key"]
    write(tmp_path, second)
    now += 2.0
    assert source.certificate() == second
    assert (source.reloads, source.refused) == (1, 1)


def locked(key):
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


def test_bad_files_at_the_start_are_an_error(tmp_path):
    with pytest.raises(OSError):  # noqa: PT011
        CertificateFiles(tmp_path / "tls.crt", tmp_path / "tls.key", clock=time.monotonic)


@pytest.mark.parametrize("transport", ["http2"], indirect=True)
async def test_failed_handshakes_are_counted(start, logs, eventually):
    server, port = await start(certificates=SelfSigned())
    for hello in (b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hello)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()
    await eventually(lambda: server.counters.rejected == {"tls_handshake": 3})
    assert logs[0]["peer"] == "HTTP_REQUEST"
    assert [line["reason"] for line in logs] == ["tls_handshake"] * 2
    assert (await presented(port))[1] == "h2"
