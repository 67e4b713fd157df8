"""`picker demo`: real Envoy, the picker and simulated engines; what routing by prefix cache wins over round robin."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import signal
import sys
from functools import partial

import msgspec
import uvloop
from rich.console import Console

from picker.app.demo import report
from picker.app.demo.children import DemoError
from picker.app.demo.load import MODEL, ROUTE, Outcome, send
from picker.app.demo.progress import progress, say
from picker.app.demo.report import LAGGING_SECONDS, Summary, summarize
from picker.app.demo.stack import Ports, Stack, picker_stack, round_robin_stack
from picker.app.demo.workload import Shape, Workload, plan
from picker.app.envoy import EnvoyError, Template, find_envoy

_KEPT_PORTS = Ports(listener=10_000, extproc=9002, admin=9003, http=9090)
_PLAIN_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `picker demo`."""
    parser.add_argument("--seconds", type=_seconds, default=25.0, help="of traffic for each of them (%(default)s)")
    parser.add_argument("--engines", type=_engines, default=4, help="simulated engines, at least 2 (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the workload; equal seeds, equal requests (%(default)s)"
    )
    parser.add_argument(
        "--template",
        type=Template,
        choices=list(Template),
        default=Template.BUFFERED,
        help="shipped Envoy configuration for the picker (%(default)s)",
    )
    parser.add_argument(
        "--kv-events",
        action="store_true",
        help="also compare kvcache-aware, which goes by the engines' KV events; with --keep, keep that stack up",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    output.add_argument("--keep", action="store_true", help="compare nothing: keep the picker's stack up to try things")
    for option, port, what in (
        ("--port", _KEPT_PORTS.listener, "Envoy's port for clients"),
        ("--extproc-port", _KEPT_PORTS.extproc, "the picker's ext_proc port"),
        ("--admin-port", _KEPT_PORTS.admin, "the picker's admin port"),
        ("--http-port", _KEPT_PORTS.http, "the picker's HTTP port"),
    ):
        parser.add_argument(option, type=_port, help=f"{what} (with --keep {port}, else any free one)")


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns 1 if it could not be run or a request failed, 128 + n if signal n ended it."""
    try:
        find_envoy()
        return uvloop.run(_until_signalled(options))
    except (DemoError, EnvoyError) as error:
        say(f"picker demo: {error}")
        return 1


async def _until_signalled(options: argparse.Namespace) -> int:
    """Run the demo; the first SIGINT or SIGTERM cancels it, so that everything that was started is ended."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(_keep(options) if options.keep else _compare(options))
    received: list[int] = []

    def interrupt(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        say("stopped")
        return 0 if options.keep else 128 + received[0]


async def _compare(options: argparse.Namespace) -> int:
    shape = Shape()
    workload = plan(shape, engines=options.engines, seconds=options.seconds, seed=options.seed)
    ports = _ports(options, Ports())
    print(describe(shape, workload, options.engines), file=sys.stderr if options.json else sys.stdout, flush=True)
    async with round_robin_stack(shape, options.engines, ports) as stack:
        round_robin = await _measure("round robin", stack, workload)
    async with picker_stack(shape, options.engines, ports, options.template) as stack:
        picker = await _measure("picker", stack, workload)
    kvcache_aware = None
    if options.kv_events:
        async with picker_stack(shape, options.engines, ports, options.template, kv_events=True) as stack:
            kvcache_aware = await _measure("kvcache-aware", stack, workload)
    arms = (round_robin, picker, kvcache_aware)
    if options.json:
        given = {name: getattr(options, name) for name in ("seed", "seconds", "engines", "template")}
        print(json.dumps(given | report.as_json(*arms)))
    else:
        Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH).print(report.table(*arms))
    return 1 if any(arm.errors for arm in arms if arm is not None) else 0


async def _measure(name: str, stack: Stack, workload: Workload) -> Summary:
    with progress(name, workload.requests) as told:
        outcomes = await stack.watch(send(stack.url, workload, told))
    summary = summarize(outcomes, stack.engines)
    if summary.errors:
        say(f"{name}: {summary.errors} requests failed, the first: {_first_error(outcomes)}")
    if summary.lagged:
        say(
            f"{name}: the load generator was late by {summary.generator_lateness_p99_ms:.0f} ms (p99; limit "
            f"{LAGGING_SECONDS * 1000:.0f} ms), so its times say little. Try again on an idle machine, or --engines 2"
        )
    return summary


def _first_error(outcomes: list[Outcome]) -> str:
    return next(outcome.error for outcome in outcomes if outcome.error)


def describe(shape: Shape, workload: Workload, engines: int) -> str:
    """The workload, and why it is one where routing matters."""
    together = len(workload.prompts) * shape.prompt_tokens
    return (
        f"{len(workload.sessions)} conversations ({workload.requests} requests) on {len(workload.prompts)} system prompts "
        f"of {shape.prompt_tokens:,} tokens: together {together:,}, more than one engine's KV cache "
        f"({shape.cache_tokens:,}) and less than all {engines} ({shape.cache_tokens * engines:,}), at nearly the rate that "
        "round robin can serve. That is where routing matters."
    )


async def _keep(options: argparse.Namespace) -> int:
    ports = _ports(options, _KEPT_PORTS)
    stack_of = partial(picker_stack, kv_events=options.kv_events)
    async with stack_of(Shape(), options.engines, ports, options.template) as stack:
        request = stack.directory / "request.json"
        (prompt, *_) = plan(Shape(), engines=1, seconds=0, seed=options.seed).prompts
        messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "Which engine are you?"}]
        request.write_bytes(msgspec.json.encode({"model": MODEL, "messages": messages}))
        print(_things_to_try(stack), flush=True)
        await stack.watch(asyncio.Event().wait())
    return 0


