"""Options that several commands share, and what every command does with them.

Invariant: an option has one spelling, one help text and one meaning, whichever command it stands on.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from rlfleet.cli.cluster import Cluster
from rlfleet.cli.completing import names
from rlfleet.cli.output import Format

NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="Namespace; default: that of the kubeconfig's context."),
]
EverywhereOption = Annotated[bool, typer.Option("--all-namespaces", "-A", help="All namespaces.")]
KubeconfigOption = Annotated[
    str | None,
    typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig; default: KUBECONFIG, in a pod its account."),
]
ContextOption = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; default: the current one.")
]
OutputOption = Annotated[
    Format, typer.Option("--output", "-o", help="table, wide, json or yaml.", metavar="FORMAT", show_default="table")
]
PipelineArgument = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="Name of the RLPipeline.", autocompletion=names("rlpipelines"))
]
OnePipelineArgument = Annotated[
    str | None, typer.Argument(metavar="PIPELINE", help="Only this RLPipeline.", autocompletion=names("rlpipelines"))
]
PoolArgument = Annotated[
    str, typer.Argument(metavar="POOL", help="Name of the EnginePool.", autocompletion=names("enginepools"))
]
RoundArgument = Annotated[
    str, typer.Argument(metavar="ROUND", help="Name of the SyncRound.", autocompletion=names("syncrounds"))
]
EngineArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENGINE",
        help="Name of the engine's pod, as status shows it.",
        autocompletion=names("pods"),
    ),
]


def cluster(kubeconfig: str | None, context: str | None, namespace: str | None, *, everywhere: bool = False) -> Cluster:
    """The cluster that the options mean."""
    return Cluster.connect(kubeconfig=kubeconfig, context=context, namespace=namespace, everywhere=everywhere)


def now_ms() -> int:
    """Milliseconds since the epoch: ages are shown by this machine's clock."""
    return time.time_ns() // 1_000_000
