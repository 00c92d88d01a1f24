"""``python -m e2e.demo``: the project's main job, end to end, on this machine; ``make demo`` calls it.

Exit codes: 0 everything was as promised, 1 something was not (or could not run), 130 interrupted. Whatever happens,
nothing is left behind, unless KEEP=1 asks for it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from e2e.cluster.hollow.control import HollowError
from e2e.cluster.programs import BuildError
from e2e.demo import colocated, run
from e2e.demo.real import PATIENCE, Real
from e2e.demo.stage import ClusterError, DemoError, Stage
from e2e.engines.environments import ENVIRONMENTS, InstallError, install
from e2e.engines.making import shared_memory
from e2e.engines.namespace import NoNamespace, environment, inside, wrapped

EXIT_BROKEN = 1
EXIT_INTERRUPTED = 130
MINIMUM_VERSIONS = 4
VERSIONS = 30
COLOCATED_VERSIONS = 15
REAL_VERSIONS = 12
#: Engine types by what ENGINE calls them.
REAL = {"sglang": "SGLang", "vllm": "VLLM"}


class Interrupted(BaseException):
    """A signal asked the demo to end. Not an Exception: nothing on the way may take it for a problem of its own."""


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: a second Ctrl-C must not cut the clean-up short.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)


def _clock() -> Callable[[str], None]:
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}" if line else "", flush=True)

    return say


def _versions(text: str) -> int:
    count = int(text)
    if count < MINIMUM_VERSIONS:
        raise argparse.ArgumentTypeError(
            f"must be at least {MINIMUM_VERSIONS}: the reward check needs a beginning and an end"
        )
    return count


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    for flag, default, text in (
        ("--versions", None, f"versions to train and sync (default {VERSIONS}, colocated {COLOCATED_VERSIONS})"),
        ("--unsynced-versions", "10", "versions of the leg without syncs (default 10)"),
    ):
        variable = "DEMO_" + flag[2:].replace("-", "_").upper()
        parser.add_argument(
            flag, type=_versions, default=os.environ.get(variable) or default, help=f"{text}; {variable}"
        )
    parser.add_argument(
        "--scenario",
        choices=("disjoint", "colocated"),
        default=os.environ.get("SCENARIO") or "disjoint",
        help="disjoint: two of four engines on devices of their own; colocated: trainer and engines take turns on the "
        "same ones (SCENARIO; disjoint)",
    )
    parser.add_argument(
        "--engine",
        choices=("reference", *REAL),
        default=(os.environ.get("ENGINE") or "reference").lower(),
        help="what runs in the engines' pods: the reference engine, or a real one on this CPU, in a network namespace "
        "(ENGINE; reference)",
    )
    parser.add_argument("--state", type=Path, help="an empty folder for everything (default: a temporary one)")
    parser.add_argument(
        "--keep", action="store_true", default=os.environ.get("KEEP") == "1", help="leave it running (or KEEP=1)"
    )
    options = parser.parse_args(arguments)
    if options.engine in REAL and (options.keep or options.scenario != "disjoint"):
        parser.error(
            f"--engine {options.engine}: neither --keep nor another scenario; nobody could look into its network"
        )
    return options


def _enter(engine: str, arguments: list[str]) -> NoReturn:
    """Install the engine while there is a network, then start anew where there is none. Does not return."""
    say = _clock()
    install(REAL[engine], say)
    command = wrapped([sys.executable, "-m", "e2e.demo", *arguments])
    os.execvpe(command[0], command, environment())


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo and cleans up."""
    options = _arguments(arguments)
    if options.engine in REAL and not inside():
        try:
            _enter(options.engine, sys.argv[1:] if arguments is None else arguments)
        except (InstallError, NoNamespace) as error:
            print(f"demo failed: {error}", file=sys.stderr)
            return EXIT_BROKEN
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _interrupt)
    say = _clock()
    state = options.state or Path(tempfile.mkdtemp(prefix="rlfleet-demo-"))
    real = Real(REAL[options.engine], state.with_name(state.name + "-models")) if options.engine in REAL else None
    stage = Stage(
        state,
        say,
        guarded=not options.keep,
        recast=real.recast if real else None,
        patience=PATIENCE if real else 1.0,
    )
    keep = False
    try:
        code = EXIT_BROKEN
        try:
            if options.scenario == "colocated":
                holds = colocated.play(stage, options.versions or COLOCATED_VERSIONS, say)
            elif real:
                with shared_memory():
                    say("making a checkpoint for the engines to start with")
                    real.prepare(ENVIRONMENTS[real.engine].python)
                    holds = run.play(stage, options.versions or REAL_VERSIONS, options.unsynced_versions, say, real)
            else:
                holds = run.play(stage, options.versions or VERSIONS, options.unsynced_versions, say)
            code = 0 if holds else EXIT_BROKEN
        except (DemoError, ClusterError, BuildError, HollowError, RuntimeError) as error:
            print(f"\ndemo failed: {error}", file=sys.stderr)
            for title, lines in getattr(error, "logs", []):
                print(f"--- {title}", *lines, sep="\n    ", file=sys.stderr)
            sys.stderr.flush()
        keep = options.keep
        if keep:
            run.print_keep(stage)
        return code
    except Interrupted as error:
        print(f"\ninterrupted ({error})", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    finally:
        if not keep:
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(name, signal.SIG_IGN)
            say("cleaning up")
            stage.down()
            if real:
                shutil.rmtree(real.models, ignore_errors=True)
            if options.state is None and state.exists():
                state.rmdir()
            say("no process and no file of the demo is left")


if __name__ == "__main__":
    sys.exit(main())
