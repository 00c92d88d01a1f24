"""The commands, put together: what typer parses, and how a command ends.

Invariant: a command ends with a code of ``failures.Exit`` and, where it is not 0, one message on standard error.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from rlfleet.cli import act, asking, bundle, doctor, see
from rlfleet.cli.failures import CliError, Exit
from rlfleet.cli.output import tame

HELP = "Keeps RL inference fleets on the right weights: see and steer pipelines, pools and rounds."
SEE, STEER, FIND = "See", "Steer", "Find out what is wrong"
PANELS = (SEE, FIND, STEER)
EPILOG = "In pods: rlfleet operator, rlfleet gate. Also: rlfleet crds, rlfleet version."
#: Command -> (heading, function).
COMMANDS: dict[str, tuple[str, Callable[..., None]]] = {
    "status": (SEE, see.status),
    "rounds": (SEE, see.rounds),
    "topology": (SEE, see.topology),
    "explain": (FIND, asking.explain),
    "doctor": (FIND, doctor.doctor),
    "support-bundle": (FIND, bundle.support_bundle),
    "sync": (STEER, act.sync),
    "cancel": (STEER, act.cancel),
    "quarantine": (STEER, act.quarantine),
    "release": (STEER, act.release),
    "drain": (STEER, act.drain),
    "wake": (STEER, act.wake),
}


def build(prog: str = "rlfleet") -> typer.Typer:
    """All commands of the user's command line."""
    app = typer.Typer(
        name=prog,
        help=HELP,
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    for name, (panel, function) in COMMANDS.items():
        app.command(name, rich_help_panel=panel)(_ending(function))
    one = typer.Typer(help="One SyncRound.", no_args_is_help=True)
    one.command("show")(_ending(see.round_show))
    app.add_typer(one, name="round", rich_help_panel=SEE)
    return app


def _ending(function: Callable[..., None]) -> Callable[..., None]:
    """Interrupted, or no longer read: typer would end the command as if it had failed."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise SystemExit(int(Exit.INTERRUPTED)) from None
        except BrokenPipeError:
            # Whoever read us has seen enough; without this Python complains while it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(int(Exit.OK)) from None

    return command


def run(arguments: Sequence[str], prog: str = "rlfleet") -> int:
    """Run one command; returns its exit code."""
    try:
        build(prog)(list(arguments), prog_name=prog)
    except CliError as e:
        print(f"{prog}: {tame(str(e))}", file=sys.stderr)
        return int(e.code)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(Exit.OK)
    return int(Exit.OK)
