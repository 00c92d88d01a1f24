"""Commands that change something: sync, cancel, drain, wake, quarantine, release.

Invariant: each writes one declarative thing through the apiserver and says what the operator will make of it; none
touches an engine, a gate or a status.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from rlfleet.api import labels
from rlfleet.cli import options
from rlfleet.cli.cluster import Cluster, Obj
from rlfleet.cli.engines import is_engine
from rlfleet.cli.failures import CliError, Exit, explained
from rlfleet.cli.output import Format, console, dump, show, tame
from rlfleet.client import Client, errors
from rlfleet.show.facts import document, duration, version_text

#: Seconds for the operator to report the sender: who orders by hand does not wait for a trainer to start.
ORDER_SECONDS = 10.0


def sync(
    pipeline: options.PipelineArgument,
    version: Annotated[
        int | None,
        typer.Option("--version", min=-1, metavar="N", help="Version; default: the newest that the sender holds."),
    ] = None,
    digest: Annotated[
        str | None,
        typer.Option("--digest", metavar="DIGEST", help="Manifest digest that it must have; needed with checkpoints."),
    ] = None,
    retries: Annotated[int, typer.Option("--retries", min=0, metavar="N", help="New tries after one that failed.")] = 0,
    rollback: Annotated[bool, typer.Option("--rollback", help="A version below the committed one is meant.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="Seconds to wait; the round goes on.")
    ] = 1800.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end of the round.")] = True,
    namespace: options.NamespaceOption = None,
    output: options.OutputOption = Format.TABLE,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Bring a version that the sender holds into all engines, as the trainer's client.sync does."""
    err = console(err=True)
    with options.cluster(kubeconfig, context, namespace) as cluster:
        home = cluster.home()
        if version is None:
            ready = (cluster.get("rlpipelines", pipeline).get("status") or {}).get("cacheReady")
            if not ready:
                raise CliError(
                    f"RLPipeline {home}/{pipeline} reports no complete weights at its sender: publish some, or name a "
                    "--version (with checkpoints: --version and --digest)"
                )
            version = int(ready["version"])
    last = ["", ""]

    def say(phase: str, detail: str) -> None:
        if [phase, detail] != last:
            last[:] = [phase, detail]
            err.print(tame(f"{phase}: {detail}" if detail else phase))

    with explained(), Client(home, pipeline, kubeconfig, context=context) as client:
        how: dict[str, Any] = {"manifest_digest": digest, "retries": retries, "allow_rollback": rollback}
        how |= {"sender_timeout": ORDER_SECONDS, "timeout": timeout}
        try:
            done = client.sync(version, on_progress=say, **how) if wait else client.order(version, **how)
        except errors.SyncError as e:
            raise told(e, home) from e
    if isinstance(done, str):
        if output in (Format.JSON, Format.YAML):
            dump({"version": version, "round": done}, output)
        else:
            show(f"syncround/{done} asked for; see: rlfleet round show {done} -n {home}")
    elif output in (Format.JSON, Format.YAML):
        dump(document(done), output)
    elif done.already_committed:
        show(f"{version_text(version)} is committed already: nothing was asked for")
    else:
        total = duration(done.timings.get("totalMs"))
        paused = duration(done.timings.get("pausedMs"))
        show(f"{version_text(version)} is served: round {done.round}, {total}, engines paused for {paused}")


def told(e: errors.SyncError, namespace: str) -> CliError:
    """The SDK's error in the words of the command line: its remedies are calls of the SDK."""
    see = f"see: rlfleet round show {e.round} -n {namespace}"
    if isinstance(e, errors.SyncTimeout):
        stop = f"stop it: rlfleet cancel {e.round} -n {namespace}"
        text = f"SyncRound {e.round} was {e.phase} when the time was over, and goes on; {see}; {stop}"
        return CliError(text, Exit.TIMEOUT)
    if isinstance(e, errors.HoldingNeedsAction):
        return CliError(f"{str(e).split('. It goes on')[0]}. It goes on meanwhile; {see}")
    text = str(e).replace("sync(..., allow_rollback=True)", "--rollback").replace("sync(..., retries=1)", "--retries 1")
    return CliError(f"{text}; {see}" if e.round else text)


