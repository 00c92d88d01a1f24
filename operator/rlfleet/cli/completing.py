"""Completion of object names, and the program with which kubectl completes its plugins.

Invariant: completion never fails and never waits long: where the cluster can not be asked, there is nothing to offer.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable

import typer

from rlfleet.cli.cluster import Cluster
from rlfleet.cli.engines import engine_pods
from rlfleet.cli.failures import CliError

#: What cobra, which kubectl is built with, reads after the candidates: do not offer files as well.
_NO_FILES = ":4"


def names(plural: str) -> Callable[[typer.Context, str], list[str]]:
    """A completer with the names of one kind in the namespace that the line names; of pods those that are engines."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        given = ctx.params
        try:
            with Cluster.connect(
                kubeconfig=given.get("kubeconfig"), context=given.get("context"), namespace=given.get("namespace")
            ) as cluster:
                listed = engine_pods(cluster) if plural == "pods" else cluster.list(plural)
                found = [str(o["metadata"]["name"]) for o in listed]
        except CliError:
            return []
        return sorted(n for n in found if n.startswith(incomplete))

    return complete


def kubectl_complete() -> int:
    """``kubectl_complete-rlfleet``: kubectl runs it with the words of the line, the last one unfinished."""
    from rlfleet.cli.app import run

    words = sys.argv[1:] or [""]
    # The protocol of typer's own completion scripts, so both offer the same.
    asked = {"COMP_WORDS": shlex.join(["rlfleet", *words[:-1]]) + f" {words[-1]}", "COMP_CWORD": str(len(words))}
    os.environ |= asked | {"_RLFLEET_COMPLETE": "complete_bash"}
    run([])
    print(_NO_FILES)
    return 0
