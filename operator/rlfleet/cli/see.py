"""Commands that show: status, rounds, round show, topology. They read and change nothing."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from rlfleet.cli import operator as reach
from rlfleet.cli import options, tables
from rlfleet.cli.checks import Check, Level
from rlfleet.cli.cluster import Cluster
from rlfleet.cli.failures import CliError
from rlfleet.cli.output import Format, Tamed, console, dump, show, tame
from rlfleet.show import rounds as round_view
from rlfleet.show.facts import document
from rlfleet.show.fleet import Pipeline, fleet
from rlfleet.show.topology import topology as places_of

_SECONDS = Annotated[
    float,
    typer.Option("--interval", metavar="SECONDS", min=0.2, max=3600, help="Seconds between two looks of --watch."),
]


def status(
    pipeline: options.OnePipelineArgument = None,
    namespace: options.NamespaceOption = None,
    everywhere: options.EverywhereOption = False,
    output: options.OutputOption = Format.TABLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again whenever it changes.")] = False,
    interval: _SECONDS = 2.0,
    operator_namespace: reach.OperatorNamespaceOption = "rlfleet-system",
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Show pipelines, pools and engines: state, version, fence, transport, GPUs, and what is wrong.

    Above the table it is said when no operator leads: then all of it is what one saw before.
    """
    with options.cluster(kubeconfig, context, namespace, everywhere=everywhere) as cluster:

        def seen() -> _Seen:
            return _Seen(_fleet(cluster, pipeline), _leads(cluster, operator_namespace))

        if not watch:
            _show(seen(), output)
            return
        _watch(seen, output, interval)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One look. ``leads``: whether an operator keeps what is shown up to date."""

    fleet: tuple[Pipeline, ...]
    leads: Check


def _leads(cluster: Cluster, namespace: str) -> Check:
    try:
        return reach.leadership(cluster, namespace, Level.UNKNOWN)
    except CliError as e:
        return Check(Level.UNKNOWN, "operator", f"whether one leads is not known: {e}")


def _fleet(cluster: Cluster, pipeline: str | None) -> tuple[Pipeline, ...]:
    found = fleet(cluster.list("rlpipelines"), cluster.list("enginepools"), cluster.list("syncrounds"))
    if pipeline is None:
        return found
    chosen = tuple(p for p in found if p.name == pipeline)
    if not chosen:
        cluster.get("rlpipelines", pipeline)  # says that it is not there, and where we looked
    return chosen


def _tree(seen: _Seen, output: Format) -> RenderableType:
    encoding = (sys.stdout.encoding or "").lower()
    tree = tables.status_tree(seen.fleet, wide=output is Format.WIDE, ascii_only=not encoding.startswith("utf"))
    return tree if seen.leads.level is Level.OK else Group(tables.warning(seen.leads), tree)


def _show(seen: _Seen, output: Format) -> None:
    if output in (Format.JSON, Format.YAML):
        dump({"operator": seen.leads, "pipelines": seen.fleet}, output)
    else:
        show(_tree(seen, output))


class _Patience:
    """Waits between two looks. Raises KeyboardInterrupt after a Ctrl-C that Python has dropped.

    It drops whatever is raised while an object's finalizer runs, and a watch would go on for ever.
    """

    def __init__(self) -> None:
        self._interrupted = False

    def __enter__(self) -> _Patience:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def wait(self, seconds: float) -> None:
        """Sleep, unless a Ctrl-C was dropped before."""
        if self._interrupted:
            raise KeyboardInterrupt
        time.sleep(seconds)


def _watch(look: Callable[[], _Seen], output: Format, interval: float) -> None:
    """On a terminal one picture that changes in place; elsewhere one block for each change."""
    with _Patience() as patience:
        _look(look, output, lambda: patience.wait(interval))


def _look(look: Callable[[], _Seen], output: Format, wait: Callable[[], None]) -> None:
    screen = console()
    if output in (Format.JSON, Format.YAML) or not screen.is_terminal:
        last: Any = None
        while True:
            seen = look()
            # Not the words on the operator: they tell for how long it has been away.
            now = (document(seen.fleet), seen.leads.level)
            if now != last:
                _show(seen, output)
                sys.stdout.flush()
                last = now
            wait()
    with Live(console=screen, auto_refresh=False, transient=False) as live:
        while True:
            live.update(Tamed(_tree(look(), output)), refresh=True)
            wait()


def rounds(
    pipeline: options.OnePipelineArgument = None,
    namespace: options.NamespaceOption = None,
    everywhere: options.EverywhereOption = False,
    output: options.OutputOption = Format.TABLE,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many, newest first.")] = 20,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """List SyncRounds, newest first: outcome, bar of phase timings, share of the time in which engines were paused."""
    with options.cluster(kubeconfig, context, namespace, everywhere=everywhere) as cluster:
        found = round_view.rounds(cluster.list("syncrounds"), pipeline=pipeline, limit=limit)
        if not found and pipeline is not None and not everywhere:
            cluster.get("rlpipelines", pipeline)
    if output in (Format.JSON, Format.YAML):
        dump({"rounds": found}, output)
        return
    show(tables.rounds_table(found, options.now_ms(), wide=output is Format.WIDE, namespaces=everywhere))


def round_show(
    name: options.RoundArgument,
    namespace: options.NamespaceOption = None,
    output: options.OutputOption = Format.TABLE,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Show one SyncRound: phases, members, tries to move it, and why it failed with what to do."""
    with options.cluster(kubeconfig, context, namespace) as cluster:
        obj = cluster.get("syncrounds", name)
    found, members = round_view.round_of(obj), round_view.members(obj)
    attempts = (obj.get("status") or {}).get("attempts") or []
    if output in (Format.JSON, Format.YAML):
        more = {
            "meaning": round_view.meaning((found.failure or {}).get("reason", "")),
            "remedy": round_view.remedy(found),
        }
        dump({**document(found), **more, "members": members, "attempts": attempts}, output)
        return
    show(tables.round_page(found, members, attempts, options.now_ms()))


def topology(
    namespace: options.NamespaceOption = None,
    everywhere: options.EverywhereOption = False,
    output: options.OutputOption = Format.TABLE,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Show nodes and devices, and who holds them: engines, trainers, demands."""
    with options.cluster(kubeconfig, context, namespace, everywhere=everywhere) as cluster:
        nodes: list[str] = []
        try:
            nodes = [n["metadata"]["name"] for n in cluster.list("nodes")]
        except CliError as e:
            console(err=True).print(tame(f"nodes without engines are not shown: {e}"))
        found = places_of(cluster.list("rlpipelines"), cluster.list("enginepools"), nodes)
    if output in (Format.JSON, Format.YAML):
        dump({"devices": found}, output)
        return
    show(tables.topology_table(found, wide=output is Format.WIDE))
