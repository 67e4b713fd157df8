"""The reference documentation is made from the types, and misses nothing."""

from __future__ import annotations

import re

from picker.app.config import effective, load
from picker.app.config_reference import reference_markdown
from picker.core.plugins.registry import PLUGINS

# Before any test has run: Python 3.11 can fail to parse itself once in a process in which something was too deep.
REFERENCE = reference_markdown()


def rows() -> dict[str, list[str]]:
    lines = [line for line in REFERENCE.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def leaves(plain: object, path: str) -> set[str]:
    if isinstance(plain, dict) and plain:
        return {leaf for key, value in plain.items() for leaf in leaves(value, f"{path}.{key}" if path else key)}
    return {path}


def test_every_setting_is_explained_with_its_default():
    documented = rows()
    assert leaves(effective(load("{}").config), "") <= documented.keys()
    assert all(cells[-1] for cells in documented.values())
    assert documented["listen.drainSeconds"][:2] == ["number ≥ 0, ≤ 3600", "`30.0`"]
    assert documented["log.level"][:2] == ["`debug`, `info`, `warning`, `error`", '`"info"`']
    assert documented["endpoints.static[].address"][:2] == ["text", "required"]


def test_every_plugin_and_argument_is_explained():
    documented = rows()
    assert documented.keys() >= PLUGINS.keys()
    assert documented["least-request"][0] == "Filter, Score"
    assert documented["maxHashCacheSize"][1] == "`50000`"
    for plugin in PLUGINS.values():
        for name in plugin.args.__struct_encode_fields__:
            assert any(setting == name or setting.startswith(f"{name}.") for setting in documented), name
