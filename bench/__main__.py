"""`python -m bench`: measure, print the table of budgets, and fail if one is missed."""

from __future__ import annotations

import argparse
import sys

from bench import affinity, decision, extproc, kv, policies, sessions, sharing
from bench.report import Row, print_json, print_table


def _sessions() -> list[Row]:
    return sessions.run() + affinity.run()


_BENCHMARKS = {
    "decision": decision.run,
    "extproc": extproc.run,
    "kv": kv.run,
    "sessions": _sessions,
    "sharing": sharing.run,
    "policies": policies.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", metavar="NAME", choices=_BENCHMARKS, help=f"one of {', '.join(_BENCHMARKS)}")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, run in _BENCHMARKS.items():
        if options.only in (None, name):
            rows += run()
    (print_json if options.json else print_table)(rows)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
