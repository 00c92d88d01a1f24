"""Room for rolling updates between rounds: one look per reconcile (plan.room), recorded before a round waits.

Invariant: a round waits only in a room that RLPipeline.status has, so an operator that dies at any point leaves either
no room, and its successor decides anew, or the one that is recorded, and its successor waits for the rest of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlfleet.api.conditions import Reason
from rlfleet.control.pipeline_view import PipelineView
from rlfleet.plan.elastic import wanted_pods
from rlfleet.plan.room import Room, Update, makes_room, update_of
from rlfleet.plan.triage import Triage

if TYPE_CHECKING:
    from rlfleet.control.context import Context


def make_room(ctx: Context, view: PipelineView, todo: Triage) -> tuple[Triage, Room | None]:
    """What is to be done about rounds once updates have been thought of, and the room in which the one that could
    start waits (None: it waits for no update). A room that is not recorded yet is to be opened (``open_room``) first.
    """
    ledger = view.ledger
    pending_ms = int(ledger.spec["sync"]["deadlines"]["pendingSeconds"]) * 1000
    if todo.run is None or ledger.committed is None or ctx.now_ms() - todo.run.created_ms >= pending_ms // 2:
        return todo, None
    room, pool = makes_room(
        _updates(view),
        last=Room.of(ledger.status),
        now_ms=ctx.now_ms(),
        drain_seconds=float(ledger.spec["sync"]["drainSeconds"]),
    )
    if not pool:
        return todo, None
    why = f"lets the rolling update of EnginePool {pool} take a step, which earlier rounds left no time for"
    return replace(todo, run=None, waiting=todo.run, why=(Reason.UPDATING, why)), room


async def open_room(view: PipelineView, room: Room) -> bool:
    """Record the room; False: it is recorded already."""
    ledger = view.ledger
    if Room.of(ledger.status) == room:
        return False
    ledger.generation = int(ledger.status.get("fence") or 0)  # nothing is claimed, so the fence stays as it is
    await ledger.write_pipeline({"updateRoom": room.row()})
    return True


def _updates(view: PipelineView) -> list[Update]:
    """Rolling updates of the pipeline's pools, from pools, pods and gates as observed last."""
    fleet, committed, uid = view.fleet, view.ledger.committed, view.ledger.uid
    found = []
    for name, pool in fleet.pools.items():
        if pool["spec"]["pipeline"] != view.ledger.name:
            continue
        engines = [e for e in fleet.engines.values() if e.pool == name and not e.gone]
        pods = [fleet.pods[e.name] for e in engines]
        update = update_of(pool, pods, wanted=wanted_pods(pool), engines=engines, committed=committed, pipeline=uid)
        if update is not None:
            found.append(update)
    return found
