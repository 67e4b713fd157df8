"""The certificate of the ext_proc port, as `listen.tls` says."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from picker.app.config_settings import Tls, TlsMode
from picker.core.strict import ConfigError, Findings
from picker.io.file_watch import FileError, read_file
from picker.io.transport.tls import CertificateFiles, CertificateSource, SelfSigned

_MOST_BYTES = 1024 * 1024


def certificate_source(tls: Tls) -> CertificateSource | None:
    """What presents the certificate; None without encryption.

    Raises ConfigError when a file is missing or no good, or the two do not belong together.
    """
    if tls.mode is TlsMode.SELF_SIGNED:
        return SelfSigned(tls.names)
    if tls.mode is TlsMode.OFF:
        return None
    findings = Findings()
    _check_certificate(tls.certificate, findings)
    _check_key(tls.key, findings)
    findings.check()
    try:
        return CertificateFiles(Path(tls.certificate), Path(tls.key), clock=time.monotonic)
    except (OSError, ssl.SSLError) as error:
        remedy = f"name the key that belongs to {tls.certificate}"
        findings.add("listen.tls.key", f"cannot be used with listen.tls.certificate: {error}", tls.key, remedy)
        raise ConfigError(findings.problems) from None


def _check_certificate(path: str, findings: Findings) -> None:
    try:
        x509.load_pem_x509_certificates(read_file(Path(path), _MOST_BYTES))
    except FileError as error:
        findings.add("listen.tls.certificate", str(error), remedy="name the PEM file of the certificate chain")
    except ValueError:
        findings.add("listen.tls.certificate", "has no PEM certificate", path, "name the file of the certificate chain")


def _check_key(path: str, findings: Findings) -> None:
    try:
        load_pem_private_key(read_file(Path(path), _MOST_BYTES), None)
    except FileError as error:
        findings.add("listen.tls.key", str(error), remedy="name the PEM file of the private key")
    except TypeError:
        findings.add("listen.tls.key", "is encrypted", path, "store the private key without a password")
    except (ValueError, UnsupportedAlgorithm):
        findings.add("listen.tls.key", "has no PEM private key", path, "name the file of the private key")
