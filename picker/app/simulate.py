"""`picker simulate`: replay traffic in simulated time, profiles side by side. Sends nothing anywhere."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from picker.app.config import ConfigError, load_file
from picker.core.strict import suggest
from picker.simulate import page, profiles, report, tables, traces
from picker.simulate.families import FAMILIES, generate
from picker.simulate.profiles import Profile
from picker.simulate.replay import Run, replay
from picker.simulate.report import Row
from picker.simulate.workload import Workload, sheddable

_MOST_ENGINES = 4096
_PLAIN_WIDTH = 160
_LINE_SECONDS = 10.0

Told = Callable[[str, float], None]
"""Called with what runs and the share of a run that was done since the call before."""
Planned = tuple[float | None, int, Callable[[], Workload]]
"""Load, seed, and what makes the workload: only one is in memory at a time."""


class _UsageError(ValueError):
    """Arguments that do not fit together."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `picker simulate`."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        (
            "families:",
            *(f"  {name:<18}{family.summary}" for name, family in FAMILIES.items()),
            "\nprofiles:",
            *(f"  {name:<18}{profile.summary}" for name, profile in profiles.BUILT_IN.items()),
        )
    )
    many = "extend"  # every occurrence adds to the list
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--family", action=many, type=_families, metavar="NAME,...", help="kinds of traffic (default F1)"
    )
    traffic.add_argument("--load", action=many, type=_loads, metavar="PERCENT,...", help="of the capacity (default 70)")
    traffic.add_argument("--trace", action="append", metavar="FILE", help="recorded traffic: Mooncake or chat requests")
    traffic.add_argument("--speed", type=_positive, default=1.0, metavar="TIMES", help="replay traces faster or slower")
    traffic.add_argument(
        "--seed", action=many, type=_seeds, metavar="N,...", help="of traffic and of choices (default 1)"
    )
    traffic.add_argument("--sheddable", type=_share, metavar="PERCENT", help="sessions that may be refused (default 0)")
    length = traffic.add_mutually_exclusive_group()
    length.add_argument("--requests", type=_count, metavar="N", help="how many; of families, a third warms up")
    length.add_argument("--seconds", type=_positive, metavar="N", help="how long a family lasts, in simulated time")
    compared = parser.add_argument_group("what is compared")
    default = ",".join(profiles.DEFAULT)
    compared.add_argument("--profiles", action=many, type=_profiles, metavar="NAME,...", help=f"(default {default})")
    compared.add_argument("--config", action=many, type=_configured, metavar="NAME=FILE", help="a picker.yaml, as NAME")
    engines = parser.add_argument_group("engines")
    engines.add_argument("--engines", type=_engines, default=8, metavar="N", help="how many (default 8)")
    engines.add_argument(
        "--slow-engine", action=many, type=_slow, metavar="NUMBER=TIMES", help="one so many times slower"
    )
    engines.add_argument(
        "--stuck-engine", action=many, type=_stuck, metavar="NUMBER", help="one that hangs after warming up"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON in the place of tables")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")


def run(args: Namespace) -> int:
    """Simulate, print, and return the exit code: 2, with a line for each problem, for what cannot be simulated."""
    try:
        compared = _compared(args)
        replayed = _replayed(args)
        plan = list(_plan(args))
        if args.html is not None:
            args.html.touch()  # what cannot be written is better known before a long run
    except (_UsageError, OSError) as error:
        print(f"picker simulate: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    with _progress(len(plan) * len(compared)) as told:
        for load, seed, make in plan:
            workload = make()
            if args.sheddable:
                workload = sheddable(workload, args.sheddable, seed)
            rows += [_row(replayed, workload, profile, load, seed, told) for profile in compared]
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report.as_json(rows))).decode())
    else:
        out = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        for table in tables.tables(rows):
            out.print(table)
    if args.html is not None:
        args.html.write_text(page.page(rows, engines=args.engines), encoding="utf-8")
    return 0


def _replayed(args: Namespace) -> Callable[..., Run]:
    """What replays on the engines asked for."""
    slow, stuck = dict(args.slow_engine or ()), frozenset(args.stuck_engine or ())
    beyond = [number for number in (*slow, *stuck) if number >= args.engines]
    if beyond:
        raise _UsageError(f"there is no engine {beyond[0]}: give 0 .. {args.engines - 1}, or more --engines")
    return partial(replay, engines=args.engines, slow=slow, stuck=stuck)


def _row(
    replayed: Callable[..., Run], workload: Workload, profile: Profile, load: float | None, seed: int, told: Told
) -> Row:
    label = f"{report.cell(workload.name, load)}, seed {seed}, {profile.name}"
    told(label, 0.0)
    share = 1 / max(workload.calls, 1)
    done = replayed(workload, profile, seed=seed, told=lambda calls: told(label, calls * share))
    return report.row(done, load=load, seed=seed, profile=profile.name)


