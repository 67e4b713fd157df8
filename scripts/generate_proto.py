"""Compile proto/ into picker/_proto, under a private import root so that no other package's names are taken.

Usage: python scripts/generate_proto.py [OUTPUT_DIRECTORY]
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("envoy/service/ext_proc/v3/external_processor.proto", "picker/v1/scores.proto")
WITH_SERVICES = ("picker/v1/scores.proto",)


def generate(output: Path) -> None:
    """Write message classes, their stubs and the admin service's gRPC code below `output`.

    Raises SystemExit when protoc refuses a source.
    """
    output.mkdir(parents=True, exist_ok=True)
    include = ["-I", str(ROOT / "proto"), "-I", str(files("grpc_tools") / "_proto")]
    for arguments, sources in (
        ([f"--python_out={output}", f"--pyi_out={output}"], SOURCES),
        ([f"--grpc_python_out={output}"], WITH_SERVICES),
    ):
        if protoc.main(["protoc", *include, *arguments, *sources]) != 0:
            raise SystemExit("protoc failed")
    for module in output.rglob("*_grpc.py"):
        text = module.read_text()
        module.write_text(re.sub(r"^from picker\.", "from picker._proto.picker.", text, flags=re.MULTILINE))
    for folder in [output, *(path for path in output.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
        (folder / "__init__.py").write_text("")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "picker" / "_proto")
