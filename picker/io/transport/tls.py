"""Server certificates: made up at start, or read from files and read again when they change."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec import Struct

logger = structlog.get_logger(__name__)

_SELF_SIGNED_DAYS = 3650
_CHECK_SECONDS = 1.0


class Certificate(Struct, frozen=True):
    """A certificate chain and its private key, both PEM."""

    chain: bytes
    key: bytes


class CertificateSource(Protocol):
    """Where the certificate of the next handshake comes from."""

    def certificate(self) -> Certificate:
        """The certificate to present now."""

    def context(self) -> ssl.SSLContext:
        """The same as a server context that offers HTTP/2 by ALPN."""


class SelfSigned:
    """A certificate of our own, valid for ten years: encryption without proof of identity.

    Names `localhost`, the loopback addresses and `names`: DNS names or IP addresses, such as the pod's.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._certificate = _issue_certificate(("localhost", "127.0.0.1", "::1", *names))
        self._context = _server_context(self._certificate)

    def certificate(self) -> Certificate:
        return self._certificate

    def context(self) -> ssl.SSLContext:
        return self._context


class CertificateFiles:
    """A certificate in files, read again when they change: at most once a second, when a handshake asks.

    Changed means other file identity, size or time, so also a swap of the symbolic link under which Kubernetes mounts
    secrets. A pair that cannot be used (unreadable, not PEM, a key that does not fit) is refused: `refused` counts it,
    the log names it, and the certificate in use stays. `reloads` counts the changes that were taken.

    Raises OSError or ssl.SSLError if the files are unusable at the start.
    """

    def __init__(self, chain: Path, key: Path, *, clock: Callable[[], float]) -> None:
        self.reloads = 0
        self.refused = 0
        self._chain = chain
        self._key = key
        self._clock = clock
        self._checked_at = clock()
        self._signature = self._sign()
        self._certificate = self._read()
        self._context = _server_context(self._certificate)

    def certificate(self) -> Certificate:
        self._refresh()
        return self._certificate

    def context(self) -> ssl.SSLContext:
        self._refresh()
        return self._context

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = now
        signature = self._sign()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            certificate = self._read()
            context = _server_context(certificate)
        except (OSError, ssl.SSLError) as error:
            self.refused += 1
            logger.warning(
                "The changed certificate is refused; the one in use stays",
                chain=str(self._chain),
                key=str(self._key),
                error=str(error),
            )
            return
        self._certificate, self._context = certificate, context
        self.reloads += 1
        logger.info("The certificate has changed", chain=str(self._chain))

    def _read(self) -> Certificate:
        return Certificate(self._chain.read_bytes(), self._key.read_bytes())

    def _sign(self) -> tuple[tuple[int, int, int, int] | None, ...]:
        return tuple(_identify(path) for path in (self._chain, self._key))


def listening_context(source: CertificateSource, on_failure: Callable[[ssl.SSLError], None]) -> ssl.SSLContext:
    """Return a context for a listening socket: each handshake takes the certificate that `source` has by then.

    `on_failure` hears of every handshake that fails; not of a peer that hangs up or falls silent during one.
    """

    class Session(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                on_failure(error)
                raise

    def present(session: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: object) -> None:
        session.context = source.context()

    context = _server_context(source.certificate())
    context.sslobject_class = Session
    # OpenSSL asks for the name with every handshake, also with one that names no server.
    context.set_servername_callback(present)
    return context


def _identify(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _server_context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    # The ssl module loads from named files only; one in memory also works on a read-only file system.
    with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else open(os.memfd_create("tls"), "wb") as file:  # noqa: PTH123
        file.write(certificate.key + b"\n" + certificate.chain)
        file.flush()
        # A key that wants a password must fail, not ask for one on the terminal.
        context.load_cert_chain(f"/dev/fd/{file.fileno()}", password=lambda: b"")
    return context


def _issue_certificate(names: Iterable[str]) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "picker")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=_SELF_SIGNED_DAYS))
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in dict.fromkeys(names)]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
