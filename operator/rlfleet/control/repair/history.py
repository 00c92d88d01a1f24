"""Rules about SyncRound objects: let ended ones go, settle abandoned ones, sweep old ones.

Invariant: a round is settled at most once and by evidence only, and what explains an engine is not swept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import epoch_ms
from rlfleet.control.deletion import release_overdue
from rlfleet.control.rounds.ledger import API_SECONDS, Ledger, RoundGone
from rlfleet.control.rounds.objects import is_terminal, kind_of
from rlfleet.control.rounds.settling import end_round
from rlfleet.kube.errors import Conflict, NotFound
from rlfleet.kube.resources import RLPIPELINES, SYNCROUNDS
from rlfleet.plan.repair import Abandoned, RoundFacts, abandoned, evidence, sweep
from rlfleet.plan.rounds import Engine

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
Obj = dict[str, Any]


def facts_of(obj: Obj) -> RoundFacts:
    """One SyncRound as repair and sweep see it."""
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    plan = status.get("plan") or {}
    finished = status.get("finishedAt")
    return RoundFacts(
        name=meta["name"],
        uid=meta["uid"],
        phase=str(status.get("phase") or "Pending"),
        version=int(spec["version"]),
        generation=int((status.get("lease") or {}).get("generation") or 0),
        planned=bool(plan),
        allow_rollback=bool(spec.get("allowRollback")),
        created_ms=epoch_ms(meta["creationTimestamp"]),
        finished_ms=epoch_ms(finished) if finished else None,
        deleting="deletionTimestamp" in meta,
        members=frozenset(m["podUID"] for m in plan.get("members") or []),
        kind=kind_of(obj),
    )


def _of(ledger: Ledger, obj: Obj) -> Ledger:
    """A ledger of its own for one round: what it writes belongs to no claim."""
    one = Ledger(ledger.ctx, ledger.pipeline, holder=ledger.holder)
    one.round = obj
    return one


async def let_ended_go(ledger: Ledger, rounds: Sequence[Obj], *, claimed: str | None) -> None:
    """Remove our finalizer from rounds whose operator died after it had freed the slot: nobody else ever would."""
    for r in rounds:
        held = labels.ROUND_FINALIZER in (r["metadata"].get("finalizers") or [])
        if held and is_terminal(r) and r["metadata"]["uid"] != claimed:
            await _of(ledger, r).set_finalizer(False)


async def release_ceilings(ctx: Context, pipeline: Obj, rounds: Sequence[Obj]) -> None:
    """Nothing that is being deleted waits for our finalizer longer than its ceiling."""
    await release_overdue(ctx, RLPIPELINES, pipeline)
    for r in rounds:
        await release_overdue(ctx, SYNCROUNDS, r)


async def settle_abandoned(ctx: Context, ledger: Ledger, rounds: Sequence[Obj]) -> Abandoned:
    """Settle rounds that moved engines although the slot is free; what is returned also says which one goes on."""
    found = abandoned([facts_of(r) for r in rounds], ledger.committed)
    objects = {r["metadata"]["uid"]: r for r in rounds}
    for facts, why in found.settle:
        one = _of(ledger, objects[facts.uid])
        message = f"abandoned in {facts.phase}: {why}; its engines are repaired by the resume rule"
        try:
            await end_round(one, objects[facts.uid], outcome="Failed", reason=Reason.ROUND_ABANDONED, message=message)
        except RoundGone:
            continue  # deleted by force meanwhile: nothing is left to settle
        assert one.round is not None
        objects[facts.uid].update(one.round)
        log.warning(message, extra={"round": facts.name, "roundUID": facts.uid})
        ctx.events.record(one.round, "Warning", Reason.ROUND_ABANDONED.value, message, action="Settle")
    return found


async def sweep_history(ctx: Context, ledger: Ledger, rounds: Sequence[Obj], engines: Sequence[Engine]) -> None:
    """Delete ended rounds past ``ttlSecondsAfterFinished`` or beyond ``historyLimit``."""
    spec = ledger.spec
    old = sweep(
        [facts_of(r) for r in rounds],
        evidence(engines),
        now_ms=ctx.now_ms(),
        ttl_ms=int(spec.get("ttlSecondsAfterFinished", 3600)) * 1000,
        limit=int(spec.get("historyLimit") or 1),
        last=ledger.status.get("lastRound"),
    )
    for r in old:
        try:
            await ledger.kube.delete(SYNCROUNDS, ledger.namespace, r.name, uid=r.uid, timeout=API_SECONDS)
        except (NotFound, Conflict):
            continue  # gone already, or another round bears the name
