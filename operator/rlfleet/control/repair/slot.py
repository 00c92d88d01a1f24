"""Taking the slot of a pipeline for work outside rounds.

Invariants (DESIGN section 5, Fence and One owner):
- the fence is raised, and every gate is told, before the first order: whoever led before can change nothing any more;
- a gate that shows a higher generation proves that the status was lost, or that we are deposed; never neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlfleet.control.peers import Caller
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import FenceLost, Ledger
from rlfleet.plan.claims import Barrier, Step, barrier_step

Obj = dict[str, Any]

LOOK_SECONDS = 0.2


async def take_slot(
    ledger: Ledger, fleet: Fleet, operation: Obj, *, deadline: Callable[[], float], extra: Obj | None = None
) -> Caller:
    """Claim the slot for ``operation`` (kind, name, uid, committed) and pass the barrier, all but its second step.

    There is no round whose status could carry the generation. The sender is left alone: nothing outside rounds asks it
    for weights. ``deadline``: loop time until which operations of somebody before us are waited for.
    """
    ledger.round = None
    await ledger.claim(operation, extra=extra)
    at = Barrier(ledger.generation, needs_round=False)
    while (step := barrier_step(at)) is not Step.DECIDE:
        caller = Caller(ledger.uid, str(operation["uid"]), ledger.generation)
        if step is Step.FENCE:
            await fleet.read_pods()
            at = replace(at, fenced=True, shown=await fleet.fence(caller))
        elif step is Step.READ_PIPELINE:
            await ledger.read_pipeline()
            at = replace(at, fence=int(ledger.status.get("fence") or 0))
        elif step is Step.CLAIM_ABOVE:
            await ledger.claim(operation, above=at.shown)
            at = Barrier(ledger.generation, needs_round=False, claims=at.claims + 1)
        elif step is Step.WAIT:
            await _await_in_flight(fleet, deadline())
            at = replace(at, waited=True)
        else:
            raise FenceLost(f"deposed: generation {at.shown} is held, ours was {at.generation}")
    return Caller(ledger.uid, str(operation["uid"]), ledger.generation)


async def _await_in_flight(fleet: Fleet, deadline: float) -> None:
    """What somebody before us started ends by itself, within the deadline that its gate keeps."""
    while busy := [n for n, e in fleet.engines.items() if e.status is not None and e.status.in_flight]:
        if fleet.ctx.clock.monotonic() >= deadline:
            return
        await asyncio.sleep(LOOK_SECONDS)
        await fleet.poll(busy)
