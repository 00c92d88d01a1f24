"""The ``rlfleet`` command (also ``kubectl rlfleet``).

Invariant: a subcommand imports what it needs when it runs: ``rlfleet gate`` in an engine pod loads no operator code,
and the user's commands (rlfleet.cli, extra ``cli``) load neither.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

#: Commands of the processes in pods; all others are the user's.
OWN = frozenset({"operator", "gate", "crds", "version"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (2: wrong usage or settings)."""
    wanted = list(sys.argv[1:] if argv is None else argv)
    if wanted[:1] and wanted[0] in OWN:
        return _own(wanted)
    try:
        from rlfleet.cli import app
    except ModuleNotFoundError as e:
        if e.name not in ("typer", "rich", "click", "shellingham"):
            raise
        what = f"{wanted[0]!r}" if wanted else "this"
        print(f"rlfleet: {what} needs the command line's extra: pip install 'rlfleet[cli]'", file=sys.stderr)
        return 2
    plugin = os.path.basename(sys.argv[0]).startswith("kubectl-")
    return app.run(wanted, "kubectl rlfleet" if plugin else "rlfleet")


def _own(wanted: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rlfleet", description="Keeps RL inference fleets on the right weights.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    operator = commands.add_parser("operator", help="run the operator (flags; environment in parentheses)")
    commands.add_parser("gate", help="run the sidecar of an engine pod (configured by its environment)")
    crds = commands.add_parser("crds", help="print the CustomResourceDefinitions as YAML")
    crds.add_argument("--output", metavar="DIRECTORY", help="write one file per kind instead")
    commands.add_parser("version", help="print the version")
    if wanted[:1] == ["operator"]:
        from rlfleet.app import settings

        settings.add_arguments(operator)
    arguments = parser.parse_args(wanted)
    match arguments.command:
        case "operator":
            return _operator(arguments)
        case "gate":
            from rlfleet.gate.main import main as gate

            return gate([])
        case "crds":
            return _crds(arguments.output)
        case _:
            from rlfleet import __version__

            print(__version__)
            return 0


def _operator(arguments: argparse.Namespace) -> int:
    import asyncio
    import os

    from rlfleet import logs
    from rlfleet.app import settings
    from rlfleet.app.operator import Operator

    try:
        chosen = settings.load(arguments)
        chosen.authorities()
    except settings.SettingsError as e:
        print(f"rlfleet operator: {e}", file=sys.stderr)
        return 2
    if chosen.kubeconfig:
        os.environ["KUBECONFIG"] = chosen.kubeconfig  # the only way to tell kopf's own login
    logs.configure(chosen.log_format, chosen.log_level)

    async def run() -> int:
        return await Operator(chosen).run()

    return asyncio.run(run())


def _crds(directory: str | None) -> int:
    from pathlib import Path

    from rlfleet.api import crdgen

    for kind in crdgen.KINDS:
        if directory is None:
            print(f"---\n{crdgen.crd_yaml(kind)}", end="")
        else:
            target = Path(directory)
            target.mkdir(parents=True, exist_ok=True)
            (target / kind.file).write_text(crdgen.crd_yaml(kind), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
