"""Where the API server is and how to prove who we are: from inside the cluster, or from a kubeconfig.

A pod finds the API server in its environment and its credentials in files that the kubelet replaces: a token lasts an
hour. A kubeconfig is what `kubectl` reads. Both are some files to read, which is why no client library is needed.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from picker.io.file_watch import FileError, read_file

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MOST_BYTES = 1024 * 1024
_IN_CLUSTER = "outside of a cluster name a kubeconfig"


class AccessError(Exception):
    """The API server cannot be asked; the text says what is missing and what to do."""


class Access(Struct, frozen=True, kw_only=True):
    """Where an API server is, and what to show it. `server` is a URL without a slash at its end.

    `token_file` is read at each request, since it is replaced; `token` is one that stays. Certificates and keys are
    PEM. `namespace` is the one that is meant when none is named.
    """

    server: str
    namespace: str = "default"
    authority: str | None = None
    verify: bool = True
    server_name: str | None = None
    token: str = ""
    token_file: Path | None = None
    certificate: str = ""
    key: str = ""

    def headers(self) -> dict[str, str]:
        """The headers that authenticate a request. Raises AccessError when the token cannot be read."""
        token = self.token
        if self.token_file is not None:
            token = _read(self.token_file, "the token").strip()
            if not token.isascii() or not token.isprintable():
                raise AccessError(f"the token in {self.token_file} is no token; write it anew")
        return {"authorization": f"Bearer {token}"} if token else {}

    def tls(self) -> ssl.SSLContext | None:
        """The context for connections; None for a plaintext server. Raises AccessError."""
        if not self.server.startswith("https://"):
            return None
        try:
            context = ssl.create_default_context(cadata=self.authority)
            # Authorities of clusters often lack the key identifiers that newer versions of Python insist on.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.certificate:
                _load(context, self.certificate, self.key)
        except (ssl.SSLError, ValueError) as error:
            raise AccessError(f"the certificates for {self.server} cannot be used: {error}") from None
        return context


def in_cluster(environment: Mapping[str, str] = os.environ, directory: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access that every pod has. Raises AccessError outside of a cluster."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise AccessError(f"KUBERNETES_SERVICE_HOST is not set, so this is no pod of a cluster; {_IN_CLUSTER}")
    if not (directory / "token").exists():
        raise AccessError(
            f"{directory}/token does not exist; set automountServiceAccountToken: true for the pod of the picker"
        )
    host = f"[{host}]" if ":" in host else host
    namespace = directory / "namespace"
    return Access(
        server=f"https://{host}:{port}",
        namespace=_read(namespace, "the namespace").strip() if namespace.exists() else "default",
        authority=_read(directory / "ca.crt", "the certificate authority"),
        token_file=directory / "token",
    )


def from_kubeconfig(path: Path, context: str = "") -> Access:
    """Return the access that a kubeconfig gives with a context, its current one if none is named. Raises AccessError."""
    try:
        document = yaml.safe_load(_read(path, "the kubeconfig"))
    except (yaml.YAMLError, RecursionError) as error:
        raise AccessError(f"{path} is no YAML: {error}") from None
    name = context or _text(document, "current-context", path)
    if not name:
        raise AccessError(f"{path} has no current-context; name one")
    chosen = _entry(document, "contexts", "context", name, path)
    cluster = _entry(document, "clusters", "cluster", _text(chosen, "cluster", path), path)
    user_name = _text(chosen, "user", path)
    user = _entry(document, "users", "user", user_name, path) if user_name else {}
    server = _text(cluster, "server", path).rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise AccessError(f"{path}: server {server!r} of the cluster is no URL; write https://host:port")
    for unread in ("exec", "auth-provider", "username"):
        if unread in user:
            raise AccessError(
                f"{path}: user {user_name!r} authenticates by {unread}, which is not done here; "
                "write a tokenFile or a token (kubectl create token), or a client certificate"
            )
    if "proxy-url" in cluster:
        raise AccessError(f"{path}: proxy-url is not done here; name a server that can be reached")
    token_file = _text(user, "tokenFile", path)
    return Access(
        server=server,
        namespace=_text(chosen, "namespace", path) or "default",
        authority=_pem(cluster, "certificate-authority", path) or None,
        verify=cluster.get("insecure-skip-tls-verify") is not True,
        server_name=_text(cluster, "tls-server-name", path) or None,
        token="" if token_file else _text(user, "token", path),
        token_file=path.parent / token_file if token_file else None,
        certificate=_pem(user, "client-certificate", path),
        key=_pem(user, "client-key", path),
    )


def _read(path: Path, what: str) -> str:
    try:
        return read_file(path, _MOST_BYTES).decode()
    except (FileError, UnicodeDecodeError) as error:
        raise AccessError(f"{what} cannot be read: {error}") from None


def _entry(document: Any, section: str, key: str, name: str, path: Path) -> Mapping[str, Any]:
    entries = document.get(section) if isinstance(document, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(key), dict):
            found: Mapping[str, Any] = entry[key]
            return found
    raise AccessError(f"{path} has no {key} {name!r} in {section}; run kubectl config view to see what it has")


def _text(entry: Any, name: str, path: Path) -> str:
    value = entry.get(name, "") if isinstance(entry, dict) else None
    if not isinstance(value, str):
        raise AccessError(f"{path}: {name} is not text")
    return value


def _pem(entry: Mapping[str, Any], name: str, path: Path) -> str:
    """A PEM that stands in the file itself, or in one of its own."""
    data = _text(entry, f"{name}-data", path)
    if data:
        try:
            return base64.b64decode(data, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise AccessError(f"{path}: {name}-data is no base64 of a PEM") from None
    file = _text(entry, name, path)
    return _read(path.parent / file, name) if file else ""


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Give a context a client certificate, which it takes from files only; those are readable for us alone."""
    with tempfile.TemporaryDirectory(prefix="picker-") as directory:
        files = [Path(directory) / name for name in ("certificate", "key")]
        for file, content in zip(files, (certificate, key), strict=True):
            file.touch(mode=0o600)
            file.write_text(content)
        context.load_cert_chain(files[0], files[1], password="")
