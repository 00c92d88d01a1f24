"""``python -m e2e.engines install | test``: the real engines' environments, and the tests that need them.

``test`` runs pytest with the marker ``engines`` in a network namespace of its own: torch's rendezvous stores and some
engines listen on every interface, which must not be anybody's network. It needs root for that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from e2e.engines.environments import ENVIRONMENTS, InstallError, install, outdated
from e2e.engines.namespace import NoNamespace, environment, wrapped
from tests.netns import ROOT


def _install(engines: list[str]) -> int:
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}", flush=True)

    for engine in engines:
        try:
            install(engine, say)
        except InstallError as error:
            print(f"make engines failed: {error}", file=sys.stderr)
            return 1
    for folder in outdated():
        say(f"not used any more: rm -r {folder}")
    return 0


def _test(arguments: list[str]) -> int:
    # Without a path among them, all tests are looked through.
    where = [] if any((ROOT / a.partition("::")[0]).exists() for a in arguments) else ["e2e/scenarios", "tests"]
    command = [sys.executable, "-m", "pytest", "-m", "engines", *where, *arguments]
    try:
        command = wrapped(command)
    except NoNamespace as error:
        print(f"make test-engines failed: {error}", file=sys.stderr)
        return 1
    paths = {"PYTHONPATH": f"{ROOT}/operator:{ROOT}"}
    return subprocess.run(command, cwd=ROOT, env=environment() | paths, check=False).returncode


def main() -> int:
    """Parse and run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e.engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("install", help="make the environments that are not there yet")
    made.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    commands.add_parser("test", help="run the tests with real engines; further arguments (paths, -k, -m) go to pytest")
    known, rest = parser.parse_known_args()
    if known.command == "test":
        return _test(rest)
    unknown = [e for e in known.engines if e not in ENVIRONMENTS]
    if unknown or rest:
        parser.error(f"unknown: {' '.join([*unknown, *rest])}")
    return _install(known.engines or list(ENVIRONMENTS))


if __name__ == "__main__":
    sys.exit(main())
