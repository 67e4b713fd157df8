"""`picker check`: say whether a configuration can be used, and what it means."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from picker.app import flags
from picker.app.config import ConfigError, Loaded, effective
from picker.app.config_settings import Config, FileEndpoints
from picker.io.discovery import endpoint_list
from picker.io.file_watch import FileError, read_file


def add_arguments(parser: ArgumentParser) -> None:
    flags.add_arguments(parser)
    parser.add_argument("--explain", action="store_true", help="show what became of another router's configuration")


def run(args: Namespace) -> int:
    """Print the effective configuration as YAML, and what is odd about it to standard error.

    With `--explain`, print instead what stands for each part of another router's configuration, and what is picked by.
    Returns 0 if it can be used, else 2, after a line for each problem on standard error. The file that `endpoints.file`
    names is checked too; that it does not exist here is only odd.
    """
    name = str(args.config or "the command line")
    try:
        given = flags.read(args, os.environ)
        loaded = flags.load(given)
    except ConfigError as error:
        return _fail(name, error)
    for warning in (*given.warnings, *loaded.warnings):
        print(f"{name}: warning: {warning}", file=sys.stderr)
    status = _check_endpoints(loaded.config)
    if status == 0 and args.explain:
        _explain(loaded)
    elif status == 0:
        print(yaml.safe_dump(effective(loaded.config), sort_keys=False, allow_unicode=True), end="")
    return status


def _explain(loaded: Loaded) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
    if loaded.mapped:
        table = Table("theirs", "here", "remark", title="What became of it", title_justify="left")
        for part in loaded.mapped:
            table.add_row(part.theirs, part.ours or "-", part.remark)
        console.print(table)
    table = Table("plugin", "weight", "arguments", title="What is picked by", title_justify="left")
    for name in loaded.spec.filters:
        table.add_row(name, "filter", _arguments(loaded, name))
    for name, weight in loaded.spec.scorers:
        table.add_row(name, f"{weight:g}", _arguments(loaded, name))
    console.print(table)


def _arguments(loaded: Loaded, name: str) -> str:
    args = loaded.spec.args.get(name)
    if args is None:
        return ""
    defaults, plain = type(args)(), msgspec.to_builtins(args)
    changed = {key: value for key, value in plain.items() if value != msgspec.to_builtins(defaults)[key]}
    return ", ".join(f"{key}: {value}" for key, value in changed.items()) or "defaults"


def _check_endpoints(config: Config) -> int:
    if not isinstance(config.endpoints, FileEndpoints):
        return 0
    path = config.endpoints.file.path
    try:
        endpoint_list.parse(read_file(Path(path), endpoint_list.MOST_BYTES))
    except FileError as error:
        print(f"{path}: warning: {error}", file=sys.stderr)
    except ConfigError as error:
        return _fail(path, error)
    return 0


def _fail(path: str, error: ConfigError) -> int:
    for problem in error.problems:
        print(f"{path}: {problem}", file=sys.stderr)
    return 2
