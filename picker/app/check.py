"""`picker check`: say whether a configuration can be used, and what it means."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import yaml

from picker.app.config import ConfigError, effective, load_file
from picker.app.config_settings import Config, FileEndpoints
from picker.io.discovery import endpoint_list
from picker.io.file_watch import FileError, read_file


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration file")


def run(args: Namespace) -> int:
    """Print the effective configuration as YAML, and what is odd about it to standard error.

    Returns 0 if it can be used, else 2, after a line for each problem on standard error. The file that `endpoints.file`
    names is checked too; that it does not exist here is only odd.
    """
    try:
        loaded = load_file(args.config)
    except ConfigError as error:
        return _fail(args.config, error)
    for warning in loaded.warnings:
        print(f"{args.config}: warning: {warning}", file=sys.stderr)
    status = _check_endpoints(loaded.config)
    if status == 0:
        print(yaml.safe_dump(effective(loaded.config), sort_keys=False, allow_unicode=True), end="")
    return status


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