def cancel(
    name: options.RoundArgument,
    namespace: options.NamespaceOption = None,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Ask a running round to stop (spec.cancel). It acts until engines load; after that what they hold decides."""
    with options.cluster(kubeconfig, context, namespace) as cluster:
        outcome = (cluster.get("syncrounds", name).get("status") or {}).get("outcome")
        if outcome:
            raise CliError(f"SyncRound {cluster.home()}/{name} has ended ({outcome}): there is nothing to cancel")
        cluster.merge("syncrounds", name, {"spec": {"cancel": True}})
        home = cluster.home()
    show(f"syncround/{name}: cancel asked for; its end: rlfleet round show {name} -n {home}")


def drain(
    pool: options.PoolArgument,
    to: Annotated[int, typer.Option("--to", min=0, max=1024, metavar="N", help="Engines that stay awake.")] = 0,
    namespace: options.NamespaceOption = None,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Let engines of a pool finish their requests and give up their GPUs (spec.active)."""
    with options.cluster(kubeconfig, context, namespace) as cluster:
        spec = cluster.get("enginepools", pool)["spec"]
        refuse_empty_drain(f"{cluster.home()}/{pool}", spec, to)
        cluster.merge("enginepools", pool, {"spec": {"active": to}})
        how = how_they_go(spec)
        home = cluster.home()
    show(f"enginepool/{pool}: at most {to} engines stay awake; the others {how}. Undo: rlfleet wake {pool} -n {home}")


def refuse_empty_drain(name: str, spec: Obj, to: int) -> None:
    """CliError where nobody would go to sleep. How many engines an adopted pool has its spec does not say."""
    replicas = int(spec.get("replicas", 1))
    if "template" in spec["source"] and to >= replicas:
        raise CliError(
            f"EnginePool {name} has spec.replicas {replicas}: --to {to} would put nobody to sleep; give a smaller "
            "number",
            Exit.USAGE,
        )


def wake(
    pool: options.PoolArgument,
    to: Annotated[
        int | None,
        typer.Option("--to", min=1, max=1024, metavar="N", help="Engines that are to be awake; default: all."),
    ] = None,
    namespace: options.NamespaceOption = None,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Take back a drain: engines wake and serve once they hold the committed version (spec.active)."""
    with options.cluster(kubeconfig, context, namespace) as cluster:
        cluster.get("enginepools", pool)
        cluster.merge("enginepools", pool, {"spec": {"active": to}})
    show(f"enginepool/{pool}: {'all' if to is None else f'up to {to}'} engines are to be awake")


def how_they_go(spec: Obj) -> str:
    """What becomes of engines that are put to sleep."""
    placement = (spec.get("placement") or {}).get("mode", "Scheduler")
    # Adopted pods are never deleted.
    shrink = spec.get("shrink") or (
        "Delete" if placement == "Scheduler" and "template" in spec["source"] else "Offload"
    )
    return "lose their pods (spec.shrink Delete)" if shrink == "Delete" else "sleep and release their device memory"


def quarantine(
    engine: options.EngineArgument,
    reason: Annotated[str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; shown to everybody.")] = "",
    namespace: options.NamespaceOption = None,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Take one engine out of service and keep it so: closed, out of every router, member of no round."""
    text = reason.strip() or f"by {os.environ.get('USER') or 'a person'} at the command line"
    if len(text) > labels.MAX_QUARANTINE_REASON:
        raise CliError(f"--reason has {len(text)} characters, at most {labels.MAX_QUARANTINE_REASON} fit", Exit.USAGE)
    with options.cluster(kubeconfig, context, namespace) as cluster:
        _annotate(cluster, engine, text)
        home = cluster.home()
    show(f"pod/{engine}: quarantined; the operator closes it between rounds. Undo: rlfleet release {engine} -n {home}")


def release(
    engine: options.EngineArgument,
    namespace: options.NamespaceOption = None,
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Take back a quarantine: the engine serves again once it is proven to hold the committed version."""
    with options.cluster(kubeconfig, context, namespace) as cluster:
        pod = _annotate(cluster, engine, None)
    marked = labels.QUARANTINE in (pod["metadata"].get("annotations") or {})
    what = "released; it opens once it holds the committed version" if marked else "was not quarantined by a person"
    show(f"pod/{engine}: {what}")


def _annotate(cluster: Cluster, engine: str, text: str | None) -> Obj:
    """Set or remove the annotation; the pod as it was before."""
    try:
        pod = cluster.get("pods", engine)
    except CliError as e:
        if e.code is Exit.NOT_FOUND:
            raise CliError(
                f"there is no pod {engine!r} in namespace {cluster.home()!r}: engines are named as rlfleet status "
                "shows them",
                Exit.NOT_FOUND,
            ) from e
        raise
    if not is_engine(cluster, pod):
        raise CliError(f"pod {cluster.home()}/{engine} is no engine of an EnginePool: see rlfleet status", Exit.USAGE)
    # The resourceVersion: what was looked at is what is changed, not a later pod of the name.
    meta = {"resourceVersion": pod["metadata"]["resourceVersion"], "annotations": {labels.QUARANTINE: text}}
    cluster.merge("pods", engine, {"metadata": meta})
    return pod
