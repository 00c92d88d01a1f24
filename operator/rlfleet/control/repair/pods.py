"""Rules that replace pods between rounds.

Invariant: a pod is deleted under its UID, and only while no claim was made since its engine was looked at: a round may
be loading it right now.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import API_SECONDS, FenceLost, Ledger
from rlfleet.kube.errors import Conflict, NotFound
from rlfleet.kube.resources import PODS
from rlfleet.plan.identity import poisoned_gates
from rlfleet.plan.rounds import Engine
from rlfleet.plan.verdicts import is_stuck, replaceable, to_replace

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
Obj = dict[str, Any]


async def replace_strangers(ctx: Context, ledger: Ledger, fleet: Fleet, others: Iterable[str]) -> frozenset[str]:
    """Delete pods whose gates will never take an order of ours (``onFailure: Replace``); their names.

    ``others`` belong to a deleted pipeline of our name and may serve what it committed. A gate with a poisoned fence
    takes orders from nobody.
    """
    poisoned = poisoned_gates(fleet.engines.values(), now_ms=ctx.now_ms())
    names = replaceable(fleet.engines.values(), {*others, *poisoned}, on_failure=ledger.spec["sync"]["onFailure"])
    theirs = "its gate belongs to a deleted RLPipeline of the same name"
    damaged = "its gate holds a fence that no operator can have written: its disk was restored or altered"
    await _replace(ctx, ledger, fleet.engines, [n for n in names if n in poisoned], Reason.FENCE_POISONED, damaged)
    await _replace(ctx, ledger, fleet.engines, [n for n in names if n not in poisoned], Reason.OTHER_PIPELINE, theirs)
    return frozenset(names)


async def replace_closed(ctx: Context, ledger: Ledger, fleet: Fleet, names: Collection[str]) -> None:
    """Delete pods that neither repair nor a CatchUp heals; their pool makes new ones, which are caught up in turn."""
    poisoned = to_replace(fleet.engines.values(), on_failure=ledger.spec["sync"]["onFailure"])
    stuck = {n for n in poisoned if (status := fleet.engines[n].status) is not None and is_stuck(status)}
    why = {
        Reason.UNCERTAIN: "an operation at its gate has no known end, and no pause proved its engine idle in time",
        Reason.POISONED: "a load began and nothing proves what its engine holds",
        Reason.CATCH_UP_EXHAUSTED: "its catch-up attempts are spent",
    }
    for name in names:
        reason = (
            Reason.UNCERTAIN if name in stuck else Reason.POISONED if name in poisoned else Reason.CATCH_UP_EXHAUSTED
        )
        await _replace(ctx, ledger, fleet.engines, [name], reason, why[reason])


async def _replace(
    ctx: Context, ledger: Ledger, engines: Mapping[str, Engine], names: Iterable[str], reason: Reason, why: str
) -> None:
    names = tuple(names)
    if not names:
        return
    fence = ledger.status.get("fence")
    await ledger.read_pipeline()
    if ledger.status.get("fence") != fence:
        raise FenceLost("a round was claimed since the engines were looked at: it may be loading them right now")
    for name in names:
        engine = engines[name]
        message = f"{name}: {why}; the pod is replaced"
        try:
            await ledger.kube.delete(PODS, ledger.namespace, name, uid=engine.pod_uid, timeout=API_SECONDS)
        except (NotFound, Conflict):
            continue
        log.warning(message, extra={"pipeline": f"{ledger.namespace}/{ledger.name}"})
        ctx.events.record(ledger.pipeline, "Warning", reason.value, message, action="Replace")
