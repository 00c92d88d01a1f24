"""``python -m tests.model [--large] [NAME...]``: explore the scopes and print what was found."""

from __future__ import annotations

import argparse
import sys

from tests.model.explore import explore, stuck
from tests.model.scopes import ENDING, ENDING_LARGE, LARGE, SCOPES


def main() -> int:
    """Explore; 1 when an invariant breaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.model")
    parser.add_argument("--large", action="store_true", help="the scopes of `make fault`, too")
    parser.add_argument("--limit", type=int, default=10**9, help="states after which a scope is left unfinished")
    parser.add_argument("names", nargs="*", help="only scopes whose name contains one of these")
    args = parser.parse_args()
    broken = 0
    for scope in (*SCOPES, *(LARGE if args.large else ())):
        if not args.names or any(n in scope.name for n in args.names):
            report = explore(scope, limit=args.limit)
            print(report, flush=True)
            broken += bool(report.broken)
    for scope in (*ENDING, *(ENDING_LARGE if args.large else ())):
        if not args.names or any(n in scope.name for n in args.names):
            report, _ = stuck(scope, limit=args.limit)
            print(f"ends: {report}", flush=True)
            broken += bool(report.broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
