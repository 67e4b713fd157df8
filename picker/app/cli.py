"""The `picker` command: one subcommand a face."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import picker

_COMMANDS = {
    "serve": ("picker.app.serve", "run the endpoint picker"),
    "check": ("picker.app.check", "validate a configuration and print the effective one"),
    "explain": ("picker.app.explain", "ask a running picker how it would score a prompt"),
    "sidecar": ("picker.app.sidecar", "run the sidecar of an engine, a drop-in for Kthena's runtime"),
    "engine-sim": ("picker.sim.command", "run a simulated vLLM engine that needs no GPU"),
    "simulate": ("picker.app.simulate", "replay traffic in simulated time, policies side by side"),
    "demo": ("picker.app.demo", "run real Envoy, the picker and simulated engines, and compare with round robin"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status.

    Only the chosen command's module is imported, so that `picker check` starts without a server's libraries.
    """
    parser = argparse.ArgumentParser(
        prog="picker", description="An Envoy endpoint picker for LLM inference: routes by prefix cache and load."
    )
    parser.add_argument("--version", action="version", version=f"picker {picker.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # gRPC's own lines of C++ would stand between those of the log; what matters comes as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("-") and given[0] not in {"-h", "--help", "--version"}:
        given.insert(0, "serve")  # the flags of an endpoint picker, whose image has no commands
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            loaded = import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    options = parser.parse_args(given)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever reads the output has enough of it, such as `head`. Python would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
