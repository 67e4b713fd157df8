"""What a benchmark found, and how it is shown."""

from __future__ import annotations

import platform
import sys
import sysconfig
from collections.abc import Sequence

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from picker.io.metric_sources import REQUEST_PATH


class Row(Struct, frozen=True):
    """One measurement. `value` has to be at most `budget`, in `unit`; without a budget it is there to be read.

    `measured` says what the value was computed from.
    """

    name: str
    measured: str
    value: float
    unit: str
    budget: float | None = None
    otherwise: bool = False
    """Whether another condition, which `measured` names, was met in the budget's place."""

    @property
    def passed(self) -> bool:
        return self.budget is None or self.value <= self.budget or self.otherwise


def progress(text: str) -> None:
    """Say what is going on, on standard error."""
    print(text, file=sys.stderr, flush=True)


def python_build() -> str:
    """Which Python this is, and whether it was built with profile-guided optimisation as far as it says so."""
    if "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""):
        build = "profile-guided"
    elif sys.base_prefix == "/usr":
        build = "as the distribution builds it"
    else:
        build = "not profile-guided"
    return f"Python {platform.python_version()}, {build}"


def print_table(rows: Sequence[Row]) -> None:
    table = Table(
        "what", "measured", "value", "budget", "", title=f"Budgets ({python_build()}; request path {REQUEST_PATH})"
    )
    for row in rows:
        budget = "" if row.budget is None else f"<= {row.budget:.3g} {row.unit}"
        verdict = "" if row.budget is None else "[green]pass" if row.passed else "[red]FAIL"
        table.add_row(row.name, row.measured, f"{row.value:.3g} {row.unit}", budget, verdict)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def print_json(rows: Sequence[Row]) -> None:
    plain = [{**msgspec.structs.asdict(row), "passed": row.passed} for row in rows]
    print(msgspec.json.format(msgspec.json.encode(plain)).decode())