def _compared(args: Namespace) -> list[Profile]:
    """The profiles asked for, those of configuration files after the built-in ones."""
    configured: list[Profile] = args.config or []
    names = args.profiles or ([] if configured else profiles.DEFAULT)
    chosen = [profiles.BUILT_IN[name] for name in names] + configured
    by_name = {profile.name: profile for profile in chosen}
    if len(by_name) < len(chosen):
        raise _UsageError("two profiles have one name; give each its own, as in --config mine=picker.yaml")
    return chosen


def _plan(args: Namespace) -> Iterator[Planned]:
    """Every workload asked for. Traces are read at once, so that what is wrong with them is said before long runs."""
    seeds = args.seed or [1]
    if args.trace and (args.family or args.load or args.seconds):
        raise _UsageError("--trace has its own traffic: leave out --family, --load and --seconds, or leave out --trace")
    for path in args.trace or ():
        trace = _trace(path, args.speed, args.requests)
        for seed in seeds:
            yield None, seed, lambda trace=trace: trace  # type: ignore[misc]
    if args.trace:
        return
    sizes = {"engines": args.engines, "seconds": args.seconds, "requests": args.requests}
    for family in args.family or ["F1"]:
        for load in [None] if FAMILIES[family].capacity is None else args.load or [0.7]:
            for seed in seeds:
                yield load, seed, partial(generate, family, load=load, seed=seed, **sizes)


def _trace(path: str, speed: float, requests: int | None) -> Workload:
    try:
        with Path(path).open("rb") as file:
            lines = iter(partial(file.readline, traces.MOST_LINE_BYTES + 1), b"")
            trace = traces.read(Path(path).name, lines, speed=speed, requests=requests)
    except traces.TraceError as error:
        raise _UsageError(f"{path}: no line can be used: {error}") from None
    if trace.skipped:
        counts = ", ".join(f"{number} {reason}" for reason, number in trace.skipped.items())
        print(f"{path}: warning: lines left out: {counts}; {trace.first}", file=sys.stderr)
    return trace.workload


@contextmanager
def _progress(runs: int) -> Iterator[Told]:
    """A bar on standard error for people, a line now and then for logs."""
    if not sys.stderr.isatty():
        due = time.monotonic() + _LINE_SECONDS
        done = 0.0

        def told(label: str, share: float) -> None:
            nonlocal due, done
            done += share
            if time.monotonic() >= due:
                print(f"{done / runs:.0%} {label}", file=sys.stderr, flush=True)
                due += _LINE_SECONDS

        yield told
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bars:
        bar = bars.add_task("", total=runs)
        pending = 0.0

        def shown(label: str, share: float) -> None:
            nonlocal pending
            pending += share
            if pending >= 0.01 or not share:  # drawing costs more than simulating
                bars.update(bar, advance=pending, description=label)
                pending = 0.0

        yield shown


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _known(text: str, known: Iterable[str], what: str) -> list[str]:
    names = _split(text)
    for name in names:
        if name not in known:
            raise ArgumentTypeError(f"unknown {what} {name!r}; {suggest(name, known)}")
    return names


def _families(text: str) -> list[str]:
    return _known(text, FAMILIES, "family")


def _profiles(text: str) -> list[str]:
    return _known(text, profiles.BUILT_IN, "profile")


def _configured(text: str) -> list[Profile]:
    name, _, path = text.rpartition("=")
    try:
        loaded = load_file(path)
    except ConfigError as error:
        raise ArgumentTypeError("; ".join(f"{path}: {problem}" for problem in error.problems)) from None
    scrape, admission = loaded.config.scrape.interval_seconds, loaded.config.admission
    return [profiles.configured(name or Path(path).stem, path, loaded.spec, scrape, admission)]


def _loads(text: str) -> list[float]:
    return [_positive(part.removesuffix("%")) / 100 for part in _split(text)]


def _share(text: str) -> float:
    return min(_positive(text.removesuffix("%")) / 100, 1.0)


def _seeds(text: str) -> list[int]:
    return [_whole(part, 0, 2**63 - 1) for part in _split(text)]


def _slow(text: str) -> list[tuple[int, float]]:
    number, _, times = text.partition("=")
    return [(_whole(number, 0, _MOST_ENGINES - 1), _positive(times))]


def _stuck(text: str) -> list[int]:
    return [_whole(part, 0, _MOST_ENGINES - 1) for part in _split(text)]


def _engines(text: str) -> int:
    return _whole(text, 1, _MOST_ENGINES)


def _count(text: str) -> int:
    return _whole(text, 1, 100_000_000)


def _whole(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e9:
        raise ArgumentTypeError(f"{text!r} is no number greater than 0")
    return value
