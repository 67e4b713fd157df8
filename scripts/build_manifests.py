"""Write the manifests that are made of other files: `install.yaml`, and the plain Envoy's configuration.

Usage: python scripts/build_manifests.py
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "manifests"
_SERVICES = {"inference": ("model-servers-pods", 8000), "picker": ("picker", 9002)}
_CLUSTER = """\
      # A headless Service: its name resolves to every pod that is ready.
      type: STRICT_DNS
      dns_refresh_rate: 1s
      load_assignment:
        cluster_name: {name}
        endpoints:
          - lb_endpoints:
              - endpoint: {{address: {{socket_address: {{address: {service}.inference.svc.cluster.local, port_value: {port}}}}}}}
"""


def install() -> str:
    """The files of the base in a row, with their comments."""
    order = yaml.safe_load((MANIFESTS / "base/kustomization.yaml").read_text())["resources"]
    return "".join("---\n" + (MANIFESTS / "base" / name).read_text() for name in order)


def envoy() -> str:
    """`envoy/buffered.yaml` with names of Services in the place of addresses."""
    text = (ROOT / "envoy/buffered.yaml").read_text()
    text = re.sub(
        r"\A# Envoy in front .*\n",
        "# envoy/buffered.yaml of the repository, but for the addresses, which are names of Services here.\n",
        text,
    )
    for name, (service, port) in _SERVICES.items():
        below = rf"(    - name: {name}\n)      # CHANGE.*?(?=      (?:#[^\n]*\n      )?connect_timeout)"
        made = _CLUSTER.format(name=name, service=service, port=port)
        text, count = re.subn(below, lambda found, made=made: found[1] + made, text, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"envoy/buffered.yaml has no cluster {name} with addresses to change")
    return text


if __name__ == "__main__":
    (MANIFESTS / "install.yaml").write_text(install())
    (MANIFESTS / "components/envoy/envoy.yaml").write_text(envoy())