def _things_to_try(stack: Stack) -> str:
    request, ports = shlex.quote(str(stack.directory / "request.json")), stack.ports
    command = "picker" if shutil.which("picker") else shlex.join([sys.executable, "-m", "picker"])
    lines = [
        f"Envoy, the picker and {len(stack.engines)} engines are up, until Ctrl-C. Logs: {stack.directory}",
        "",
        "# Twice: the second answer has the same x-engine, and cached_tokens near prompt_tokens",
        f"curl -si {stack.url}{ROUTE} -H 'content-type: application/json' -d @{request}",
        f"curl -si {stack.url}/v1/models",
        "# Why: scores of every engine, as a table, and the last decisions as a page",
        f"{command} explain --admin 127.0.0.1:{ports.admin} --body {request}",
        f"curl -s http://127.0.0.1:{ports.http}/debug/scores",
        f"curl -s http://127.0.0.1:{ports.http}/metrics",
        f"grpcurl -plaintext 127.0.0.1:{ports.admin} list",
        f"grpcurl -plaintext 127.0.0.1:{ports.admin} picker.v1.Scores/Watch",
    ]
    if stack.predict:
        lines += [
            "# Before it is sent: how many tokens of a request are cached where, and what came from the engines",
            f"curl -s http://127.0.0.1:{stack.predict}/v1/cache/predict -d @{request}",
            f"curl -s http://127.0.0.1:{stack.predict}/stats",
        ]
    return "\n".join(lines)


def _ports(options: argparse.Namespace, default: Ports) -> Ports:
    """The ports that were asked for. Raises DemoError if one of them is taken."""
    given = (options.port, options.extproc_port, options.admin_port, options.http_port)
    defaults = (default.listener, default.extproc, default.admin, default.http)
    ports = Ports(*(fallback if port is None else port for port, fallback in zip(given, defaults, strict=True)))
    ports.require_free()
    return ports


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not within 1 .. 3600")
    return seconds


def _engines(text: str) -> int:
    engines = int(text)
    if not 2 <= engines <= 32:
        raise argparse.ArgumentTypeError(f"{text} is not within 2 .. 32: with one engine there is nothing to choose")
    return engines


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 .. 65535")
    return port
