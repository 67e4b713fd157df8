"""How far the demo is, on standard error: a bar for people, a line now and then for logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from picker.app.demo.load import Outcome

_LINE_SECONDS = 10.0


def say(text: str) -> None:
    """Print one line."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[Outcome], None]]:
    """Show how many of `total` requests are answered; call what is returned with each outcome."""
    show = _bar if sys.stderr.isatty() else _lines
    with show(name, total) as told:
        yield told


@contextmanager
def _bar(name: str, total: int) -> Iterator[Callable[[Outcome], None]]:
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[errors]} errors"),
        TimeElapsedColumn(),
    )
    # Few refreshes: drawing takes time from the load generator, which runs in the same process.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bars:
        errors, bar = 0, bars.add_task(name, total=total, errors=0)

        def told(outcome: Outcome) -> None:
            nonlocal errors
            errors += outcome.error is not None
            bars.update(bar, advance=1, errors=errors)

        yield told


@contextmanager
def _lines(name: str, total: int) -> Iterator[Callable[[Outcome], None]]:
    answered, errors, due = 0, 0, time.monotonic() + _LINE_SECONDS

    def told(outcome: Outcome) -> None:
        nonlocal answered, errors, due
        answered += 1
        errors += outcome.error is not None
        if time.monotonic() >= due:
            say(f"{name}: {answered} of {total} requests, {errors} errors")
            due += _LINE_SECONDS

    yield told
    say(f"{name}: {answered} of {total} requests, {errors} errors")
