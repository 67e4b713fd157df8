"""`picker explain`: ask a running picker how it would score a prompt. Routes nothing."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from picker._proto.picker.v1 import scores_pb2, scores_pb2_grpc

_TIMEOUT_SECONDS = 10.0
_PLAIN_WIDTH = 160
_FIRST = {
    "pinned": "the session is pinned to the destination, whatever the scores say",
    "probe": "the destination kept failing, and is tried again",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `picker explain`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text, scored as POST /v1/completions")
    source.add_argument("--body", metavar="FILE", help="the exact JSON body of a request; - reads standard input")
    parser.add_argument("--path", default="", help="request path of --body (default /v1/chat/completions)")
    parser.add_argument("--model", default="", help="model for --prompt; a body names its own")
    parser.add_argument(
        "--header",
        metavar="NAME:VALUE",
        action="append",
        default=[],
        help="a header of the request, such as that of its session; may be repeated",
    )
    parser.add_argument("--admin", metavar="HOST:PORT", default="127.0.0.1:9003", help="admin port of the picker")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: Namespace) -> int:
    """Ask, print, and return the exit code: 1, with one line on standard error, when there is no answer."""
    try:
        decision = _ask(args.admin, _request(args))
    except OSError as error:
        return _failed(f"cannot read {error.filename!r}: {error.strerror}")
    except UnicodeEncodeError:
        return _failed("an argument is not UTF-8; send the request body from a file with --body")
    except ValueError as error:
        return _failed(str(error))
    except grpc.RpcError as error:
        return _failed(_remedy(error, args.admin))
    if args.json:
        print(json.dumps(_plain(decision), indent=2))
    else:
        _print_tables(decision)
    return 0


def _request(args: Namespace) -> scores_pb2.ExplainRequest:
    request = scores_pb2.ExplainRequest(path=args.path, model=args.model)
    if args.body is not None:
        request.body = sys.stdin.buffer.read() if args.body == "-" else Path(args.body).read_bytes()
    else:
        request.prompt = args.prompt
    for header in args.header:
        name, colon, value = header.partition(":")
        if not colon:
            raise ValueError(f"--header {header!r} has no colon; write NAME:VALUE")
        request.headers[name.strip().lower()] = value.strip()
    return request


def _ask(address: str, request: scores_pb2.ExplainRequest) -> scores_pb2.Decision:
    # A proxy from the environment would stand between the operator and a picker on the same network.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = scores_pb2_grpc.ScoresStub(channel)  # type: ignore[no-untyped-call]
        decision: scores_pb2.Decision = stub.Explain(request, timeout=_TIMEOUT_SECONDS)
        return decision


def _remedy(error: grpc.RpcError, address: str) -> str:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.UNAVAILABLE:
        return (
            f"no picker answers on {address} ({details}). Is `picker serve` running, and is this its `listen.admin`? "
            "Name another with --admin"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"{address} is not the admin port of a picker: it has no picker.v1.Scores. Name `listen.admin` with --admin"
        )
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return str(details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return f"the prompt or body is too long to be explained; send a shorter one ({details})"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"{address} did not answer within {_TIMEOUT_SECONDS:.0f} s: it is overloaded or not a gRPC server"
    return f"{address} answered {code.name}: {details}"


def _failed(message: str) -> int:
    print(f"picker explain: {message}", file=sys.stderr)
    return 1


def _plain(decision: scores_pb2.Decision) -> dict[str, Any]:
    plain = MessageToDict(decision, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for endpoint in plain["endpoints"]:
        for plugin in endpoint["plugins"]:
            # JSON of protobuf writes 64-bit integers as strings; these are small.
            plugin["matched"], plugin["total"] = int(plugin["matched"]), int(plugin["total"])
    return plain


def _print_tables(decision: scores_pb2.Decision) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    microseconds = sum(decision.step_microseconds.values())
    model, path = _safe(decision.model or "(none)"), _safe(decision.path)
    console.print(Text(f"model {model}, path {path}, decided in {microseconds:.0f} µs", "dim"))
    if decision.prompt_unused:
        console.print(Text(f"routed by load alone, the prompt is unused: {decision.prompt_unused}", "yellow"))
    if decision.tokens_from:
        console.print(Text(f"prompt of {decision.prompt_tokens:,.0f} tokens, by {_safe(decision.tokens_from)}", "dim"))
    for result in decision.filters:
        console.print(Text(f"filter {_safe(result.filter)} left {result.remaining}", "dim"))
    if not decision.destinations:
        console.print(Text(f"refused: {decision.reason}", "bold red"))
        return
    if decision.first:
        console.print(Text(_FIRST.get(decision.first, decision.first), "yellow"))
    console.print(_table(decision))
    if decision.prefill_destination:
        console.print(Text(f"the prompt is computed at {_safe(decision.prefill_destination)} before", "dim"))
    console.print(Text(_safe(decision.why)))


def _table(decision: scores_pb2.Decision) -> Table:
    plugins = decision.endpoints[0].plugins
    counted = bool(decision.tokens_from)
    priced = any(endpoint.cost_tokens for endpoint in decision.endpoints)
    timed = any(endpoint.cost_milliseconds for endpoint in decision.endpoints)
    table = Table(caption="scores are 0..100 and count by their weight; ▶ is the destination, then its fallbacks")
    table.add_column("", justify="right")
    table.add_column("endpoint")
    table.add_column("address")
    for plugin in plugins:
        table.add_column(Text(f"{_safe(plugin.plugin)} ×{plugin.weight:g}"), justify="right")
    table.add_column("sum", justify="right")
    table.add_column("in flight", justify="right")
    if counted:
        table.add_column("uncached", justify="right")
        table.add_column("queued", justify="right")
    if priced:
        table.add_column("cost, tokens", justify="right")
    if timed:
        table.add_column("cost, ms", justify="right")
    for endpoint in decision.endpoints:
        chosen = endpoint.address == decision.destinations[0]
        picked = endpoint.address in decision.destinations
        costs = [f"{endpoint.uncached_tokens:,.0f}", f"{endpoint.queued_tokens:,.0f}"] if counted else []
        costs += [f"{endpoint.cost_tokens:,.0f}"] if priced else []
        costs += [f"{endpoint.cost_milliseconds:,.0f}" if endpoint.cost_milliseconds else "–"] if timed else []
        table.add_row(
            _mark(decision, endpoint),
            Text(_safe(f"{endpoint.namespace}/{endpoint.name}")),
            Text(_safe(endpoint.address)),
            *map(_score, endpoint.plugins),
            Text(f"{endpoint.total:.4g}", "bold"),
            str(endpoint.in_flight),
            *costs,
            style="bold green" if chosen else "" if picked else "dim",
        )
    return table


def _mark(decision: scores_pb2.Decision, endpoint: scores_pb2.EndpointScore) -> str:
    if endpoint.address != decision.destinations[0]:
        return str(endpoint.rank)
    return f"{_safe(decision.first)} ▶ {endpoint.rank}".lstrip()


def _score(plugin: scores_pb2.PluginScore) -> str:
    matched = f"  ({plugin.matched}/{plugin.total} {plugin.unit})" if plugin.unit else ""
    return f"{plugin.score:g}{matched}"


def _safe(text: str) -> str:
    """Without characters that could move the cursor or colour the terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
