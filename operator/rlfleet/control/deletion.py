"""How our objects end: rounds are settled, engines closed under a final claim, finalizers removed.

Invariants:
- a pipeline goes only after its rounds are settled and every engine of it is proven closed, or after the ceiling;
- the ceiling is watched by a reconcile of its own, so that nothing a round waits for can delay it;
- nothing is created for an object that is being deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.api.conditions import ConditionStatus, PipelineCondition, Reason
from rlfleet.api.timestamps import epoch_ms
from rlfleet.api.v1alpha1.rlpipeline_status import OperationKind
from rlfleet.control.peers import Caller
from rlfleet.control.queue import After, Done, Result
from rlfleet.control.rounds.finished import finished
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import API_SECONDS, WRITE_TRIES, Ledger
from rlfleet.control.rounds.objects import is_terminal
from rlfleet.control.rounds.outcome import settled
from rlfleet.control.rounds.settling import end_round
from rlfleet.control.saying import say
from rlfleet.control.slot import keep_slot, own_work, take_slot
from rlfleet.kube.errors import Conflict, NotFound, Unavailable, Unknown
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import ENGINEPOOLS, RLPIPELINES, SYNCROUNDS, Resource
from rlfleet.plan.deletion import (
    FINALIZERS,
    belongs,
    holds_up,
    is_deleting,
    overdue,
    seconds_left,
    still_open,
    waits_for,
)

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.control.pipeline_view import PipelineView

log = logging.getLogger(__name__)
Obj = dict[str, Any]

KINDS: dict[str, Resource] = {r.plural: r for r in (RLPIPELINES, ENGINEPOOLS, SYNCROUNDS)}
#: Seconds between two looks at what a deletion waits for.
LOOK_SECONDS = 1.0
#: Seconds that one order gets to close an engine before all are looked at again.
ORDER_SECONDS = 15.0


# ---------------------------------------------------------------------------------------------- finalizers


async def release(ctx: Context, res: Resource, obj: Obj, *, ceiling: str = "") -> None:
    """Remove our finalizer from this object (by UID). ``ceiling``: what it still waited for, to be said aloud."""
    kube = ctx.kube.at(Priority.DELETE)
    finalizer, meta = FINALIZERS[res.plural], obj["metadata"]
    live = obj
    for attempt in range(WRITE_TRIES):
        finalizers = list(live["metadata"].get("finalizers") or [])
        if live["metadata"]["uid"] != meta["uid"] or finalizer not in finalizers:
            return
        try:
            await kube.patch_metadata(
                res,
                meta["namespace"],
                meta["name"],
                resource_version=live["metadata"]["resourceVersion"],
                finalizers=[f for f in finalizers if f != finalizer],
                timeout=API_SECONDS,
            )
            break
        except NotFound:
            return
        except (Conflict, Unknown, Unavailable):
            if attempt == WRITE_TRIES - 1:
                raise
            await asyncio.sleep(0.05 * 2**attempt)
            try:
                live = await kube.get(res, meta["namespace"], meta["name"], timeout=API_SECONDS)
            except NotFound:
                return
    ctx.metrics.write(res.plural)
    if ceiling:
        ctx.metrics.finalizer_ceiling(res.kind)
        ctx.events.record(obj, "Warning", Reason.FINALIZER_CEILING.value, ceiling, action="Finalize")
        log.error("%s", ceiling, extra={"kind": res.kind, "object": f"{meta['namespace']}/{meta['name']}"})


async def release_overdue(ctx: Context, res: Resource, obj: Obj) -> bool:
    """Remove our finalizer if its ceiling is reached; True: it was."""
    if not overdue(obj, FINALIZERS[res.plural], now_ms=ctx.now_ms()):
        return False
    said = ""
    for c in (obj.get("status") or {}).get("conditions") or []:
        if c.get("type") == "Progressing" and c.get("status") == "True":
            said = f"; it said: {c.get('message')}"
    await release(
        ctx, res, obj, ceiling=f"our finalizer was removed after the ceiling{said}; see {res.kind} in the docs"
    )
    return True


async def watch_deletion(ctx: Context, namespace: str, what: str) -> Result:
    """One object that is being deleted (``<plural>/<name>``): say what it waits for, and keep the ceiling."""
    plural, _, name = what.partition("/")
    res = KINDS[plural]
    kube = ctx.kube.at(Priority.DELETE)
    try:
        obj = await kube.get(res, namespace, name, timeout=API_SECONDS)
    except NotFound:
        ctx.metrics.deleting(res.kind, namespace, name, None)
        return Done()
    if not holds_up(obj, FINALIZERS[plural]) or await release_overdue(ctx, res, obj):
        ctx.metrics.deleting(res.kind, namespace, name, None)
        return Done()
    ctx.metrics.deleting(res.kind, namespace, name, epoch_ms(obj["metadata"]["deletionTimestamp"]) / 1000)
    if res is RLPIPELINES:
        await _say_waiting(ctx, obj)
    return After(min(LOOK_SECONDS * 2, seconds_left(obj, now_ms=ctx.now_ms()) + 0.1), Priority.DELETE)


async def _say_waiting(ctx: Context, pipeline: Obj) -> None:
    """While a round of a deleting pipeline runs, its executor writes no condition of the pipeline: this does."""
    meta, status = pipeline["metadata"], pipeline.get("status") or {}
    active = status.get("activeOperation")
    if not active or active["uid"] == meta["uid"]:
        return  # the final claim says for itself what it waits for
    listed = await ctx.kube.at(Priority.DELETE).list(SYNCROUNDS, meta["namespace"], timeout=API_SECONDS)
    message = waits_for(listed.items, active, ())
    if message:
        kube, kind = ctx.kube.at(Priority.DELETE), PipelineCondition.PROGRESSING
        await say(ctx, kube, RLPIPELINES, pipeline, kind, ConditionStatus.TRUE, Reason.TERMINATING, message)


# ---------------------------------------------------------------------------------------------- pipeline


async def end_pipeline(
    ctx: Context, ledger: Ledger, view: PipelineView, rounds: list[Obj], *, blocked: tuple[Reason, str] | None
) -> Result:
    """An RLPipeline that is being deleted and has no round in its slot: settle, close, let go.

    Engines are closed under a claim of their own, the last one of this pipeline: nothing that was ordered before it can
    open an engine afterwards. Pools outlive their pipeline; their engines stay closed until another pipeline of that
    name takes them over. ``blocked``: why nothing can be claimed; then the ceiling decides.
    """
    await _end_rounds(ledger, rounds)
    if not holds_up(ledger.pipeline, FINALIZERS[RLPIPELINES.plural]):
        return Done()  # never claimed: its gates have never opened an engine
    if blocked is not None:
        await view.write_if_changed((Reason.TERMINATING, f"can not close engines: {blocked[1]}"), trouble=blocked)
        return After(LOOK_SECONDS * 5, Priority.DELETE)
    if any(not e.gone and not (e.unborn and e.status is None) for e in view.fleet.engines.values()):
        await _close_engines(ctx, ledger, view)
    await release(ctx, RLPIPELINES, ledger.pipeline)
    return Done()


async def _end_rounds(ledger: Ledger, rounds: Iterable[Obj]) -> None:
    for r in rounds:
        if not is_terminal(r):
            message = (
                f"RLPipeline {ledger.name} is being deleted: it takes no rounds any more. Wait until it is gone, "
                "create it again, and sync with the new one"
            )
            await end_round(ledger, r, outcome="Cancelled", reason=Reason.PIPELINE_DELETING, message=message)
            continue
        ledger.round = r
        await ledger.set_finalizer(False)
    ledger.round = None


async def _late_rounds(ledger: Ledger) -> list[Obj]:
    """Rounds that were ordered since the deletion began."""
    listed = await ledger.kube.list(SYNCROUNDS, ledger.namespace, timeout=API_SECONDS)
    mine = [r for r in listed.items if r["spec"]["pipeline"] == ledger.name and belongs(r, pipeline=ledger.uid)]
    return [r for r in mine if not is_terminal(r)]


async def _close_engines(ctx: Context, ledger: Ledger, view: PipelineView) -> None:
    """The final claim: every engine out of its routers, paused, and without staged bytes; until the ceiling at most."""
    fleet = Fleet.of(ctx, ledger)
    operation = own_work(ledger, OperationKind.QUARANTINE.value)
    clock = ctx.clock.monotonic
    # Not for as long as elsewhere: whoever can be closed now is, and an engine at which something runs counts as open.
    caller = await take_slot(
        ledger,
        fleet,
        operation,
        deadline=lambda: clock() + ORDER_SECONDS,
        extra=_status(view, "closes its engines"),
    )
    view.bind(fleet)
    left = await _close_once(ctx, fleet, caller)
    while left:
        await view.write_if_changed((Reason.TERMINATING, left), trouble=None)
        await asyncio.sleep(LOOK_SECONDS)
        await ledger.still_ours()
        await _end_rounds(ledger, await _late_rounds(ledger))
        if not holds_up(ledger.pipeline, FINALIZERS[RLPIPELINES.plural]):
            return  # the ceiling was reached
        caller = await keep_slot(ledger, fleet, operation, deadline=clock)
        left = await _close_once(ctx, fleet, caller)
    await ledger.write_pipeline({"activeOperation": None, **_status(view, "closed its engines")})


def _status(view: PipelineView, doing: str) -> Obj:
    return view(trouble=None, working=(Reason.TERMINATING, f"the pipeline is being deleted and {doing}"))


async def _close_once(ctx: Context, fleet: Fleet, caller: Caller) -> str:
    """One turn of orders to engines that have just been fenced; what is still open, in words."""
    answers = [o.engine for o in still_open(fleet.engines.values(), pipeline=caller.pipeline) if o.answers]
    deadline = ctx.clock.monotonic() + ORDER_SECONDS

    async def order(step: str, names: Iterable[str], what: Any) -> None:
        # What came of it is read from the gates afterwards, never from the answer.
        if orders := dict.fromkeys(names, what):
            await fleet.run(caller, step, orders, deadline=deadline, again=True)

    # First out of the routers, so that no new request waits inside an engine that nobody will resume.
    await order("Close", answers, wire.CloseOrder())
    pause = [n for n in answers if (s := fleet.engines[n].status) is None or s.engine.paused is not True]
    await order(
        "Pause",
        pause,
        wire.PauseOrder(mode=wire.PauseMode.ABORT, drain_seconds=0, budget_seconds=ORDER_SECONDS),
    )
    staged = [n for n, e in fleet.engines.items() if e.status is not None and e.status.staged is not None]
    await order("Discard", staged, wire.DiscardOrder())
    await fleet.read_pods()
    await fleet.poll()
    return waits_for((), None, still_open(fleet.engines.values(), pipeline=caller.pipeline))


# ---------------------------------------------------------------------------------------------- rounds left over


async def bury(ctx: Context, namespace: str, rounds: Iterable[Obj]) -> None:
    """Rounds whose pipeline is gone: whoever waits is told, and nothing hangs on our finalizer.

    Only rounds that had been claimed. A round that nobody ever took waits for a pipeline of that name, or goes with
    the owner that it names.
    """
    for r in rounds:
        meta, status = r["metadata"], r.get("status") or {}
        finalizer = FINALIZERS[SYNCROUNDS.plural] in (meta.get("finalizers") or [])
        if not finalizer and not status.get("lease"):
            continue
        if not is_terminal(r):
            end = settled(
                r,
                outcome="Failed",
                reason=Reason.PIPELINE_NOT_FOUND,
                message="its RLPipeline was deleted while it ran; engines that it had closed stay closed",
                now_ms=ctx.now_ms(),
            )
            try:
                r = await ctx.kube.at(Priority.DELETE).patch_status(
                    SYNCROUNDS,
                    namespace,
                    meta["name"],
                    resource_version=meta["resourceVersion"],
                    status=end,
                    timeout=API_SECONDS,
                )
            except NotFound:
                continue
            finished(ctx, r)
        if finalizer:
            await release(ctx, SYNCROUNDS, r)


__all__ = ["bury", "end_pipeline", "is_deleting", "release", "release_overdue", "watch_deletion"]
