"""The committed generated code is what proto/ says."""

from __future__ import annotations

import filecmp
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_code_is_current(tmp_path):
    generate = runpy.run_path(str(ROOT / "scripts" / "generate_proto.py"))["generate"]
    generate(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*") if "__pycache__" not in path.parts)
    committed_root = ROOT / "picker" / "_proto"
    committed = sorted(
        path.relative_to(committed_root) for path in committed_root.rglob("*.py*") if "__pycache__" not in path.parts
    )
    assert made == committed
    _, different, unreadable = filecmp.cmpfiles(tmp_path, committed_root, [str(path) for path in made], shallow=False)
    assert (different, unreadable) == ([], []), "run `make proto`"
