"""The README says what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from picker.core.plugins.registry import PLUGINS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MADE = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))
TEXTS = [page.read_text() for page in MADE["PAGES"]]
# Before any test has run: Python 3.11 can fail to parse itself once in a process in which something was too deep.
RENDERED = [MADE["render"](text) for text in TEXTS]


def test_generated_tables_are_current():
    assert RENDERED == TEXTS, "run `make docs`"
    marked = re.findall(r"<!-- generated: (.*) -->", "".join(TEXTS))
    assert sorted(marked) == sorted(MADE["TABLES"])


def test_every_plugin_is_described():
    described = set(re.findall(r"^\| `([a-z-]+)` \| (?:filter|scorer|producer)", README, re.MULTILINE))
    assert described == set(PLUGINS)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_run_time_dependency_has_its_reason():
    declared = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert declared
    names = set(re.findall(r'"([a-z0-9-]+)', declared[1]))
    table = README.partition("## Dependencies")[2].partition("## ")[0]
    assert {name for name in names if name not in table} == set()
