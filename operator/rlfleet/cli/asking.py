"""Command explain: a dry run by the operator's own planner, on what it observes now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rlfleet.cli import operator as reach
from rlfleet.cli import options, tables
from rlfleet.cli.failures import CliError, Exit
from rlfleet.cli.output import Format, dump, show
from rlfleet.show.facts import version_text

_HEADS = {
    "WouldRun": ("would run", "green"),
    "WouldWait": ("would wait", "yellow"),
    "WouldEnd": ("would end at once", "yellow"),
    "WouldBeRefused": ("would be refused, nothing touched", "red"),
}


def explain(
    pipeline: options.PipelineArgument,
    version: Annotated[
        int | None,
        typer.Option("--version", min=-1, metavar="N", help="Version; default: the newest that the sender holds."),
    ] = None,
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="DIGEST", help="Manifest digest that it must have.")
    ] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="A version below the committed one is meant.")] = False,
    namespace: options.NamespaceOption = None,
    output: options.OutputOption = Format.TABLE,
    operator: reach.UrlOption = None,
    token: reach.TokenOption = None,
    operator_namespace: reach.OperatorNamespaceOption = "rlfleet-system",
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Say what a sync to a version would do now, engine by engine and why. The operator's own planner answers, on what
    it observes at this moment; nothing is changed."""
    with options.cluster(kubeconfig, context, namespace) as cluster:
        home = cluster.home()
        status = cluster.get("rlpipelines", pipeline).get("status") or {}
        if version is None:
            known = status.get("cacheReady") or status.get("committed")
            if not known:
                raise CliError(f"RLPipeline {home}/{pipeline} reports no version: name one with --version", Exit.USAGE)
            version = int(known["version"])
        way = reach.Way(cluster, operator, token, operator_namespace, kubeconfig, context)
        wanted = {"version": str(version)} | ({"digest": digest} if digest else {})
        found = reach.look(way, home, pipeline, **wanted, **({"rollback": "true"} if rollback else {}))
    said = found["explanation"]
    if output in (Format.JSON, Format.YAML):
        dump(said, output)
    else:
        show(explained(f"{home}/{pipeline}", version, said))
    if said["would"] != "WouldRun" and said.get("outcome") != "Succeeded":
        raise typer.Exit(int(Exit.PROBLEM))


def explained(name: str, version: int, said: Mapping[str, Any]) -> RenderableType:
    """The answer, for people."""
    words, style = _HEADS.get(said["would"], (said["would"], ""))
    head = Text(f"{name}: a sync to {version_text(version)} ", style="bold")
    head.append(words, style=style)
    outcome = f" as {said['outcome']}" if said["would"] == "WouldEnd" else ""
    parts: list[RenderableType] = [head, Padding(Text(f"{said['reason']}{outcome}: {said['message']}"), (0, 0, 0, 2))]
    if said.get("ordered"):
        parts.append(Padding(Text(f"ordered already: round {said['ordered']}"), (0, 0, 0, 2)))
    if said["supersedes"]:
        parts.append(Padding(Text(f"supersedes: {', '.join(said['supersedes'])}"), (0, 0, 0, 2)))
    parts += [Padding(Text(f"{i}. {step}"), (0, 0, 0, 2)) for i, step in enumerate(said["steps"], 1)]
    if said["mayMiss"] is not None:
        parts.append(Padding(Text(f"commits if at most {said['mayMiss']} of its engines are missing"), (0, 0, 0, 2)))
    if said["engines"]:
        table = tables.columns("ENGINE", "PART", "RANK", "WHY")
        for e in said["engines"]:
            part = Text(e["transport"], style="green") if e["joins"] else Text("stays out", style="yellow")
            table.add_row(e["engine"], part, "-" if e["rankOffset"] is None else str(e["rankOffset"]), e["why"])
        parts.append(table)
    return Group(*parts)
