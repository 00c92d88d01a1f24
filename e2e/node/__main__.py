"""Command line of the real node: ``python -m e2e.node up|down|status|image|load``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from e2e.cluster.controlplane import ClusterError
from e2e.cluster.local import kubectl_hint
from e2e.cluster.programs import BuildError
from e2e.node import host
from e2e.node.cluster import DEFAULT_STATE, RealNode
from e2e.node.images import TARGETS, Builder, name_of


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.node", description="One real Kubernetes node (root, Linux).")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("up", "start the node and bring the built images into it"),
        ("down", "stop every process and remove every file but the caches"),
        ("status", "processes, and how to use the cluster"),
        ("check", "whether a node can run on this machine; missing packages are installed with INSTALL=1 or CI=true"),
        ("guard", "wait until standard input ends, then take the node down (started by its owner)"),
    ):
        commands.add_parser(name, help=text).add_argument("--state", type=Path, default=DEFAULT_STATE)
    image = commands.add_parser("image", help="build the images (default: all) and report their sizes")
    # Python 3.11 checks the default of an empty list as if it were one choice.
    image.add_argument(
        "targets", nargs="*", choices=[[], *TARGETS], default=[], metavar="TARGET", help=", ".join(TARGETS)
    )
    image.add_argument(
        "--base", default=os.environ.get("BASE", ""), help="base image (default: made of Debian packages)"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; problems go to standard error with exit code 1."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (ClusterError, BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def wants_install() -> bool:
    """Whether missing Debian packages are to be installed: on a CI machine, or when asked."""
    return os.environ.get("INSTALL") == "1" or os.environ.get("CI", "").lower() in ("1", "true")


def _run(options: argparse.Namespace) -> int:
    if options.command == "image":
        Builder(_say, base=options.base, install=wants_install()).build(options.targets or TARGETS)
        return 0
    if options.command == "check":
        host.require({**host.NODE_PACKAGES, **host.COMPILER, **host.IMAGE_PACKAGES}, _say, install=wants_install())
        host.try_out()
        _say("a real node can run here")
        return 0
    node = RealNode(options.state, _say, install=wants_install())
    if options.command == "up":
        builder = Builder(_say, install=wants_install())  # it names what is missing, before anything runs
        try:
            node.up()
        except BaseException:
            node.down()
            raise
        for target in builder.built():
            builder.load(node, name_of(target))
        for line in kubectl_hint(node):
            _say(f"  {line}")
    elif options.command == "down":
        found = node.state.exists()
        node.down()
        _say(f"the node in {node.state} is gone" if found else f"no node in {node.state}")
    elif options.command == "guard":
        # Whoever ends everything of this checkout ends the owner too, and its node has yet to be taken down.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdin.buffer.read()
        node.down()
    elif options.command == "status":
        for name, process in node.processes().items():
            alive = process is not None and process.alive()
            _say(f"{name:26} {'running' if alive else 'STOPPED':8} {process.pid if process else '-'}")
        if not node.running():
            _say(f"no node in {node.state}, or parts of it do not run: 'make node'")
            return 1
        for line in kubectl_hint(node):
            _say(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
