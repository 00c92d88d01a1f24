"""The end of an EnginePool: its engines leave the routers and their pods go, then the pool does.

Invariants:
- the pool waits for a round that uses its engines, and for routers and pods, for FINALIZE_SECONDS at most;
- an address is taken out of the routers twice: while its engine lives, so that requests stop coming, and once the pod
  is gone, because until then its gate could have added it again;
- pods are deleted under their UIDs. With ``--cascade=orphan`` they are left to whoever asked for that; adopted ones are
  always left, closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlfleet.api import labels
from rlfleet.api.conditions import ConditionStatus, PoolCondition, Reason
from rlfleet.api.timestamps import epoch_ms
from rlfleet.control import pool_adopt, pool_gates, pool_pods
from rlfleet.control.context import Context
from rlfleet.control.deletion import release
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.control.queue import After, Done, Result
from rlfleet.control.routers import Resolved, RouterClients
from rlfleet.control.saying import say
from rlfleet.kube.client import Obj
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import ENGINEPOOLS
from rlfleet.plan.deletion import holds_up, pool_waits_for, uses_engines
from rlfleet.plan.lifecycle import PodFact, pod_fact
from rlfleet.plan.pool import Delete

#: Longest that the deletion of a pool waits for a round, for routers and for its pods.
FINALIZE_SECONDS = 60.0


async def finalize(
    ctx: Context,
    pool: Obj,
    pipeline: Mapping[str, Any] | None,
    facts: Sequence[PodFact],
    found: Resolved,
    clients: RouterClients,
    memory: PoolMemory,
) -> Result:
    """Move the end of a pool on."""
    if not holds_up(pool, labels.POOL_FINALIZER):
        return Done()
    meta = pool["metadata"]
    late = (ctx.now_ms() - epoch_ms(meta["deletionTimestamp"])) / 1000 >= FINALIZE_SECONDS
    memory.see(facts, ctx.now_ms())
    active = ((pipeline or {}).get("status") or {}).get("activeOperation")
    if facts and uses_engines(active) and not late:
        await _say_waiting(ctx, pool, pool_waits_for(active, tuple(f.name for f in facts), ()))
        return After(ctx.settings.boot_poll_seconds)

    out = pool_pods.Outcome()
    leaving = [*facts, *_orphaned(ctx, pool)]
    for uid, departure in memory.departures.items():
        if uid not in memory.facts and uid not in memory.swept:
            departure.done.clear()
            memory.swept.add(uid)
    fence = int(((pipeline or {}).get("status") or {}).get("fence") or 0)
    await pool_pods.unroute(ctx, pool, [f for f in leaving if f.ip], found, clients, memory, fence=fence, out=out)
    out_of_routers = pool_pods.unrouted(memory, found, fence=fence)
    gone = [
        Delete(f, Reason.TERMINATING) for f in facts if not f.deleting and (late or not f.ip or f.uid in out_of_routers)
    ]
    await pool_pods.delete_pods(ctx, pool, gone, out)
    wait = pool_waits_for(None, tuple(f.name for f in facts), tuple(p.message for p in out.problems))
    if wait and not late:
        await _say_waiting(ctx, pool, wait)
        return After(ctx.settings.boot_poll_seconds)
    if out.problems:
        note = f"Deleted although routers could not be cleared for {FINALIZE_SECONDS:.0f} s: {out.problems[0].message}"
        ctx.events.record(pool, "Warning", Reason.ROUTER_UNREACHABLE.value, note, action="Finalize")
    await release(ctx, ENGINEPOOLS, pool)
    return Done()


async def let_go(
    ctx: Context,
    pool: Obj,
    pipeline: Mapping[str, Any] | None,
    facts: Sequence[PodFact],
    found: Resolved,
    clients: RouterClients,
    memory: PoolMemory,
) -> Result:
    """Move the end of a pool of adopted pods on: its pods stay, closed.

    The pipeline closes them (plan.repair, plan.drops: they are unwanted and nobody deletes their pods), because only
    who owns the slot drives a gate. Without a pipeline nobody does: their addresses leave the routers, that is all.
    """
    if not holds_up(pool, labels.POOL_FINALIZER):
        return Done()
    meta = pool["metadata"]
    late = (ctx.now_ms() - epoch_ms(meta["deletionTimestamp"])) / 1000 >= FINALIZE_SECONDS
    memory.see(facts, ctx.now_ms())
    out = pool_pods.Outcome()
    fence = int(((pipeline or {}).get("status") or {}).get("fence") or 0)
    if pipeline is None:
        left: list[str] = []
        going = [f for f in facts if f.ip]
    else:
        # Also while a round owns them: it is asked how far it is, nothing is ordered.
        for fact in facts:
            memory.states.pop(fact.uid, None)
        await pool_gates.observe(ctx, pool, pipeline, facts, found, memory)
        left = pool_adopt.still_open(tuple(facts), memory)
        going = [f for f in facts if f.ip and not f.live]
    await pool_pods.unroute(ctx, pool, going, found, clients, memory, fence=fence, out=out)
    wait = f"waits for {len(left)} engines to be closed: {', '.join(left[:4])}" if left else ""
    wait = wait or pool_waits_for(None, (), tuple(p.message for p in out.problems))
    if wait and not late:
        await _say_waiting(ctx, pool, wait)
        return After(ctx.settings.boot_poll_seconds)
    if wait:
        note = f"Deleted although, after {FINALIZE_SECONDS:.0f} s, it still {wait}"
        ctx.events.record(pool, "Warning", Reason.FINALIZER_CEILING.value, note[:900], action="Finalize")
    await release(ctx, ENGINEPOOLS, pool)
    return Done()


def _orphaned(ctx: Context, pool: Obj) -> list[PodFact]:
    """Pods that the garbage collector took from this pool (cascade orphan): known by UID from its status."""
    meta = pool["metadata"]
    known = {str(e.get("podUID")) for e in (pool.get("status") or {}).get("engines") or []}
    return [
        pod_fact(p, owner_uid=meta["uid"])
        for p in ctx.pods.by_label(labels.POOL, meta["name"], namespace=meta["namespace"])
        if p["metadata"]["uid"] in known and not p["metadata"].get("ownerReferences")
    ]


async def _say_waiting(ctx: Context, pool: Obj, message: str) -> None:
    kube = ctx.kube.at(Priority.DELETE, field_manager=labels.POOL_MANAGER)
    kind, terminating = PoolCondition.PROGRESSING, Reason.TERMINATING
    await say(ctx, kube, ENGINEPOOLS, pool, kind, ConditionStatus.TRUE, terminating, message)


__all__ = ["FINALIZE_SECONDS", "finalize", "let_go"]
