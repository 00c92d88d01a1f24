"""Before a pipeline does anything: is its status still the latest word, and are its engines its own?

Invariants:
- a pipeline whose fence nobody can claim above claims nothing: no gate and no engine is touched;
- where gates remember a later claim than the status does, the status was lost or set back. The work of that claim goes
  on if its round is still there; otherwise one claim of the pipeline's own raises the fence above all of it, and takes
  ``committed`` away unless every engine bears it out;
- engines of a deleted pipeline of the same name are taken over only while they are closed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.rlpipeline_status import OperationKind
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.control.rounds.objects import is_terminal
from rlfleet.control.rounds.settling import end_round
from rlfleet.control.slot import own_work, paused_budget, take_slot
from rlfleet.plan.identity import Shown, Stray, is_outlived, is_poisoned, last_shown, still_committed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlfleet.control.context import Context
    from rlfleet.control.pipeline_view import PipelineView

log = logging.getLogger(__name__)
Obj = dict[str, Any]


def poisoned_fence(ctx: Context, ledger: Ledger) -> tuple[Reason, str] | None:
    """Why nothing may be claimed, with the remedy; None: the fence is one that an operator can have made."""
    fence = int(ledger.status.get("fence") or 0)
    if not is_poisoned(fence, now_ms=ctx.now_ms()):
        return None
    return (
        Reason.FENCE_POISONED,
        f"status.fence is {fence}, more than a day ahead of the clock, so every gate would refuse it and nothing is "
        "done. No operator writes such a value. Remove it, and the next claim finds the right one: "
        f"kubectl patch rlpipeline {ledger.name} -n {ledger.namespace} --subresource=status --type=json "
        """-p '[{"op":"remove","path":"/status/fence"}]'""",
    )


def shown_above(ctx: Context, ledger: Ledger, view: PipelineView) -> Shown | None:
    """The last claim that gates or the sender remember, if it is above the status and not the one in its slot."""
    shown = last_shown(view.fleet.engines.values(), view.sender.status, pipeline=ledger.uid, now_ms=ctx.now_ms())
    active = ledger.status.get("activeOperation") or {}
    if shown.generation <= int(ledger.status.get("fence") or 0) or active.get("uid") == shown.operation:
        return None
    return shown


def interrupted(rounds: Iterable[Obj], shown: Shown) -> Obj | None:
    """The round of that last claim, if it has not ended: its claim was lost with the status, and it goes on."""
    return next((r for r in rounds if r["metadata"]["uid"] == shown.operation and not is_terminal(r)), None)


async def recover(ctx: Context, ledger: Ledger, view: PipelineView, shown: Shown) -> None:
    """Raise the fence above everything that was claimed before the status was lost; judge ``committed``."""
    believed = still_committed(view.fleet.engines.values(), ledger.committed)
    message = f"gates hold generation {shown.generation}, the status only {ledger.status.get('fence') or 0}: " + (
        "it was set back; every engine bears the committed version out"
        if believed
        else "it was lost or set back, and what is committed is not known any more. Engines that serve go on serving; "
        "none is opened before the next round has committed"
    )
    lost = {} if believed else {"committed": None}
    await _raise_fence(ctx, ledger, view, message, above=shown.generation, extra=lost)
    log.warning("%s", message, extra={"pipeline": f"{ledger.namespace}/{ledger.name}"})
    ctx.events.record(ledger.pipeline, "Warning", Reason.STATUS_LOST.value, message, action="Recover")


async def finish(ctx: Context, ledger: Ledger, view: PipelineView) -> None:
    """The pipeline's own claim was left by an operator that died: what it decided was written with it."""
    await _raise_fence(ctx, ledger, view, "an operator died while it put identities right")


async def take_over(ctx: Context, ledger: Ledger, view: PipelineView, found: Stray) -> frozenset[str]:
    """Fence the closed engines that a deleted pipeline of our name left; those that would not have it.

    Their pool then enrolls them with us. They stay closed until a round brings them what we commit.
    """
    message = "engines of a deleted pipeline of the same name were taken over"
    fleet = await _raise_fence(ctx, ledger, view, message, above=found.generation)
    mine = {
        n
        for n, e in fleet.engines.items()
        if e.gone or (e.status is not None and e.status.fence.pipeline == ledger.uid)
    }
    log.info("took over %d engines of a deleted pipeline", len(mine & set(found.closed)))
    return frozenset(set(found.closed) - mine)


async def _raise_fence(
    ctx: Context, ledger: Ledger, view: PipelineView, message: str, *, above: int = 0, extra: Obj | None = None
) -> Fleet:
    """Claim in the pipeline's own name, pass the barrier, free the slot; the engines as they answered behind it."""
    fleet = Fleet.of(ctx, ledger)
    operation = own_work(ledger, OperationKind.REPAIR.value)
    await take_slot(ledger, fleet, operation, deadline=lambda: paused_budget(ctx, ledger), above=above, extra=extra)
    view.bind(fleet)
    await ledger.write_pipeline({"activeOperation": None, **view(trouble=None, working=(Reason.STATUS_LOST, message))})
    return fleet


async def settle_outlived(ctx: Context, ledger: Ledger, view: PipelineView, rounds: Iterable[Obj]) -> set[str]:
    """Rounds whose status came back from the past end here: others have claimed the engines since. Their UIDs."""
    shown = last_shown(view.fleet.engines.values(), view.sender.status, pipeline=ledger.uid, now_ms=ctx.now_ms())
    ended = set()
    for r in rounds:
        leased = int(((r.get("status") or {}).get("lease") or {}).get("generation") or 0)
        if is_terminal(r) or not is_outlived(uid=r["metadata"]["uid"], leased=leased, shown=shown):
            continue
        message = (
            f"the round was claimed under generation {leased}, and gates hold generation {shown.generation} of other "
            "work: its status was set back to before its end. Sync again"
        )
        await end_round(ledger, r, outcome="Failed", reason=Reason.STATUS_LOST, message=message)
        ended.add(r["metadata"]["uid"])
    return ended
