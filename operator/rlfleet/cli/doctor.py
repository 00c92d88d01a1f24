"""Command doctor: looks at everything that a fleet rests on, and says what to fix.

Invariant: one thing that can not be looked at keeps nothing else from being looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text
from typer import Exit as Ended

from rlfleet.api import labels
from rlfleet.cli import checks, options
from rlfleet.cli import operator as reach
from rlfleet.cli.checks import Check, Level
from rlfleet.cli.cluster import OURS, Cluster, Obj
from rlfleet.cli.failures import CliError, Exit
from rlfleet.cli.output import Format, dump, show

#: (verb, group, resource) that the commands use, those that only look first.
USED = (
    *(("list", labels.GROUP, kind) for kind in ("rlpipelines", "enginepools", "syncrounds")),
    ("list", "", "pods"),
    ("create", labels.GROUP, "syncrounds"),
    ("patch", labels.GROUP, "syncrounds"),
    ("patch", labels.GROUP, "enginepools"),
    ("patch", "", "pods"),
)
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red", Level.UNKNOWN: "yellow"}


def doctor(
    namespace: options.NamespaceOption = None,
    everywhere: options.EverywhereOption = False,
    output: options.OutputOption = Format.TABLE,
    operator: reach.UrlOption = None,
    token: reach.TokenOption = None,
    operator_namespace: reach.OperatorNamespaceOption = "rlfleet-system",
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Check CRDs, rights, operator, gates, routers, sender, versions, clocks, DRA and memory; say what to fix."""
    with options.cluster(kubeconfig, context, namespace, everywhere=everywhere) as cluster:
        way = reach.Way(cluster, operator, token, operator_namespace, kubeconfig, context)
        found = examine(way)
    failed = any(c.level is Level.FAIL for c in found)
    if output in (Format.JSON, Format.YAML):
        dump({"healthy": not failed, "checks": found}, output)
    else:
        show(drawn(found, wide=output is Format.WIDE))
    if failed:
        raise Ended(int(Exit.PROBLEM))


def examine(way: reach.Way) -> list[Check]:
    """All checks. CliError only where the apiserver itself does not answer."""
    cluster = way.cluster
    found = [_apiserver(cluster), *_attempt("CRDs", lambda: [_crds(cluster)])]
    where = f"namespace {cluster.namespace}" if cluster.namespace else "all namespaces"
    found += _attempt("your rights", lambda: _rights(cluster, where))
    found += _attempt("operator", lambda: [reach.leadership(cluster, way.namespace)])
    try:
        pipelines, pools = cluster.list("rlpipelines"), cluster.list("enginepools")
    except CliError as e:
        return [*found, Check(Level.UNKNOWN, "pipelines and pools", str(e))]
    for p in pipelines:
        found += checks.conditions(p, "RLPipeline")
    for pool in pools:
        found += checks.conditions(pool, "EnginePool")
    found += _attempt("DRA", lambda: checks.dra(pipelines, pools, _classes(cluster, pipelines, pools)))
    if not pipelines:
        return found
    with reach.opened(way) as there:
        for p in pipelines:
            found += _pipeline(there, p, pools)
    return found


def _attempt(what: str, look: Callable[[], Sequence[Check]]) -> list[Check]:
    try:
        return list(look())
    except CliError as e:
        return [Check(Level.UNKNOWN, what, str(e))]


def _apiserver(cluster: Cluster) -> Check:
    response = cluster.send("GET", "/version")
    if response.status_code == 401:
        cluster.call("GET", "/version")  # raises, with what to do
    if cluster.ahead_ms is None:
        return Check(Level.UNKNOWN, "clock of this machine", "the apiserver does not tell the time")
    return checks.clock("this machine", cluster.ahead_ms)


def _crds(cluster: Cluster) -> Check:
    response = cluster.send("GET", f"/openapi/v3{OURS}")
    if response.status_code == 404:
        return checks.crds({})
    return checks.crds(cluster.call("GET", f"/openapi/v3{OURS}"))


def _rights(cluster: Cluster, where: str) -> list[Check]:
    allowed = {
        (verb, resource): cluster.allowed(verb, group, resource, namespace=cluster.namespace)
        for verb, group, resource in USED
    }
    return checks.rights(allowed, where)


def _classes(cluster: Cluster, pipelines: Sequence[Obj], pools: Sequence[Obj]) -> list[str] | None:
    if len(checks.dra(pipelines, pools, None)) == 1 and checks.dra(pipelines, pools, None)[0].level is Level.OK:
        return []  # nobody uses it, so nobody need be allowed to list it
    try:
        return [str(c["metadata"]["name"]) for c in cluster.list("deviceclasses")]
    except CliError as e:
        if e.code is Exit.NOT_FOUND:
            return None
        raise


def _pipeline(way: reach.Way, pipeline: Obj, pools: Sequence[Obj]) -> list[Check]:
    """What its gates and its sender say now, and whether its weights fit."""
    namespace, name = str(pipeline["metadata"]["namespace"]), str(pipeline["metadata"]["name"])
    mine = [p for p in pools if p["metadata"]["namespace"] == namespace and p["spec"].get("pipeline") == name]
    found: list[Check] = []
    total = None
    engines: Sequence[Obj] = ()
    try:
        seen = reach.look(way, namespace, name)["observed"]
        found += checks.live(f"{namespace}/{name}", seen)
        total = (seen["sender"] or {}).get("totalBytes") or None
        engines = seen["engines"]
    except CliError as e:
        found.append(Check(Level.UNKNOWN, f"gates and sender of {namespace}/{name}", f"not looked at: {e}"))
    for pool in mine:
        found += checks.staging(pipeline, pool, total, checks.capacity(pool, engines))
    return found


def drawn(found: Sequence[Check], *, wide: bool) -> RenderableType:
    """The verdicts, what needs somebody first. All that is well in one line each; ``wide``: in full."""
    order = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.OK)
    parts: list[RenderableType] = []
    for check in sorted(found, key=lambda c: order.index(c.level)):
        head = Text(f"{check.level.value:<8} ", style=_STYLES[check.level])
        head.append(check.what, style="bold")
        if check.level is Level.OK and not wide:
            head.append(f": {check.message}", style="default")
            parts.append(head)
            continue
        parts += [head, Padding(Text(check.message), (0, 0, 0, 9))]
        if check.fix and check.fix not in check.message:
            parts.append(Padding(Text(f"-> {check.fix}"), (0, 0, 0, 9)))
    counts = {level: sum(c.level is level for c in found) for level in order}
    parts.append(Text(", ".join(f"{n} {level.value.lower()}" for level, n in counts.items() if n), style="bold"))
    return Group(*parts)
